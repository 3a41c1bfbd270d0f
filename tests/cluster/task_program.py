"""A task of a cluster in a process of its own, which does what it is told line by line.

Each line is an expression; its value goes back as JSON, or the error that it raised.
"""

import json
import os
import sys
import time
from typing import Any

from stratagem.cluster import Member, Membership, Server, TaskLost

membership: Membership | None = None
server: Server | None = None
heard: list[TaskLost] = []


def begin(spec: Any, job: str, index: int, **options: Any) -> str:
    """Makes the membership of this task, and waits until all have come."""
    global membership  # noqa: PLW0603
    membership = Membership(spec, job, index, **options)
    membership.on_lost(heard.append)
    membership.join()
    return "joined"


def listen(spec: Any, job: str, index: int) -> str:
    global server  # noqa: PLW0603
    server = Server(spec, job, index)
    return server.target


def m() -> Membership:
    assert membership is not None
    return membership


def wait_for_loss(count: int = 1, timeout_s: float = 30.0) -> list[list[Any]]:
    """Every task that is lost once there are so many: its name, process and why; by attribute and by callback."""
    deadline = time.monotonic() + timeout_s
    while (len(m().losses) < count or len(heard) < count) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert m().lost == (m().losses[0] if m().losses else None)
    assert set(heard) == set(m().losses)
    return [[lost.member.task, lost.member.pid, lost.why] for lost in m().losses]


def fork_and_sleep(seconds: float) -> int:
    """A child of this process which has inherited everything, and which outlives it."""
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid


def in_forked_child(expression: str) -> str:
    """What becomes of an expression in a child of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcome = str(eval(expression))  # noqa: S307
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(write, outcome.encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        outcome = said.read()
    os.waitpid(pid, 0)
    return outcome


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return value.task if isinstance(value, Member) else str(value)


def main(names: dict[str, Any]) -> None:
    """Does what the lines say, with these names."""
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"value": eval(line, names)}  # noqa: S307  # from the test that started this process
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer, default=plain), flush=True)


if __name__ == "__main__":
    main(globals())
