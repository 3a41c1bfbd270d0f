"""Locks between processes that survive a holder that is killed.

They are the kernel's record locks on a piece of shared memory that has no name, one byte for each
lock. The kernel gives a lock back when its holder ends, however it ends, and wakes who waits; only who
must see to holders that do not go on polls. What a dead holder left half done is for whoever comes next
to put right.
"""

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import final

from stratagem._clock import Clock
from stratagem.processes.region import Region

_FLOCK = struct.Struct("@hhqqi4x")  # the kernel's own: kind, from where, start, length, process
_LOOK_S = 1e-3
_COUNTED_S = 0.1  # a process that waits for a core takes longer than a look


@final
class Locks:
    """So many locks; the same region in all processes gives the same locks.

    Locks of several bytes are taken in rising order, so that nobody waits for each other in a circle.

    Args:
        region: Shared memory that is used for nothing else.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.while_waiting: Callable[[int, float], None] | None = None  # told who holds it, and for how long one waits
        self._threads = threading.RLock()  # record locks are the process': they do not keep its threads apart

    @contextlib.contextmanager
    def held(self, number: int, *, shared: bool = False) -> Iterator[None]:
        """Waits for a lock and holds it in the block; those who share it hold it together."""
        with self._threads:
            self._take(number, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.region.descriptor, fcntl.LOCK_UN, 1, number)

    def _take(self, number: int, kind: int) -> None:
        if self.while_waiting is None:
            fcntl.lockf(self.region.descriptor, kind, 1, number)
            return
        clock = Clock(_COUNTED_S)
        while True:
            try:
                fcntl.lockf(self.region.descriptor, kind | fcntl.LOCK_NB, 1, number)
                return
            except BlockingIOError:
                self.while_waiting(self._holder(number), clock.now_s())
                time.sleep(_LOOK_S)

    def _holder(self, number: int) -> int:
        """The process that holds a lock, or one of those that share it; 0 if it is free by now."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        kind, *_, process = _FLOCK.unpack(fcntl.fcntl(self.region.descriptor, fcntl.F_GETLK, wanted))
        return 0 if kind == fcntl.F_UNLCK else int(process)

    def __reduce__(self) -> tuple[type["Locks"], tuple[Region]]:
        return Locks, (self.region,)
