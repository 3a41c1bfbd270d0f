"""Tasks of a cluster as real processes, which a test tells what to do."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cluster import nursery

PATIENCE_S = 40.0


class TaskProcess:
    """One process that runs `task_program` or another like it, here or on a machine of `tests.cluster.machines`."""

    def __init__(self, prefix: Sequence[str] = (), program: str = "tests.cluster.task_program") -> None:
        self.process: subprocess.Popen[bytes] = nursery.Program(
            ["-m", program],
            prefix[-1] if prefix else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=nursery.ROOT,
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, expression: str) -> None:
        """Has something computed, without waiting for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{expression}\n".encode())
        self.process.stdin.flush()

    def answer(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """What came of the next thing that it was sent."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                assert selector.select(max(0.0, deadline - time.monotonic())), f"no answer within {timeout_s} s"
                piece = os.read(self.process.stdout.fileno(), 65536)
                assert piece, f"the task has ended with {self.process.wait(timeout_s)}"
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def has_answered(self) -> bool:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return bool(self._unread or selector.select(0))

    def ask(self, expression: str) -> Any:
        """The value of something; an error fails the test."""
        self.send(expression)
        return self.value()

    def value(self) -> Any:
        answer = self.answer()
        assert "value" in answer, answer
        return answer["value"]

    def error(self) -> tuple[str, str]:
        answer = self.answer()
        assert "error" in answer, answer
        return answer["error"], answer["message"]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        deadline = time.monotonic() + PATIENCE_S
        while number == signal.SIGSTOP and not self._is_stopped():  # which takes a moment
            assert time.monotonic() < deadline, f"process {self.pid} does not stop"
            time.sleep(0.002)

    def _is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def started(count: int) -> Iterator[list[TaskProcess]]:
    """So many processes on this machine, gone at the end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(TaskProcess())) for _ in range(count)]


def free_ports(count: int) -> list[int]:
    """Ports of loopback at which nobody listens."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def workers(count: int) -> dict[str, list[str]]:
    """A cluster of so many workers on loopback."""
    return {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}


def begin(tasks: Sequence[TaskProcess], cluster: dict[str, list[str]], **options: Any) -> None:
    """Has the tasks join a cluster as its workers, all at once."""
    for index, task in enumerate(tasks):
        send_begin(task, cluster, index, **options)
    for task in tasks:
        assert task.value() == "joined"


def send_begin(task: TaskProcess, cluster: Any, index: int, **options: Any) -> None:
    task.send(f"begin({cluster!r}, 'worker', {index}, **{options!r})")


def listening_at(pid: int) -> set[str]:
    """Where the TCP sockets of a process of this machine listen, as `host:port` of `/proc/net` in hexadecimal."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].lower())
    return found
