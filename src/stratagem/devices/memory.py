"""Limits the memory of a CPU share for real, and names the device when memory runs out.

Owns the limit on this process' own data (`RLIMIT_DATA`) and the translation of torch's and Python's
errors. `docs/decisions/0002-cpu-memory-limits.md` says why it is done this way.
"""

import contextlib
import re
import resource
from collections.abc import Callable, Iterator

import torch

from stratagem.devices.device import LogicalDevice, mib
from stratagem.devices.host import Host
from stratagem.errors import StratagemError


class OutOfMemoryError(StratagemError, torch.OutOfMemoryError, MemoryError):
    """A device would have gone over its memory limit. The process goes on, and what fits still works."""


@contextlib.contextmanager
def limited(num_bytes: int, host: Host) -> Iterator[None]:
    """Lets this process take `num_bytes` more than it holds now, and not one page above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = host.process_data_bytes() + num_bytes
    ceilings = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(wanted, *ceilings) if ceilings else wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def naming(device: LogicalDevice, in_use_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns every kind of running out of memory into an error that names the device.

    Goes around `limited`, so that the limit is off while the message is made.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(_message(device, in_use_bytes(), str(error))) from error


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _message(device: LogicalDevice, in_use_bytes: int, cause: str) -> str:
    asked = _asked_bytes(cause)
    what = "more memory" if asked is None else mib(asked)
    limit_bytes = device.memory_limit_bytes
    limit = "all of its memory" if limit_bytes is None else f"its limit of {mib(limit_bytes)}"
    return (
        f"out of memory on {device.name}: asked for {what} with {mib(in_use_bytes)} in use of {limit}. "
        f"Use a smaller batch or model, or raise memory_limit in its LogicalDeviceConfiguration"
    )


def _asked_bytes(cause: str) -> int | None:
    """How much was asked for, from the words of torch's allocators or of NumPy."""
    if match := re.search(r"allocate (\d+) bytes", cause):
        return int(match[1])
    if match := re.search(r"allocate ([\d.]+) ([KMGT]?i?B)", cause, re.IGNORECASE):
        return int(float(match[1]) * 1024 ** "BKMGT".index(match[2][0].upper()))
    return None
