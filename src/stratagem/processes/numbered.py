"""Puts the number of a replica ahead of each line that it prints.

What children print comes to the main program line by line (`child`, `group`); what the main program prints as replica 0
passes through a stream that does the same, for the thread that runs it and as long as it runs. Lines that are drawn
again in their place (progress bars) are as wide as the terminal, and are left alone.
"""

import dataclasses
import io
import re
import sys
import threading
import weakref
from typing import Any, Final, TextIO, final

_SEQUENCES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MOVES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Zfhlsu]")  # of the cursor; what remains are colours
_BEGINNINGS: Final = re.compile(r"^(?=[^\n])", re.MULTILINE)  # of lines that are not empty
_HIDES, _SHOWS = "\x1b[?25l", "\x1b[?25h"


def label(noun: str, number: int) -> str:
    """What stands ahead of the lines of a replica."""
    return f"[{noun} {number}] "


class _LinesOfThread(threading.local):
    """What stands ahead of the lines of the replica that runs in this thread."""

    ahead: str | None = None


_lines = _LinesOfThread()


def plain(stream: Any) -> Any:
    """A stream of this process without the numbers of replica 0."""
    return stream.stream if type(stream) is _NumberedStream else stream


@final
class numbered:  # noqa: N801  # a block, like a function that makes one; it is entered in every run
    """What this thread prints in the block has the number of a replica."""

    __slots__ = ("_before", "_label", "_outer", "_own")

    def __init__(self, number: int) -> None:
        self._label = label("replica", number)

    def __enter__(self) -> None:
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._own = _over(sys.stdout), _over(sys.stderr)
        self._outer, _lines.ahead = _lines.ahead, self._label

    def __exit__(self, *_: object) -> None:
        _lines.ahead = self._outer
        # Code in the block may have put another stream in its place.
        if sys.stdout is self._own[0]:
            sys.stdout = self._before[0]
        if sys.stderr is self._own[1]:
            sys.stderr = self._before[1]


@dataclasses.dataclass
class _Line:
    """Where replica 0 is in the output: a line may be written by several steps, if nobody else writes between them.

    Args:
        begins: Whether the next text begins a line.
        is_drawn: Whether the cursor is hidden: a display is drawn, line over line.
    """

    begins: bool = True
    is_drawn: bool = False

    def numbered(self, text: str, ahead: str) -> str:
        """A text as it is written next."""
        bare = _SEQUENCES.sub("", text)
        if not self.is_drawn and not _MOVES.search(text):
            goes_on = not self.begins or text.startswith("\r")
            head, newline, lines = text.partition("\n") if goes_on else ("", "", text)
            text = head + newline + _BEGINNINGS.sub(ahead, lines)
        self.is_drawn = text.rfind(_HIDES) > text.rfind(_SHOWS) or (self.is_drawn and _SHOWS not in text)
        self.begins = bare.endswith(("\n", "\r")) if bare else self.begins
        return text


_places: "weakref.WeakKeyDictionary[Any, _Line]" = weakref.WeakKeyDictionary()


_lasting: dict[int, "_NumberedStream"] = {}  # over the streams that the process began with, which stay


def _over(stream: TextIO | None) -> Any:
    """A stream with numbers; a program without a terminal has none."""
    below = plain(stream)
    if below is None:
        return None
    if below is not sys.__stdout__ and below is not sys.__stderr__:
        return _NumberedStream(below)
    if id(below) not in _lasting:
        _lasting[id(below)] = _NumberedStream(below)
    return _lasting[id(below)]


@final
class _NumberedStream(io.TextIOBase):
    """A stream that numbers the lines of replicas, and is otherwise the stream below it.

    Code in a step may keep it, as handlers of logging do, and write to it afterwards or in other threads.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        try:
            self._line = _places.setdefault(stream, _Line())
        except TypeError:  # a stream of the program's own that cannot be remembered
            self._line = _Line()

    def write(self, text: str) -> int:
        ahead = _lines.ahead
        if ahead is None:
            self.stream.write(text)
        elif text:
            self.stream.write(self._line.numbered(text, ahead))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return bool(self.stream.isatty())

    def fileno(self) -> int:
        return int(self.stream.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self.stream.encoding)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        found = self.stream.errors
        return None if found is None else str(found)

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
