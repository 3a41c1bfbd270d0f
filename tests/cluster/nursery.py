"""Starts tasks of tests from a process that has imported everything: that takes Python seconds, a fork does not.

What is started is a child of the test's process, as with `subprocess`: the guards have made it the
one that adopts, and the process between the two ends at once.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_MOST_BYTES = 2**18
_LOOK_S = 0.005

current: "Nursery | None" = None


class Nursery:
    """The process that others are forked from."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        assert self._socket.recv(1), "the nursery could not start"

    def start(self, module: str) -> "Forked":
        """Runs a module as a program, with the environment of this moment."""
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        request = json.dumps([module, dict(os.environ)]).encode()
        socket.send_fds(self._socket, [request], [stdin, stdout])
        pid = int(self._socket.recv(32))
        os.close(stdin)
        os.close(stdout)
        return Forked(pid, os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb"))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20)


class Forked:
    """A process that was started so, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"process {self.pid} has not ended within {timeout_s} s"
            time.sleep(_LOOK_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Inside the block tasks are forked."""
    global current  # noqa: PLW0603
    current = Nursery()
    try:
        yield
    finally:
        current.close()
        current = None


def _main(connection: socket.socket) -> None:
    import stratagem as sg
    import tests.cluster.task_program
    import tests.faults.worker_program
    import tests.parameters.network.task_program  # noqa: F401

    _ = sg.MultiWorkerMirroredStrategy, sg.config  # names are imported when they are used
    connection.send(b"+")
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
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
                _become(*json.loads(request), *descriptors)
                return
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # from now on the process is the test's child
        connection.send(os.read(read, 32))
        for each in (read, write, *descriptors):
            os.close(each)


def _become(module: str, environment: dict[str, str], stdin: int, stdout: int) -> None:
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own:
        _main(own)
