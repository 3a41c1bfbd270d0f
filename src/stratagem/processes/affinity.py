"""Lets the main program compute on the cores and threads of one device for the time of a run.

OpenMP's idle threads keep looking for work for milliseconds before they sleep, on cores that the
other replicas compute on by then, and they stay on the cores on which they were born. So they are
dismissed when the main program is pinned and when it is released; the next loop makes new ones.
"""

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch

from stratagem.devices.device import LogicalDevice

_PAUSE_SOFT = 1  # of OpenMP 5: threads end, settings stay


def pinned(device: LogicalDevice) -> contextlib.AbstractContextManager[None]:
    """Computes on the cores of a device, with its number of threads."""
    return _Pinned(device) if device.cores else contextlib.nullcontext()


@final
class _Pinned:
    """The block of `pinned`."""

    __slots__ = ("_cores", "_device", "_num_threads")

    def __init__(self, device: LogicalDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._cores, self._num_threads = os.sched_getaffinity(0), torch.get_num_threads()
        try:
            _dismiss_threads()
            os.sched_setaffinity(0, self._device.cores)
            torch.set_num_threads(self._device.num_threads or 1)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        _dismiss_threads()
        torch.set_num_threads(self._num_threads)
        os.sched_setaffinity(0, self._cores)


def _dismiss_threads() -> None:
    if pause := _openmp_pause():
        pause(_PAUSE_SOFT)


@functools.cache
def _openmp_pause() -> Callable[[int], int] | None:
    """The function of the OpenMP library that torch uses; it is not among the program's own symbols."""
    maps = Path("/proc/self/maps")
    libraries = re.findall(r"/\S*/lib[gi]?omp\S*\.so\S*", maps.read_text()) if maps.exists() else []
    for library in dict.fromkeys(libraries):
        with contextlib.suppress(OSError, AttributeError):  # libraries before OpenMP 5 have none
            return ctypes.CDLL(library).omp_pause_resource_all
    return None
