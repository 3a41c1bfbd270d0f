"""Locks between processes that survive a holder that is killed.

They are the kernel's record locks on a piece of shared memory that has no name, one byte for each
lock. The kernel gives a lock back when its holder ends, however it ends, and wakes who waits; nobody
polls. What a dead holder left half done is for whoever comes next to put right.
"""

import contextlib
import fcntl
import threading
from collections.abc import Iterator
from typing import final

from stratagem.replicas.memory import Region


@final
class Locks:
    """So many locks; the same region in all processes gives the same locks.

    Locks of several bytes are taken in rising order, so that nobody waits for each other in a circle.

    Args:
        region: Shared memory that is used for nothing else.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._threads = threading.RLock()  # record locks are the process': they do not keep its threads apart

    @contextlib.contextmanager
    def held(self, number: int, *, shared: bool = False) -> Iterator[None]:
        """Waits for a lock and holds it in the block; those who share it hold it together."""
        with self._threads:
            fcntl.lockf(self.region.descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, 1, number)
            try:
                yield
            finally:
                fcntl.lockf(self.region.descriptor, fcntl.LOCK_UN, 1, number)

    def __reduce__(self) -> tuple[type["Locks"], tuple[Region]]:
        return Locks, (self.region,)
