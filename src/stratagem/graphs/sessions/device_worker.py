"""A thread for each device of this process, which computes the parts that runs hand to it.

A thread keeps nothing alive but its own device, so that sessions which are forgotten end.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, final

from stratagem.errors import SessionError
from stratagem.graphs.sessions.compute import CancelledError, Course, Device
from stratagem.graphs.sessions.device_threads import settle_on
from stratagem.graphs.sessions.partition import GraphPart

Told: TypeAlias = Callable[[BaseException | None], None]


@final
class DeviceThread:
    """Computes on one device, one part after the other.

    Args:
        device: The device.
        name: What the thread is called.
    """

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self._waiting: queue.SimpleQueue[tuple[GraphPart, Course, Told] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(device, self._waiting), name=name, daemon=True)
        self._thread.start()
        self._closed = False

    def compute(self, part: GraphPart, course: Course, told: Told) -> None:
        """Begins a part, and returns at once; at its end somebody is told, in this thread, of an error or None."""
        if self._closed:
            raise SessionError("the session was closed")
        self._waiting.put((part, course, told))

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


def _work(device: Device, waiting: "queue.SimpleQueue[tuple[GraphPart, Course, Told] | None]") -> None:
    settle_on(device.logical)
    with device.stream():
        while (order := waiting.get()) is not None:
            part, course, told = order
            error: BaseException | None = None
            try:
                if course.cancelled:
                    raise CancelledError
                device.compute(part, course)
            except BaseException as raised:  # whoever waits hears of it
                error = raised
            told(error)
            del order, part, course, told, error
