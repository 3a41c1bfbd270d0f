"""Starts the fork server of a program before the program itself, so that both load torch at the same time.

`stratagem run --devices cpu:4` knows that there will be replicas. It starts the server and becomes the program, which
takes the server over when it first needs children, if nothing that they would have from the program has changed since.
Loads nothing that takes time.
"""

import contextlib
import hashlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

from stratagem import _env

_PR_SET_PDEATHSIG = 1
# What a process keeps from its parent for life, or until it changes it itself; and what it may have given up.
_STATUS = ("Umask", "Groups", "Cap", "NoNewPrivs", "Seccomp", "SigIgn", "SigBlk")
_FILES = ("cgroup", "oom_score_adj")
_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))


class ServerProcess(Protocol):
    """The process of a fork server, as `subprocess` or this file knows it."""

    @property
    def returncode(self) -> int | None:
        """How it ended, if that is known."""

    def poll(self) -> int | None:
        """How it ended, or `None` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; raises `subprocess.TimeoutExpired` if it does not come."""

    def kill(self) -> None:
        """Ends it."""


def start_server(
    descriptor: int,
    modules: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    parent: int | None = None,
) -> "subprocess.Popen[bytes]":
    """Starts a fork server that serves the controller at the other end of a socket.

    Args:
        descriptor: The server's end.
        modules: What it imports besides its own.
        environment: Its environment, if that is not the one of this process.
        parent: Its parent, if it is to end with that one in any case.
    """
    imports = ", ".join(["stratagem.processes.forkserver", *modules])
    # What is imported stays: to look for garbage in it, again and again, would take a tenth of the time.
    code = f"import gc; gc.disable(); import {imports}; stratagem.processes.forkserver.main({descriptor})"
    if parent is not None:
        # The parent may have ended before the first call took hold.
        ends = f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})"
        code = f"import ctypes, os; {ends}; os.getppid() == {parent} or os._exit(0); {code}"
    return subprocess.Popen(
        # -P: a file of the user's in the current folder must not stand in for a library.
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is the controller's to handle, also before the server can say so
        pass_fds=[descriptor],
        env=environment,
    )


def start_early(environment: Mapping[str, str]) -> dict[str, str]:
    """Starts the server of the program that this process is about to become.

    Args:
        environment: That of the program.

    Returns:
        What its environment has besides.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # Processes that the program forks before it takes the server over have the socket, too.
        server = start_server(theirs.fileno(), environment=environment, parent=os.getpid())
        server.returncode = 0  # nobody here waits for it
    os.set_inheritable(ours.fileno(), True)
    fields = [os.getpid(), server.pid, os.fstat(ours.fileno()).st_ino, _surroundings(environment)]
    return {_env.EARLY_SERVER: json.dumps([ours.detach(), *fields])}


def take() -> tuple[socket.socket, ServerProcess] | None:
    """The server that was started for this process, if there is one, and its children would be as from a new one."""
    try:
        descriptor, owner, pid, inode, surroundings = json.loads(_env.take_early_server() or "")
    except (ValueError, TypeError):
        return None
    if owner != os.getpid() or not _is_socket(descriptor, inode):
        return None  # the variable has come down to a process that the program has started, or it has closed all files
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    try:
        process = EarlyServer(pid)
    except OSError:  # the program has waited for it, or may not watch processes: the server ends by itself
        connection.close()
        return None
    if surroundings == _surroundings(_env.for_process({})) and process.poll() is None:
        return connection, process
    connection.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    return None


@final
class EarlyServer:
    """A process that this one has started before it became another program.

    Args:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)
        try:
            os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # fails for others than children
        except OSError:
            os.close(self._handle)
            raise

    def poll(self) -> int | None:
        if self.returncode is None and self._has_ended(0.0):
            self._reap()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            self._reap()
        return self.returncode or 0

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _has_ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def _reap(self) -> None:
        self.returncode = 0
        with contextlib.suppress(ChildProcessError):  # the program has waited for all its children
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._handle)


def _is_socket(descriptor: int, inode: int) -> bool:
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _surroundings(environment: Mapping[str, str]) -> str:
    """What children have from the process that starts their server, besides its files; short."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS}
    outputs = [(each.st_dev, each.st_ino) for each in map(os.fstat, (1, 2))]
    ids = [os.getresuid(), os.getresgid(), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]
    own = Path("/proc/self")
    kept = [line for line in (own / "status").read_text().splitlines() if line.startswith(_STATUS)]
    kept += [(own / name).read_text() for name in _FILES if (own / name).exists()]
    kept += [os.readlink(each) for each in sorted((own / "ns").iterdir())]
    told = [sorted(environment.items()), os.getcwd(), sorted(os.sched_getaffinity(0)), limits, outputs, ids, kept]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
