"""Anonymous shared memory that the processes of one program map in two ways at once.

Through the shared mapping a write is everyone's. Through the private mapping a process reads the
same pages, but what it writes is its own (copy on write): so one set of pages serves every replica,
and code that changes a tensor in place changes only its own replica's. The kernel tells which pages
were written (`PAGEMAP`), whatever wrote them; `hidden_pages` says why where it does not.

The memory has no name: nobody else can open it, it does not depend on the size of `/dev/shm`, and
nothing is left behind however a program ends. It is reserved when it is made, so that a lack of
memory is an error then and never a signal later.
"""

import contextlib
import functools
import mmap
import os
from collections.abc import Iterable
from resource import RUSAGE_SELF as _OWN_FAULTS
from resource import getrusage
from typing import Final, final

import numpy as np
import torch

from stratagem.devices.device import mib
from stratagem.devices.host import Host
from stratagem.errors import SharedMemoryError

PAGE_BYTES = mmap.PAGESIZE
PAGEMAP: Final = "/proc/self/pagemap"

_SWAPPED = np.uint64(1 << 62)  # entries from here up are in memory or swapped out
_FILE_PAGE = np.uint64(1 << 61)
_NO_PAGES = np.empty(0, dtype=np.int64)
_NOT_CLEAN = -1


@final
class Region:
    """A piece of anonymous shared memory, mapped in this process.

    Args:
        descriptor: The memory; the region owns it from now on.
        num_bytes: Its size, whole pages.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._shared = mapped(descriptor, num_bytes, mmap.MAP_SHARED)
        self._map_private(descriptor)
        self.descriptor = descriptor  # last: what cannot be mapped stays the caller's to close

    def _map_private(self, descriptor: int) -> None:
        self._private = mapped(descriptor, self.num_bytes, mmap.MAP_PRIVATE)
        self._num_faults_when_clean = _NOT_CLEAN
        self._map_when_clean = b""
        self._first_page = torch.frombuffer(self._private, dtype=torch.uint8).data_ptr() // PAGE_BYTES

    @classmethod
    def create(cls, num_bytes: int, *, host: Host | None = None) -> "Region":
        """Reserves memory, all of it now.

        Raises:
            SharedMemoryError: The machine does not have that much.
        """
        num_bytes = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        free_bytes = (host or Host()).available_memory_bytes()
        if free_bytes is not None and num_bytes > free_bytes:
            raise SharedMemoryError(
                f"need {mib(num_bytes)} of shared memory, {mib(free_bytes)} are free; "
                f"use a smaller model or fewer replicas"
            )
        try:
            descriptor = os.memfd_create("stratagem", os.MFD_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(f"cannot make shared memory: {error}; `ulimit -n` bounds open files") from error
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise SharedMemoryError(f"cannot reserve {mib(num_bytes)} of shared memory: {error}") from error

    def shared(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """Elements that all processes read and write."""
        return _view(self._shared, dtype, offset, numel)

    def private(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """The same elements; what is written through this view only this process sees."""
        return _view(self._private, dtype, offset, numel)

    def written_pages(self) -> np.ndarray:
        """The pages that this process has written through private views, and so has of its own."""
        # To get a page of its own a process has a page fault: without any since there was none, there is none.
        used = getrusage(_OWN_FAULTS) if _are_faults_counted() else None
        num_faults = _NOT_CLEAN if used is None else used.ru_minflt + used.ru_majflt
        if num_faults == self._num_faults_when_clean != _NOT_CLEAN:
            return _NO_PAGES
        data = os.pread(_pagemap(os.getpid()), 8 * (self.num_bytes // PAGE_BYTES), 8 * self._first_page)
        if data == self._map_when_clean:
            self._num_faults_when_clean = num_faults
            return _NO_PAGES
        entries = np.frombuffer(data, dtype=np.uint64)
        pages: np.ndarray
        (pages,) = ((entries >= _SWAPPED) & (entries & _FILE_PAGE == 0)).nonzero()
        if len(pages):
            self._num_faults_when_clean = _NOT_CLEAN
        else:
            self._num_faults_when_clean, self._map_when_clean = num_faults, data
        return pages

    def publish(self, pages: np.ndarray) -> None:
        """Makes this process' own pages everyone's."""
        if len(pages):  # seldom, where a program only reads
            for start, end in runs(pages):
                self._shared[start:end] = self._private[start:end]
            self.drop(pages)

    def drop(self, pages: np.ndarray) -> None:
        """Gives this process' own pages up, for those of everyone."""
        for start, end in runs(pages) if len(pages) else ():
            self._private.madvise(mmap.MADV_DONTNEED, start, end - start)

    def give_back(self, start: int, end: int) -> None:
        """Returns the pages within a range of bytes to the system; what is there when they are used again is zeros."""
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        with contextlib.suppress(OSError):  # not every kernel can: they stay reserved then
            if first < last:
                self._shared.madvise(mmap.MADV_REMOVE, first, last - first)

    def leave(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leaves the private views that there are to whoever has them; `private` gives views of a new mapping.

        Args:
            ranges: The bytes in which such views lie: there nobody else's writes are seen any more.
        """
        own = np.frombuffer(self._private, dtype=np.uint8)
        for start, end in ranges:
            first_bytes = own[start // PAGE_BYTES * PAGE_BYTES : end : PAGE_BYTES]
            np.add(first_bytes, 0, out=first_bytes)  # a page that is written to is this process' own
        self._map_private(self.descriptor)

    def __del__(self) -> None:
        # Tensors in the memory keep it mapped; only its descriptor ends here.
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def mapped(descriptor: int, num_bytes: int, flags: int) -> mmap.mmap:
    """Memory of a descriptor in this process; an error says how much was asked for."""
    try:
        return mmap.mmap(descriptor, num_bytes, flags)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, to allocate {num_bytes} bytes of shared memory") from error


@functools.cache
def hidden_pages() -> str:
    """Why this process cannot see which of its pages are its own; empty if it can.

    Hardened containers refuse to open the page map, or have an empty file in its place.
    """
    region = Region.create(2 * PAGE_BYTES)
    pages = region.private(torch.uint8, 0, region.num_bytes)
    pages[PAGE_BYTES] = pages[0] + 1  # the first page is read, the second written
    try:
        seen = region.written_pages().tolist()
    except OSError as error:
        return f"{PAGEMAP} cannot be read: {error.strerror}"
    return "" if seen == [1] else f"{PAGEMAP} does not show them"


def _num_faults() -> int:
    """How many page faults all threads of this process have had."""
    used = getrusage(_OWN_FAULTS)
    return used.ru_minflt + used.ru_majflt


@functools.cache
def _are_faults_counted() -> bool:
    """Whether this kernel counts them at all."""
    before = _num_faults()
    with mmap.mmap(-1, PAGE_BYTES) as page:
        page[0] = 1
    return _num_faults() > before


@functools.cache
def _pagemap(pid: int) -> int:
    """The pagemap of this process, open for as long as it lives; a fork has its own."""
    return os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)


def _view(mapping: mmap.mmap, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, offset=offset, count=numel)


def runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """Neighbouring pages as ranges of bytes."""
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) != 1)
    starts = pages[np.concatenate(([0], breaks + 1))]
    ends = pages[np.concatenate((breaks, [len(pages) - 1]))] + 1
    return [(int(start) * PAGE_BYTES, int(end) * PAGE_BYTES) for start, end in zip(starts, ends, strict=True)]
