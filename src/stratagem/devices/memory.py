"""Limits the memory of a CPU share for real, and names the device when memory runs out.

Owns the limit on this process' own data (`RLIMIT_DATA`) and the translation of torch's and Python's
errors. `docs/decisions/0002-cpu-memory-limits.md` says why it is done this way.
"""

import contextlib
import ctypes
import errno
import gc
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from stratagem.devices.device import LogicalDevice, mib
from stratagem.devices.host import Host
from stratagem.errors import StratagemError

# How the libraries under torch say that an allocation failed.
_WORDS = ("DefaultCPUAllocator", "bad_alloc", "enforce fail", "can't start new thread", "could not create a primitive")


class OutOfMemoryError(StratagemError, torch.OutOfMemoryError, MemoryError):
    """A device would have gone over its memory limit. The process goes on, and what fits still works.

    Args:
        message: What happened and what to do.
        device: The name of the device.
        limit_bytes: How much memory it has.
        requested_bytes: How much was asked for, where that is known.
    """

    def __init__(
        self, message: str, device: str = "", limit_bytes: int | None = None, requested_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.device = device
        self.limit_bytes = limit_bytes
        self.requested_bytes = requested_bytes


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


def release_freed() -> None:
    """Gives memory that is free but still held back to the system, so that it does not count as used."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def naming(device: LogicalDevice, in_use_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns every kind of running out of memory into an error that names the device.

    In torch's functions it does so where they are called, so that a handler inside the block meets
    the same error as one around it. It goes around `limited`, so that the limit is off while the
    message of any other error is made.
    """
    _named.append((device, in_use_bytes))
    try:
        with _Naming(device, in_use_bytes) if device.memory_limit_bytes is not None else contextlib.nullcontext():
            yield
    except (MemoryError, RuntimeError, OSError) as error:
        _raise_named(error, device, in_use_bytes)
        raise
    finally:
        _named.pop()


def served_share(index: int) -> LogicalDevice | None:
    """The logical device on the accelerator of that number which this process is limited to now, if it is to one."""
    return next((device for device, _ in reversed(_named) if device.torch_device.index == index), None)


def named(error: BaseException) -> BaseException:
    """The error that names the device which this process serves, if it has run out of memory; else the same error."""
    try:
        if _named and isinstance(error, MemoryError | RuntimeError | OSError):
            _raise_named(error, *_named[-1])
    except OutOfMemoryError as better:
        return better.with_traceback(error.__traceback__)
    return error


_named: list[tuple[LogicalDevice, Callable[[], int]]] = []


@final
class _Naming(TorchFunctionMode):
    def __init__(self, device: LogicalDevice, in_use_bytes: Callable[[], int]) -> None:
        super().__init__()
        self._device = device
        self._in_use_bytes = in_use_bytes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (MemoryError, RuntimeError) as error:
            _raise_named(error, self._device, self._in_use_bytes)
            raise


def _raise_named(error: Exception, device: LogicalDevice, in_use_bytes: Callable[[], int]) -> None:
    """Raises the error that names the device; returns if `error` is about something else."""
    out_of_memory = (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or getattr(error, "errno", None) == errno.ENOMEM
        or (device.torch_device.type == "cpu" and any(words in str(error) for words in _WORDS))
    )
    if not out_of_memory or isinstance(error, OutOfMemoryError):
        return
    asked, limit = _asked_bytes(str(error)), device.memory_limit_bytes
    # Once the block has been left, what was in use may be free again: then the figure says nothing.
    used = in_use_bytes()
    plausible = limit is None or used + (asked or 0) > limit
    raise OutOfMemoryError(
        f"out of memory on {device.name}: asked for {'more memory' if asked is None else mib(asked)}"
        f"{f' with {mib(used)} in use' if plausible else ''}"
        f"{' of all that it has' if limit is None else f', its limit is {mib(limit)}'}. "
        f"Use a smaller batch or model, or give the device a larger memory_limit",
        device=device.name,
        limit_bytes=limit,
        requested_bytes=asked,
    ) from error


def _asked_bytes(cause: str) -> int | None:
    """How much was asked for, from the words of torch's allocators or of NumPy."""
    if match := re.search(r"allocate (\d+) bytes", cause):
        return int(match[1])
    if match := re.search(r"allocate ([\d.]+) ([KMGT]?i?B)", cause, re.IGNORECASE):
        return int(float(match[1]) * 1024 ** "BKMGT".index(match[2][0].upper()))
    return None
