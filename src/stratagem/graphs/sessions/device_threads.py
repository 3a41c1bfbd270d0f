"""Settles a thread on a logical device: on its cores, with its number of threads.

torch's own setting is partly the whole process'; here each thread has its own, so that shares of the CPU work side by
side in one process.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stratagem.devices.device import LogicalDevice


def settle_on(device: LogicalDevice) -> None:
    """Makes the calling thread, and those that it computes with, stay on the cores of a device."""
    if device.cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # the cores were taken from this process meanwhile
            os.sched_setaffinity(threading.get_native_id(), device.cores)
    torch.get_num_threads()  # torch sets a new thread's number the first time that it is asked
    for set_number in _setters():
        set_number(device.num_threads or max(1, len(device.cores)))


@functools.cache
def _setters() -> tuple[Callable[[int], Any], ...]:
    """The functions of OpenMP and MKL for the calling thread alone; torch's own where they cannot be had."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        openmp = library.omp_set_num_threads
    except (OSError, AttributeError):
        return (torch.set_num_threads,)
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)  # its name in C; those in small letters are Fortran's
    return (openmp,) if mkl is None else (openmp, mkl)
