"""Describes who takes part and who is gone."""

import dataclasses
from collections.abc import Iterable
from typing import final

from stratagem.cluster.channel import ClosedError
from stratagem.cluster.membership.member_messages import Body
from stratagem.cluster.spec import Task


@final
@dataclasses.dataclass(frozen=True)
class Member:
    """A task that takes part, and its process.

    Args:
        task: Its name, such as `worker/1`.
        address: The address at which it listens, or from which it connected.
        machine: The name of its machine.
        pid: The number of its process there.
    """

    task: str
    address: str
    machine: str
    pid: int

    def to_body(self) -> Body:
        """As a message."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.task} ({self.address}, pid {self.pid} on {self.machine})"


@final
@dataclasses.dataclass(frozen=True)
class TaskLost:
    """A task that was lost.

    Args:
        member: Which task it was, and where.
        why: How the loss was noticed, or the reason that the task gave.
    """

    member: Member
    why: str

    def to_body(self) -> Body:
        """As a message."""
        return self.member.to_body() | {"why": self.why}

    @classmethod
    def from_body(cls, body: Body) -> "TaskLost":
        """From a message."""
        return cls(Member(body["task"], body["address"], body["machine"], body["pid"]), body["why"])

    def __str__(self) -> str:
        return f"{self.member} was lost: {self.why}"


def why_closed(error: ClosedError) -> str:
    """What the end of a connection means for the task at its other end."""
    return f"{error} without leaving the cluster first; its process has ended" if error.by_other_side else str(error)


def missing_text(expected: Iterable[Task], present: Iterable[str], timeout_s: float, reason: str = "") -> str:
    """Who has not come, who has, and what to do."""
    here = list(present)
    missing = [str(task) for task in expected if task.name not in here]
    come = f"{', '.join(here)} {'is' if len(here) == 1 else 'are'} here" if here else "nobody is here"
    return (
        f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} not come after {timeout_s:g} s"
        f"{f' ({reason})' if reason else ''}; {come}; start what is missing, or raise join_timeout_s={timeout_s:g}"
    )
