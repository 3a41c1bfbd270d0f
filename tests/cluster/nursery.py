"""Starts programs of tests from a process that has imported torch: that takes Python seconds, a fork does not.

What is started is a child of the test's process, as with `subprocess`: the guards have made it the
one that adopts, and the process between the two ends at once. The fork server that a program may need
is forked too, before the program begins.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
_MOST_BYTES = 2**18
_LOOK_S = 0.005
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000

current: "Nursery | None" = None


class Nursery:
    """The process that others are forked from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        assert self._socket.recv(1), "the nursery could not start"

    def start(self, module: str, namespace: str | None = None) -> "Task":
        """Runs a module as a program that is told what to do, on a machine that is a network namespace."""
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        try:
            pid = self._fork({"module": module, "namespace": namespace}, [stdin, stdout, 2])
        finally:
            os.close(stdin)
            os.close(stdout)
        return Task(pid, os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb"))

    def run(
        self,
        program: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
        warnings_are_errors: bool = False,
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a program to its end, as `subprocess.run` does with its output captured."""
        request = {
            "path": str(program),
            "arguments": list(arguments),
            "warnings_are_errors": warnings_are_errors,
            "environment": {**os.environ, **(environment or {})},
        }
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
            child = Forked(self._fork(request, [nothing.fileno(), out.fileno(), err.fileno()]))
            try:
                code = child.wait(timeout_s)
            finally:
                child.kill()
            for each in (out, err):
                each.seek(0)
            return subprocess.CompletedProcess(program, code, out.read().decode(), err.read().decode())

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20)

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        request = {"environment": dict(os.environ), "folder": os.getcwd(), **request}
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return int(self._socket.recv(32))


class Forked:
    """A process that was started so, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Task(Forked):
    """One that is told what to do."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin, self.stdout = stdin, stdout


@contextlib.contextmanager
def opened() -> Iterator["Nursery"]:
    """Inside the block tasks are forked."""
    global current  # noqa: PLW0603
    current = Nursery()
    try:
        yield current
    finally:
        current.close()
        current = None


# In the process that others are forked from, and in those


def _main(connection: socket.socket) -> None:
    import torch._dynamo  # noqa: F401  # which the first optimizer of a process imports, for a second

    import stratagem as sg
    import tests.cluster.task_program
    import tests.faults.worker_program
    import tests.parameters.network.task_program  # noqa: F401

    for name in sg.__all__:
        getattr(sg, name)  # names are imported when they are used
    connection.send(b"+")
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        if not request:
            return
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                connection.close()
                os.close(read)
                os.close(write)
                _become(json.loads(request), descriptors)
                return
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from now on the process is the test's child
        connection.send(os.read(read, 32))
        for each in (read, write, *descriptors):
            os.close(each)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    if namespace := request.get("namespace"):
        _enter(namespace)
    _ServerToBe.prepare()
    if module := request.get("module"):
        sys.argv = [module]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    os.chdir(request["folder"])
    if request["warnings_are_errors"]:
        warnings.simplefilter("error")
    path = request["path"]
    sys.argv = [path, *request["arguments"]]
    sys.path[0] = str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")


def _enter(namespace: str) -> None:
    """Moves this process to a machine of `tests.cluster.machines`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"this process cannot enter the network namespace {namespace}")


class _ServerToBe(Forked):
    """A child that waits to become the fork server of this process, in place of a Python that imports torch again."""

    @classmethod
    def prepare(cls) -> None:
        from stratagem.replicas import launcher

        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:  # else it died before the line above took hold
                _serve(theirs)
            os._exit(0)
        theirs.close()
        child, start_another = cls(pid), launcher._start_server

        def start(descriptor: int) -> Any:
            from stratagem import _integrations

            launcher._start_server = start_another
            order = {
                "modules": list(_integrations.modules_for_children()),
                "environment": dict(os.environ),
                "folder": os.getcwd(),
            }
            with ours:
                socket.send_fds(ours, [json.dumps(order).encode()], [descriptor])
            return child

        launcher._start_server = start
        os.register_at_fork(after_in_child=ours.close)


def _serve(connection: socket.socket) -> None:
    with connection:
        text, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 1)
    if not text:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    order = json.loads(text)
    os.setpgid(0, 0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    for module in order["modules"]:
        importlib.import_module(module)
    from stratagem.replicas import forkserver

    forkserver.main(descriptors[0])


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own:
        _main(own)
