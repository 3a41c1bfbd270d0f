"""Keeps the C library from giving large blocks back to the system after each use.

A training step frees its activations and gradients and asks for the same again in the next. By
default glibc returns blocks above some megabytes at once, and the kernel clears each page anew:
for large layers that takes longer than the arithmetic (`docs/decisions/0006-freed-memory.md`).
"""

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_DEFAULTS = ((_M_TRIM_THRESHOLD, 128 * 1024), (_M_TOP_PAD, 128 * 1024), (_M_MMAP_MAX, 65536))
_KEEPING = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20))


def keep_freed_memory() -> None:
    """Lets this process keep what it frees for its next use."""
    _set(_KEEPING)


def share_one_heap() -> None:
    """Lets all threads of this process use the same memory, so that what one has freed serves the others."""
    _set(((_M_ARENA_MAX, 1),))


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """The same for the time of a block; what is free at its end goes back to the system."""
    _set(_KEEPING)
    try:
        yield
    finally:
        _set(_DEFAULTS)
        give_back()


def give_back() -> None:
    """Returns what is free now to the system, this once."""
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _set(options: tuple[tuple[int, int], ...]) -> None:
    with contextlib.suppress(AttributeError):  # only glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options:
            mallopt(option, value)
