"""Counts what strict devices do: kernels, and the points where the host waits for a device.

Also keeps the order in which work was given to streams. Nothing is counted while nobody listens.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, final


class StreamEntry(NamedTuple):
    """Work that was given to a stream: a kernel, a copy, an event that is recorded or waited for."""

    device: int
    stream: int
    name: str


@final
class DeviceCounts:
    """What the strict devices of this process have done since counting began."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        """How often each kernel was started, by the name of its operation; copies are `copy_`."""
        self.waits: Counter[str] = Counter()
        """How often the host had to wait, by what made it wait."""
        self.allocations: Counter[int] = Counter()
        """How many blocks of memory each device, by its number, has handed out."""
        self.order: list[StreamEntry] = []
        """All work, in the order in which streams got it."""

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    @property
    def num_allocations(self) -> int:
        return self.allocations.total()


_lock = threading.Lock()
_listening: list[DeviceCounts] = []


@contextlib.contextmanager
def counted() -> Iterator[DeviceCounts]:
    """Counts what strict devices do while the block lasts, in all threads of this process.

    A replica counts its own device: open the block inside the step to see a replica that is a process of its own.

    Example:
        >>> import torch
        >>> with counted() as counts:
        ...     torch.ones(2).sum().item()
        2.0
        >>> counts.num_kernels, counts.num_waits  # the CPU is no strict device
        (0, 0)
    """
    counts = DeviceCounts()
    with _lock:
        _listening.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            _listening.remove(counts)


def note_kernel(name: str, device: int, stream: int) -> None:
    """A kernel was started."""
    note_work(name, device, stream)
    if _listening:
        with _lock:
            for counts in _listening:
                counts.kernels[name] += 1


def note_work(name: str, device: int, stream: int) -> None:
    """A stream was given something, which need not be a kernel."""
    if _listening:
        with _lock:
            for counts in _listening:
                counts.order.append(StreamEntry(device, stream, name))


def note_wait(name: str) -> None:
    """The host waits for a device."""
    if _listening:
        with _lock:
            for counts in _listening:
                counts.waits[name] += 1


def note_allocation(device: int) -> None:
    """A device has handed out memory."""
    if _listening:
        with _lock:
            for counts in _listening:
                counts.allocations[device] += 1
