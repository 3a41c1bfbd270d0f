"""Puts the number of a replica ahead of each line that it prints.

What children print comes to the main program line by line (`child`, `group`); what the main program prints as replica 0
passes through a stream that does the same, for the thread that runs it and as long as it runs.
"""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO, final


def label(noun: str, number: int) -> str:
    """What stands ahead of the lines of a replica."""
    return f"[{noun} {number}] "


class _LinesOfThread(threading.local):
    """What stands ahead of the lines of the replica that runs in this thread."""

    ahead: str | None = None


_lines = _LinesOfThread()


def plain(stream: TextIO | None) -> Any:
    """A stream of this process without the numbers of replica 0."""
    return stream.stream if isinstance(stream, _Numbered) else stream


@contextlib.contextmanager
def numbered(number: int) -> Iterator[None]:
    """What this thread prints in the block has the number of a replica."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = own = _over(sys.stdout), _over(sys.stderr)
    outer, _lines.ahead = _lines.ahead, label("replica", number)
    try:
        yield
    finally:
        _lines.ahead = outer
        # Code in the block may have put another stream in its place.
        for name, stream, former in zip(("stdout", "stderr"), own, before, strict=True):
            if getattr(sys, name) is stream:
                setattr(sys, name, former)


def _over(stream: TextIO | None) -> Any:
    """A stream with numbers; a program without a terminal has none."""
    return None if stream is None else _Numbered(plain(stream))


@final
class _Numbered(io.TextIOBase):
    """A stream that numbers the lines of replicas, and is otherwise the stream below it.

    Code in a step may keep it, as handlers of logging do, and write to it afterwards or in other threads.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._begins = True

    def write(self, text: str) -> int:
        ahead = _lines.ahead
        if ahead is None:
            self.stream.write(text)
        elif text:
            lines = text.replace("\n", f"\n{ahead}").removesuffix(ahead)
            self.stream.write(ahead + lines if self._begins else lines)
            self._begins = text.endswith("\n")
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
