"""Holds Ctrl-C back while the replicas are between two states."""

# Not `signal`, which makes enums of all that it is given and gives, in every run.
import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, final

_SIGINT: Final = int(signal.SIGINT)


@final
class Interrupts:
    """A block in which Ctrl-C is remembered, and takes effect in the parts where it is allowed, or at the end.

    In threads other than the main one, where Python never delivers it, nothing is done.
    """

    def __init__(self) -> None:
        self._held: list[FrameType | None] = []
        self._before: Any = None
        self._is_allowed = self._has_ended = False

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(_SIGINT)
            if callable(before):
                self._before = before
                _signal.signal(_SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(_SIGINT, self._before)
        self._has_ended = True
        self._deliver()  # also in the place of another error: it is what the user wants

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """A part of the block in which it takes effect at once."""
        self._is_allowed = True
        try:
            self._deliver()
            yield
        finally:
            self._is_allowed = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_allowed or self._has_ended:  # a step may have kept this handler, and set it again later
            self._before(number, frame)
        else:
            self._held.append(frame)

    def _deliver(self) -> None:
        if self._held:
            frame, self._held = self._held[0], []
            self._before(signal.SIGINT, frame)
