"""Holds Ctrl-C back while the replicas are between two states."""

# Not `signal`, which makes enums of all that it is given and gives, in every run.
import _signal  # type: ignore[import-not-found]
import signal
import threading
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

    def allowed(self) -> "_Allowed":
        """A part of the block in which it takes effect at once."""
        return _Allowed(self)

    def allow(self, is_allowed: bool) -> None:
        """Begins or ends such a part."""
        self._is_allowed = is_allowed
        try:
            if is_allowed and self._held:
                self._deliver()
        except BaseException:
            self._is_allowed = False
            raise

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_allowed or self._has_ended:  # a step may have kept this handler, and set it again later
            self._before(number, frame)
        else:
            self._held.append(frame)

    def _deliver(self) -> None:
        if self._held:
            frame, self._held = self._held[0], []
            self._before(signal.SIGINT, frame)


@final
class _Allowed:
    """The block of `Interrupts.allowed`."""

    __slots__ = ("_interrupts",)

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __enter__(self) -> None:
        self._interrupts.allow(True)

    def __exit__(self, *_: object) -> None:
        self._interrupts.allow(False)
