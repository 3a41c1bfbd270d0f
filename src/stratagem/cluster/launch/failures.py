"""Finds out why a task failed, and which of several failures came first.

Pure: works on exit codes, times and the end of a task's log. Owns what counts as a mere
consequence of another task's end.
"""

import dataclasses
import json
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any

# Often after a progress bar on the same line; those inside a group of exceptions are parts of it.
_BEGINNING = re.compile(
    r"(^  \+ Exception Group |(?<!\| )(?<!Group ))(Traceback \(most recent call last\)|Fatal Python error):"
)
_IN_GROUP = "  | "
# What an error's own line begins with: a name as most errors have, else any; `loss: 0.3` may be another stream's.
_NAMES_OF_ERRORS = (
    re.compile(r"(?:[^\W\d][\w<>]*\.)*\w*(?:Error|Exception|Warning|Interrupt|Exit|Group|Iteration|Timeout)(?::|$)"),
    re.compile(r"[^\W\d][\w.<>]*(?::|$)"),
    re.compile(""),
)
_CHAINS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# What a task says when it is told of, or notices, that another one is gone.
_CONSEQUENCES = (
    "LostError",
    "HandshakeError",
    "ClusterJoinError",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "KeyboardInterrupt",
)
_CODE_OF_EXCEPTIONS = 1
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_MAX_LINES = 100
_LINES_WITHOUT_TRACEBACK = 20
_MAX_CAUSE_CHARACTERS = 300
_MAX_TRACEBACK_CHARACTERS = 16_000


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of a task that was not a success.

    Args:
        task: Its name, such as `worker/1`.
        code: Its exit code, as a shell gives it: 128 and the signal when it was killed.
        cause: Why, in one line.
        traceback: The last that it wrote, from the traceback on if there is one.
        at: When, in seconds since 1970.
        host: The machine that it ran on; empty for this one.
        shown: Whether its output has been on the screen, and so the traceback.
    """

    task: str
    code: int
    cause: str
    traceback: str = ""
    at: float = 0.0
    host: str = ""
    shown: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether it looks as if another task's end had caused this one."""
        return any(text in self.cause for text in _CONSEQUENCES)

    def describe(self) -> str:
        """Who failed and why, in one line."""
        where = f" on {self.host}" if self.host else ""
        verb = "" if self.cause.startswith(("was ", "ended ")) else "failed: "
        return f"{self.task}{where} {verb}{self.cause}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Failure":
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)


def explain(task: str, code: int, log_tail: str, *, at: float, killed_for_memory: bool = False) -> Failure:
    """Says why a task failed, from its exit code and the end of its log.

    Args:
        code: As `subprocess` gives it: negative for a signal.
        killed_for_memory: Whether the kernel has killed a process of this machine meanwhile.
    Example:
        >>> explain("worker/1", -9, "", at=0.0).cause
        'was killed by SIGKILL'
    """
    lines = log_tail.rstrip().splitlines()
    told: list[str] = []
    if code == _CODE_OF_EXCEPTIONS or -code in _CRASHES:  # else a traceback in the log is of something else
        told = _last_traceback(lines)
    if code < 0:
        cause = f"was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL and killed_for_memory:
            cause += ", probably for lack of memory: the kernel killed a process during that time"
    else:
        cause = _last_error(told) if told else f"ended with code {code}"
    if not told and code > 0:
        told = lines[-_LINES_WITHOUT_TRACEBACK:]
    return Failure(
        task=task,
        code=128 - code if code < 0 else code,
        cause=cause[:_MAX_CAUSE_CHARACTERS],
        traceback="\n".join(told)[-_MAX_TRACEBACK_CHARACTERS:].rstrip(),
        at=at,
    )


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that is not itself a consequence."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.at))


def as_shown(failure: Failure, shown: Mapping[str, str]) -> Failure:
    """The same failure of a task whose output was on the screen, if one of them has failed alike.

    Args:
        failure: The first cause.
        shown: The last that each task wrote whose output was shown.
    """
    for task, text in shown.items():
        if not failure.shown and failure.traceback and failure.traceback in text:
            return dataclasses.replace(failure, task=task, host="", shown=True)
    return failure


def _last_traceback(lines: list[str]) -> list[str]:
    """The last traceback, with those that led to it; nothing if there is none."""
    starts = [(number, match.start()) for number, line in enumerate(lines) if (match := _BEGINNING.search(line))]
    if not starts:
        return []
    if len(lines) - starts[-1][0] > _MAX_LINES:  # much was written after it: it was not the end
        return []
    first, column = starts.pop()
    while starts and any(line in _CHAINS for line in lines[starts[-1][0] : first]):
        first, column = starts.pop()
    return [lines[first][column:], *lines[first + 1 :]]


def _last_error(traceback: list[str]) -> str:
    """The line that names the error: the first one after the frames of the last traceback.

    A line of another stream may stand in between.
    """
    last = max(number for number, line in enumerate(traceback) if _BEGINNING.search(line))
    if traceback[last].startswith("Fatal"):
        return traceback[last]
    body = [line.removeprefix(_IN_GROUP) for line in traceback[last + 1 :]]
    outside = [line for line in body if line and not line[0].isspace()]
    found = (line for names in _NAMES_OF_ERRORS for line in outside if names.match(line))
    return next(found, traceback[last])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
