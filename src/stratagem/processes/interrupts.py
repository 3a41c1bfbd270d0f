"""Holds Ctrl-C back while the replicas are between two states."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, final


@final
class Interrupts:
    """A block in which Ctrl-C is remembered, and takes effect in the parts where it is allowed, or at the end.

    In threads other than the main one, where Python never delivers it, nothing is done.
    """

    def __init__(self) -> None:
        self._held: list[FrameType | None] = []
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
        self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        self._deliver()  # also in the place of another error: it is what the user wants

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """A part of the block in which it takes effect at once."""
        self._release()
        try:
            self._deliver()
            yield
        finally:
            self._hold()

    def _hold(self) -> None:
        if callable(self._before):
            signal.signal(signal.SIGINT, lambda _, frame: self._held.append(frame))

    def _release(self) -> None:
        if callable(self._before):
            signal.signal(signal.SIGINT, self._before)

    def _deliver(self) -> None:
        if self._held:
            frame, self._held = self._held[0], []
            self._before(signal.SIGINT, frame)
