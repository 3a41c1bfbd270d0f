"""Describes who takes part and who is gone, and tells from signs of life which of the two a task is."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Final, final

from stratagem._clock import Clock
from stratagem.cluster.channel import Channel, ClosedError
from stratagem.cluster.membership.member_messages import Body
from stratagem.cluster.spec import Task
from stratagem.errors import ClusterSpecError

_LOOKS_PER_BEAT: Final = 4


@final
@dataclasses.dataclass(frozen=True)
class Member:
    """A task that takes part, and the process that it is.

    Args:
        task: Its name, such as `worker/1`.
        address: Where it listens, or the address that it came from.
        machine: The name of its machine.
        pid: Its process there.
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
    """A task that is gone.

    Args:
        member: Which task it was, and where.
        why: How that was noticed, or what it said itself.
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


@final
class Pulse:
    """How long another task has been silent, by a clock that stands still while this process does.

    A beat that is due is missed when the one after it is nearly due, so that what the network has to
    send again is not counted as missed.

    Args:
        heartbeat_s: After how long each sign of life follows the last.
        num_missed: After how many missed ones the other is lost.
        monotonic: The clock that never stands still.
    """

    def __init__(self, heartbeat_s: float, num_missed: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.clock = Clock(heartbeat_s / _LOOKS_PER_BEAT, monotonic)
        self._limit_s = (num_missed + 0.75) * heartbeat_s
        self._heard_at = self.clock.now_s()

    def heard(self) -> None:
        """The other gave a sign of life."""
        self._heard_at = self.clock.now_s()

    @property
    def silent_s(self) -> float:
        """For how long the other has given none."""
        return self.clock.now_s() - self._heard_at

    def is_lost(self) -> bool:
        """Whether the other has been silent for too long; is to be asked four times in a beat."""
        return self.silent_s >= self._limit_s

    def why(self, channel: Channel) -> str:
        """What its silence means."""
        reason = (
            "its machine answers, so its process is stopped or busy"
            if channel.is_answered
            else "its machine does not answer either, or the network between is cut"
        )
        return f"no sign of life for {self.silent_s:.1f} s; {reason}"


def why_closed(error: ClosedError) -> str:
    """What the end of a connection means for the task at its other end."""
    return f"{error} without taking its leave; its process has ended" if error.by_other_side else str(error)


async def keep_looking(heartbeat_s: float, beat: Callable[[], None], look: Callable[[], None]) -> None:
    """Gives a sign of life in every beat, and looks for those of others four times in it, until cancelled."""
    while True:
        beat()
        for _ in range(_LOOKS_PER_BEAT):
            await asyncio.sleep(heartbeat_s / _LOOKS_PER_BEAT)
            look()


def check_rhythm(heartbeat_s: float, num_missed: int) -> None:
    """Refuses what is no rhythm."""
    if not 0.01 <= heartbeat_s <= 3600:
        raise ClusterSpecError(f"heartbeat_s is a number of seconds from 0.01 to 3600, got {heartbeat_s!r}")
    if type(num_missed) is not int or not 1 <= num_missed <= 1000:
        raise ClusterSpecError(f"num_missed is a whole number from 1 to 1000, got {num_missed!r}")


def missing_text(expected: Iterable[Task], present: Iterable[str], timeout_s: float, reason: str = "") -> str:
    """Who has not come, who has, and what to do."""
    here = list(present)
    missing = [str(task) for task in expected if task.name not in here]
    come = f"{', '.join(here)} {'is' if len(here) == 1 else 'are'} here" if here else "nobody is here"
    return (
        f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} not come after {timeout_s:g} s"
        f"{f' ({reason})' if reason else ''}; {come}; start what is missing, or raise join_timeout_s={timeout_s:g}"
    )
