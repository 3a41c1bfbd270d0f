"""A thread for each device of this process, which computes the parts that runs hand to it.

A thread keeps nothing alive but its own device, so that sessions which are forgotten end.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, final

from stratagem.errors import SessionError
from stratagem.graphs.sessions.compute import CancelledError, Course, Device
from stratagem.graphs.sessions.device_threads import settle_on
from stratagem.graphs.sessions.partition import GraphPart

Told: TypeAlias = Callable[[BaseException | None], None]
Turns: TypeAlias = AbstractContextManager[Any]
_Queue: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], None], Told] | None]"


@final
class DeviceThread:
    """Computes on one device, one part after the other.

    Args:
        device: The device.
        name: What the thread is called.
        turns: Is entered for each part; lets as many threads compute at the same time as are meant to.
    """

    def __init__(self, device: Device, name: str, turns: Turns) -> None:
        self.device = device
        self._waiting: _Queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(device, self._waiting, turns), name=name, daemon=True)
        self._thread.start()
        self._closed = False

    def do(self, work: Callable[[], None], told: Told) -> None:
        """Begins something, and returns at once; at its end somebody is told, in this thread, of an error or None."""
        if self._closed:
            raise SessionError("the session was closed")
        self._waiting.put((work, told))

    def compute(self, part: GraphPart, course: Course, told: Told) -> None:
        """The same for a part of a graph."""
        device = self.device

        def work() -> None:
            if course.cancelled:
                raise CancelledError
            device.compute(part, course)

        self.do(work, told)

    def submit(self, run: Any, part: GraphPart) -> None:
        """The same for a part of a run of this process."""
        self.compute(part, run, lambda error: run.finish(part) if error is None else run.fail(part, error))

    def close(self) -> None:
        """Ends the thread after what it has begun."""
        if not self._closed:
            self._closed = True
            self._waiting.put(None)

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()


def _work(device: Device, waiting: _Queue, turns: Turns) -> None:
    settle_on(device.logical)
    with device.stream():
        while (order := waiting.get()) is not None:
            work, told = order
            error: BaseException | None = None
            try:
                with turns:
                    work()
            except BaseException as raised:  # whoever waits hears of it
                error = raised
            told(error)
            del order, work, told, error
