"""Starts the fork server of this process and asks it for children.

Owns the server's life: it is started by the first strategy that needs children and ends with the
last. Also what can be known of their processes from outside. What a child does is `child`'s, what
the controller says to it `group`'s.
"""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import final

from stratagem import _integrations
from stratagem._checks import require_folder
from stratagem.devices.host import Host
from stratagem.errors import ReplicaError
from stratagem.processes import early_server, losses
from stratagem.processes.pipe import Wire
from stratagem.processes.registry import Registry

_START_DEADLINE_S = 120.0
_STOP_GRACE_S = 5.0
_ENDING_S = 0.1
_MAX_MESSAGE_BYTES = 4096
_STOPPED, _ENDED = frozenset({"T", "t"}), frozenset({"Z", "X", "gone"})


@final
class ForkedChildren:
    """Children that the fork server of this process makes.

    Args:
        host: The machine.
    """

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()
        self._num_oom_kills = 0
        self._server: ForkServer | None = None
        self._orders: list[tuple[int, socket.socket]] = []

    def begin(self, count: int) -> None:
        require_folder()
        self._num_oom_kills = self._host.num_oom_kills()
        self._server = self._server or acquire()
        for _ in range(count):
            self._orders.append(self._server.order())

    def start(self, registry: Registry, timeout_s: float) -> "Iterator[tuple[ForkedProcess, Wire]]":
        while self._server is not None and self._orders:
            pid = self._server.started(self._orders[0][0])
            _, sock = self._orders.pop(0)
            sock.settimeout(timeout_s)
            wire = Wire(sock, registry.reference, registry.resolve, keeps_classes=True)
            yield ForkedProcess(pid, self._server, self._host, self._num_oom_kills), wire

    def abort(self, run_number: int) -> None:
        """They see the signals of this process."""

    def release(self) -> None:
        for _, sock in self._orders:
            sock.close()  # whoever comes to be at its other end leaves at once
        self._orders.clear()
        if self._server is not None:
            self._server = None
            release()


@final
class ForkedProcess:
    """A child of the fork server.

    Args:
        pid: Its process.
        server: Whose child it is.
        host: The machine.
        num_oom_kills: How many processes the machine had killed for memory before.
    """

    def __init__(self, pid: int, server: "ForkServer", host: Host, num_oom_kills: int) -> None:
        self.pid = pid
        self._server = server
        self._host = host
        self._num_oom_kills = num_oom_kills

    def __str__(self) -> str:
        return f"pid {self.pid}"

    @property
    def state(self) -> str:
        """The letter of the kernel: R runs, S sleeps, T is stopped, Z has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split(maxsplit=1)[0]
        except OSError:
            return "gone"

    @property
    def is_stopped(self) -> bool:
        return self.state in _STOPPED

    def has_ended(self) -> bool:
        return self.state in _ENDED

    def wait(self, timeout_s: float) -> bool:
        return self._server.status_of(self.pid, timeout_s) is not None

    def how_it_ended(self, timeout_s: float) -> tuple[str, str]:
        status = self._server.status_of(self.pid, timeout_s)
        hint = losses.out_of_memory(
            status, self._num_oom_kills, self._host.num_oom_kills(), self._host.total_memory_bytes()
        )
        return losses.describe_status(status), hint

    def show_stack(self) -> None:
        self._signal(signal.SIGUSR2)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@final
class ForkServer:
    """The connection to a fork server of this process."""

    def __init__(self) -> None:
        self._socket, self._process = early_server.take() or _started()
        _sockets.add(self._socket)
        self._orders = itertools.count(1)
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._is_gone = False
        self.num_users = 0

    def order(self) -> tuple[int, socket.socket]:
        """Asks for a new child, without waiting for it: the number of the order and this end of its pipe."""
        number = next(self._orders)
        ours, theirs = socket.socketpair()
        _sockets.add(ours)
        try:
            with theirs:
                modules = _integrations.modules_for_children()  # a server that was started early lacks them
                order = json.dumps({"order": number, "path": sys.path, "modules": modules}).encode()
                with contextlib.suppress(BrokenPipeError):  # it has ended: whoever waits for the child is told
                    socket.send_fds(self._socket, [order], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return number, ours

    def started(self, number: int) -> int:
        """Waits for the child of an order, and gives its process id."""
        deadline = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < deadline:
            if number in self._pids:
                return self._pids.pop(number)
            if not self._take_message(timeout_s=0.1) and self._has_ended():
                raise ReplicaError(
                    f"the fork server ended with code {self._process.returncode} before it started a replica; "
                    f"its output above says why"
                )
        raise ReplicaError(f"the fork server did not start a replica within {_START_DEADLINE_S:.0f} s")

    def status_of(self, pid: int, timeout_s: float) -> int | None:
        """How a child ended (as `os.waitpid` tells), or `None` if that is not known in time."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._statuses and self._take_message(timeout_s=max(0.0, deadline - time.monotonic())):
            pass
        return self._statuses.get(pid)

    def stop(self) -> None:
        """Ends the server and every child that is left."""
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever else has this end
        self._socket.close()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children follow: the kernel sees to that
            self._process.wait()

    def _take_message(self, timeout_s: float) -> bool:
        """Takes in what the server says next; `False` when it has said nothing in time, or is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if self._is_gone or not poll.poll(1000 * timeout_s):
            return False
        try:
            data = self._socket.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True  # the end of another strategy, which may come at any moment, has taken it in
        except ConnectionResetError:
            data = b""
        if not data:
            self._is_gone = True
            return False
        message: dict[str, int] = json.loads(data)
        if "ended" in message:
            self._statuses[message["ended"]] = message["status"]
        else:
            self._pids[message["order"]] = message["started"]
        return True

    def _has_ended(self) -> bool:
        if self._is_gone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)  # it is about to
        return self._process.poll() is not None


def _started() -> tuple[socket.socket, early_server.ServerProcess]:
    """A new server, and this end of the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return ours, early_server.start_server(theirs.fileno(), _integrations.modules_for_children())


# A process that the program forks must not hold them: the server would not notice that the program is gone.
_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_fork() -> None:
    for each in list(_sockets):
        each.close()


os.register_at_fork(after_in_child=_close_in_fork)

_servers: dict[int, ForkServer] = {}


def acquire() -> ForkServer:
    """The fork server of this process, started if there is none; give it back with `release`."""
    server = _servers.get(os.getpid()) or ForkServer()
    _servers[os.getpid()] = server
    server.num_users += 1
    return server


def release() -> None:
    """Ends the server when its last user gives it back."""
    server = _servers[os.getpid()]
    server.num_users -= 1
    if not server.num_users:
        del _servers[os.getpid()]
        server.stop()
