"""What counts as the loss of a child process, in words, and what follows from it.

Owns the rhythm in which children are watched, the texts of who died, stalled, was stopped or ran out of
memory, and the policy: a loss ends the group, or the member is replaced.
"""

import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import Final, Protocol, final

from stratagem._caller import last_line, users_trace, with_cells
from stratagem.devices.device import mib
from stratagem.errors import ReplicaDiedError, ReplicaError, StratagemError

SLICE_S = 0.1  # between two looks at children that are waited for
STATUS_WAIT_S = 2.0  # for word of how a process has ended
STOP_GRACE_S = 2.0  # for a process to end by itself, before it is killed
STOPPED_S = 2.0  # that a process may be stopped, where another can take its place

Failure = tuple[BaseException | None, str, str]  # the error if it could travel, its line, its traceback


@final
@dataclasses.dataclass(frozen=True)
class End:
    """A loss ends the group: its members wait for each other."""


@final
@dataclasses.dataclass(frozen=True)
class Replace:
    """A lost member is replaced: its calls are given to others.

    Args:
        max_restarts: How many may be replaced within `window_s`.
        window_s: In how many seconds.
    """

    max_restarts: int
    window_s: float


Policy = End | Replace
END: Final = End()


@final
class Fatal(BaseException):
    """Carries the error of a dead or stalled replica past the user's `except Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@final
class Losses:
    """The losses of one group that a policy of replacement counts."""

    def __init__(self) -> None:
        self._causes: list[tuple[float, str]] = []

    @property
    def causes(self) -> list[str]:
        """Who was lost and why, oldest first."""
        return [cause for _, cause in self._causes]

    def note(self, cause: str, policy: Replace, now: float) -> None:
        """Counts a loss.

        Args:
            cause: Who was lost and why.
            policy: How many may be.
            now: The time of a clock that only goes on.
        Raises:
            ReplicaDiedError: There were more than the policy allows.
        """
        self._causes = [each for each in self._causes if now - each[0] <= policy.window_s] + [(now, cause)]
        if len(self._causes) > policy.max_restarts:
            raise ReplicaDiedError(
                f"gave up after {policy.max_restarts} restarts in {policy.window_s:.0f} s: {'; '.join(self.causes)}. "
                f"Raise max_restarts if workers may be lost more often"
            )


TORN = (
    "it happened while parameters were being updated: some parameters and parts of the optimizer's state may be from "
    "after this step, others from before it; load the last checkpoint"
)


class Failed(Protocol):
    """A call that may have failed in a member."""

    done_by: int
    failure: Failure | None


def raise_first(own: BaseException | None, failed: Sequence[Failed], rank: int | None = None) -> None:
    """Raises the one error that is the cause, with its own traceback; the rest are consequences.

    Args:
        own: That of this process.
        failed: The calls that failed in children.
        rank: The number of this process among all replicas, if it is one of several; those of its children follow.
    """
    first = rank or 0
    failures = [(first + call.done_by, call.failure) for call in failed if call.failure is not None]
    for call in failed:
        call.failure = None  # once raised, it leads to all that the program has
    if own is not None:
        if rank is not None and isinstance(own, Exception) and not isinstance(own, StratagemError):
            note = f"{_RAISED_IN} {_named([rank, *_same(failures, last_line(own))])}"
            if note not in getattr(own, "__notes__", ()):
                own.add_note(note)
        raise own
    if failures:
        cause = failures[0][1]
        raise error_of(cause, _named(_same(failures, cause[1])))


def _same(failures: Sequence[tuple[int, Failure]], line: str) -> list[int]:
    """The replicas that raised an error of this line."""
    return [number for number, failure in failures if failure[1] == line]


def _named(replicas: Sequence[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"


def error_of(failure: Failure, where: str) -> BaseException:
    """The error that a child has raised, with a note of where and with the child's traceback."""
    error, line, text = failure
    raised = error if error is not None else ReplicaError(f"{where} raised {line}")
    raised.add_note(f"{_RAISED_IN} {where}:\n{with_cells(text)}")
    return raised


def leave_users_frames(error: BaseException) -> None:
    """Takes the library's frames out of the traceback of an error that leaves it, as far as they are around the user's.

    The error of a child has the child's traceback in its note. Raise it again with a bare `raise`.
    """
    trace = users_trace(error.__traceback__)
    is_of_child = any(note.startswith(_RAISED_IN) and "\n" in note for note in getattr(error, "__notes__", ()))
    if trace is not None or is_of_child:
        error.__traceback__ = trace


_RAISED_IN: Final = "raised in"


def died(who: str, how: str, more: str, run_number: int | None = None) -> str:
    """Of a member that is gone.

    Args:
        who: Its name and process.
        how: How it ended, as `describe_status` says.
        more: What else is known, as `out_of_memory` says.
        run_number: The run that ends with it, if one does.
    """
    return f"{who} {how}{'' if run_number is None else f' in run {run_number}'}{more}"


def stalled_together(named: Sequence[str], stall_timeout_s: float, run_number: int) -> str:
    """Of members for whom the others of a run wait."""
    return (
        f"{'; '.join(named)} has not answered for {stall_timeout_s:.1f} s in run {run_number} while others wait. "
        f"Its stack is in the log above; raise stall_timeout_s if it only needs more time"
    )


def stalled(stall_timeout_s: float) -> str:
    """Of a member that did not answer its own call."""
    return f"did not answer for {stall_timeout_s:.1f} s; raise stall_timeout_s if it needs more time"


def stopped(waited_s: float) -> str:
    """Of a member that somebody has stopped."""
    return f"was stopped for {waited_s:.1f} s"


def kept_a_lock(waited_s: float) -> str:
    """Of a member that keeps a lock for which another process waits."""
    return f"kept a lock for {waited_s:.1f} s"


def describe_status(status: int | None) -> str:
    """How a process ended."""
    if status is None:
        return "ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return f"was killed by signal {number}"
    return f"ended with code {os.waitstatus_to_exitcode(status)}"


def out_of_memory(status: int | None, num_kills_before: int, num_kills: int, limit_bytes: int) -> str:
    """Whether a process that was killed was probably out of memory; empty if it was not killed.

    Args:
        status: How it ended, as `os.waitpid` tells.
        num_kills_before: How many processes the kernel had killed for memory before it was started.
        num_kills: How many by now.
        limit_bytes: The memory of this machine.
    """
    if status is None or not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        return ""
    if num_kills > num_kills_before:
        return (
            f"; probably out of memory: cgroup oom_kill rose from {num_kills_before} to {num_kills}, "
            f"limit {mib(limit_bytes)}"
        )
    return "; if nobody killed it, it was probably out of memory (`dmesg` tells)"
