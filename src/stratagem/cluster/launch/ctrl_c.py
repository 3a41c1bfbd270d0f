"""Notes that the user or the system asks the launcher to stop, for code that looks when it can.

Nothing happens inside a signal handler but the note, so that no step of a start or stop is cut in two;
only a wait may be.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self, final

from torch.distributed.elastic.multiprocessing import SignalException

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class CtrlC:
    """Catches Ctrl-C, SIGTERM and SIGHUP while it is entered; the second one means: at once."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.insisted = False
        self._raises = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, for one, means that it is to be ignored
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_if_asked(self) -> None:
        """Raises what torch's agents understand as: stop the tasks by this signal."""
        if self.asked is not None:
            raise SignalException(f"asked to stop by {self.asked.name}", sigval=self.asked)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Lets a signal end a wait in which nobody looks, such as one for other machines."""
        self.raise_if_asked()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked is None:
            self.asked = signal.Signals(number)
        else:
            self.insisted = True
        if self._raises:
            self.raise_if_asked()
