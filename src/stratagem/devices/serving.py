"""Makes this process the one that serves a logical device: its cores, threads and memory.

Owns the order in which these are applied and put back, and the memory readings of what is served.
A replica process serves its device for life; a program may serve one for a while.
"""

import contextlib
import dataclasses
import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from stratagem._caller import warn_caller
from stratagem.devices import usage
from stratagem.devices.accelerators import Accelerator
from stratagem.devices.device import MIB, LogicalDevice, mib
from stratagem.devices.host import Host
from stratagem.devices.inventory import Inventory, this_process
from stratagem.devices.kind_table import CPU
from stratagem.devices.lookup import DeviceLike
from stratagem.devices.memory import OutOfMemoryError, limited, naming, release_freed
from stratagem.errors import DeviceError, DevicesInUseError, DeviceWarning


@dataclasses.dataclass(frozen=True)
class _Served:
    """A device and what this process already held of the CPU's memory when it began to serve it."""

    device: LogicalDevice
    baseline_bytes: int


_SMALL_BYTES = 256 * MIB  # of which torch's own modules would take a part that matters
_seat = threading.Lock()
_served: list[_Served] = []
_hosted: list[_Served] = []  # beside what else the process does


@contextlib.contextmanager
def serve(device: DeviceLike, *, inventory: Inventory | None = None) -> Iterator[LogicalDevice]:
    """Runs the block on one logical device: on its cores, with its threads, within its memory limit.

    A share of the CPU (or a simulated GPU) counts what this process takes from now on; going over
    the limit raises `OutOfMemoryError` and the process lives on. What was held before does not count;
    freeing it inside the block makes room for as much. On a real GPU torch's allocator holds the
    limit. A process serves one device at a time. Everything is put back when the block ends.

    Args:
        device: A logical device or its name.
        inventory: Where to look names up; by default this process' own.
    Raises:
        DeviceNotFoundError: There is no such device.
        DevicesInUseError: This process serves a device already.
        OutOfMemoryError: The block asked for more memory than the device has.
    Example:
        >>> import torch
        >>> with serve("cpu:0") as device:
        ...     print(device.name, torch.ones(2).sum())
        /device:CPU:0 tensor(2.)
    """
    inventory = inventory or this_process()
    logical = inventory.resolve(device)
    accelerator = inventory.accelerator(logical.physical)
    hardware = _on_accelerator(logical, accelerator) if accelerator else _on_host(logical, inventory.host)
    with _seated(logical), inventory.in_use(f"serve({logical.name!r})"), hardware:
        yield logical


_lives = contextlib.ExitStack()


def serve_for_life(device: LogicalDevice) -> None:
    """Makes this process serve a device until it ends; for children, whose configuration is elsewhere."""
    if device.is_limit_given and (device.memory_limit_bytes or 0) < _SMALL_BYTES:
        # torch loads it with the first step of an optimizer: it is none of what the program takes.
        importlib.import_module("torch._dynamo")
    _lives.enter_context(_seated(device))
    accelerator = this_process().accelerator(device.physical)
    _lives.enter_context(_on_accelerator(device, accelerator) if accelerator else _on_host(device, Host()))


def memory_info(device: DeviceLike, inventory: Inventory) -> dict[str, int]:
    """What this process holds on a device, in bytes: `current`, and the most so far as `peak`."""
    logical = inventory.resolve(device)
    if accelerator := inventory.accelerator(logical.physical):
        return accelerator.memory_info(logical.physical.index)
    baseline = _baseline_bytes(logical, inventory)
    if baseline is None:
        return usage.of_this_program(logical.name) or {"current": 0, "peak": 0}
    return {
        "current": max(0, inventory.host.process_memory_bytes() - baseline),
        "peak": max(0, inventory.host.process_peak_bytes() - baseline),
    }


def reset_memory_stats(device: DeviceLike, inventory: Inventory) -> None:
    """Lets the peak of a device start again from what is held now."""
    logical = inventory.resolve(device)
    if accelerator := inventory.accelerator(logical.physical):
        accelerator.reset_peak(logical.physical.index)
    elif _baseline_bytes(logical, inventory) is not None:
        inventory.host.reset_process_peak()


def _baseline_bytes(device: LogicalDevice, inventory: Inventory) -> int | None:
    """What does not count as the device's; `None` if this process does not serve it and so holds nothing there.

    An undivided CPU, which every process runs on, counts all that the process holds.
    """
    if device.device_type == CPU and len(inventory.logical(CPU)) == 1:
        return next((served.baseline_bytes for served in _served if served.device.name == device.name), 0)
    both = (*_served, *_hosted)
    return next((served.baseline_bytes for served in both if served.device.name == device.name), None)


@contextlib.contextmanager
def _seated(device: LogicalDevice) -> Iterator[None]:
    """Cores, threads and limits are the whole process', so it serves one device at a time."""
    if not _seat.acquire(blocking=False):
        raise DevicesInUseError(
            f"this process already serves {' and '.join(each.device.name for each in _served)} and cannot serve "
            f"{device.name} too; leave that block first, or serve each device in a process of its own"
        )
    try:
        yield
    finally:
        _seat.release()


@contextlib.contextmanager
def _on_host(device: LogicalDevice, host: Host) -> Iterator[None]:
    """Cores first, so that threads are born on them; then threads, which cost memory; then the limit."""
    _require_available(device, host)
    with _pinned(device.cores), _threads(device.num_threads or len(device.cores)):
        release_freed()
        with contextlib.suppress(DeviceError):  # where the peak cannot be reset, it counts from the start
            host.reset_process_peak()
        baseline_data_bytes = host.process_data_bytes() if host.reads_memory() else 0
        with (
            _noted(device, host.process_memory_bytes() if host.reads_memory() else 0),
            naming(device, lambda: max(0, host.process_data_bytes() - baseline_data_bytes)),
            _limit(device, host),
        ):
            yield


@contextlib.contextmanager
def _noted(device: LogicalDevice, baseline_bytes: int) -> Iterator[None]:
    _served.append(_Served(device, baseline_bytes))
    try:
        with usage.shown(device.name, device.memory_limit_bytes, baseline_bytes):
            yield
    finally:
        _served.pop()


@contextlib.contextmanager
def hosting(device: LogicalDevice) -> Iterator[None]:
    """Counts what this process takes in the block as being on a device, beside what else it does.

    For the main program, which is a replica too: its cores, threads and limits are not the device's.
    """
    host = this_process().host
    reads = device.torch_device.type == "cpu" and host.reads_memory()
    hosted = _Served(device, host.process_memory_bytes() if reads else 0)
    _hosted.append(hosted)
    try:
        with usage.shown(device.name, device.memory_limit_bytes, hosted.baseline_bytes):
            yield
    finally:
        _hosted.remove(hosted)


@contextlib.contextmanager
def _on_accelerator(device: LogicalDevice, accelerator: Accelerator) -> Iterator[None]:
    with _noted(device, 0), accelerator.selected(device.physical.index), _within_limit(device, accelerator):
        if not device.memory_growth:
            accelerator.reserve(device.physical.index, device.memory_limit_bytes)
        yield


@contextlib.contextmanager
def _within_limit(device: LogicalDevice, accelerator: Accelerator) -> Iterator[None]:
    index, limit_bytes = device.physical.index, device.memory_limit_bytes
    with contextlib.ExitStack() as put_back:
        put_back.enter_context(naming(device, lambda: _held_bytes(accelerator, index)))
        if limit_bytes is not None:
            put_back.callback(accelerator.limit_memory, index, accelerator.memory_fraction(index))
            accelerator.limit_memory(index, limit_bytes / accelerator.details(index).total_memory_bytes)
        yield


def _held_bytes(accelerator: Accelerator, index: int) -> int:
    """What this process holds on an accelerator; nothing that is known where torch does not tell."""
    try:
        return accelerator.memory_info(index)["current"]
    except DeviceError:
        return 0


@contextlib.contextmanager
def limited_accelerator(device: LogicalDevice, inventory: Inventory | None = None) -> Iterator[None]:
    """A block in which an accelerator is torch's current one, and torch's allocator holds its limit, if it has one."""
    accelerator = (inventory or this_process()).accelerator(device.physical)
    if accelerator is None:
        yield
        return
    limit = contextlib.nullcontext() if device.memory_limit_bytes is None else _within_limit(device, accelerator)
    with accelerator.selected(device.physical.index), limit:
        yield


def _require_available(device: LogicalDevice, host: Host) -> None:
    """Without growth, all of the limit must be there at the start, as on a real accelerator."""
    used_bytes, limit_bytes = host.used_memory_bytes(), device.memory_limit_bytes
    if device.memory_growth or limit_bytes is None or used_bytes is None:
        return
    free_bytes = host.total_memory_bytes() - used_bytes
    if limit_bytes > free_bytes:
        raise OutOfMemoryError(
            f"out of memory on {device.name}: without memory growth it takes its limit of {mib(limit_bytes)} "
            f"at the start, {mib(free_bytes)} are free. Lower memory_limit, or set_memory_growth(..., True)"
        )


@contextlib.contextmanager
def _pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """Moves every thread of this process to the cores; threads born meanwhile are set free with the rest."""
    if not hasattr(os, "sched_setaffinity"):  # macOS leaves cores to its scheduler
        yield
        return
    before: dict[int, set[int]] = {}
    for thread in _threads_of_this_process():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            before[thread] = os.sched_getaffinity(thread)
    own = os.sched_getaffinity(0)
    for thread in before:
        _move(thread, set(cores))
    try:
        yield
    finally:
        for thread in _threads_of_this_process():
            _move(thread, before.get(thread, own))


def _threads_of_this_process() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def _move(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended since it was listed
        os.sched_setaffinity(thread, cores)


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    # OpenMP ends the whole process when it cannot create a thread, so all are born before the limit.
    torch.zeros(num_threads * 2**16).add_(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _limit(device: LogicalDevice, host: Host) -> Iterator[None]:
    if device.memory_limit_bytes is None:
        yield
    elif host.reads_memory():
        with limited(device.memory_limit_bytes, host):
            yield
    else:
        warn_caller(
            f"the memory limit of {device.name} is not enforced: this system has no /proc to count memory with",
            DeviceWarning,
        )
        yield
