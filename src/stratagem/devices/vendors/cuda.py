"""NVIDIA's and AMD's GPUs: `torch.cuda`, NCCL.

Torch calls ROCm's functions and RCCL by the same names.
"""

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed

from stratagem import _torch
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.device import DeviceDetails
from stratagem.devices.process_groups import GroupBackend

_c10d: Final[Any] = torch.distributed  # whose stubs do not know the groups as they are in this release


def is_built() -> bool:
    """Whether this torch can see such GPUs."""
    return bool(torch.version.cuda or torch.version.hip)


def accelerator(kind: str) -> TorchAccelerator:
    """Those of this machine."""
    return TorchAccelerator(kind, "cuda", torch.cuda, describe=described, used_bytes=_used_bytes)


def described(properties: Any) -> DeviceDetails:
    """What `torch.cuda` says of a GPU."""
    return DeviceDetails(
        device_name=str(properties.name),
        total_memory_bytes=int(properties.total_memory),
        num_cores=properties.multi_processor_count,
        compute_capability=(properties.major, properties.minor),
    )


def _used_bytes(index: int) -> int | None:
    # Needs the vendor's management library for Python (nvidia-ml-py, amdsmi), which is not a dependency.
    try:
        return int(torch.cuda.device_memory_used(index))
    except (ImportError, RuntimeError, AttributeError):
        return None


class GpuProcess(NamedTuple):
    """A process that computes on a GPU."""

    gpu: int
    pid: int
    memory_bytes: int | None


def processes(visible: Callable[[int], Sequence[int]]) -> list[GpuProcess]:
    """Who computes on GPUs, as NVIDIA's driver tells; nobody where `nvidia-ml-py` is not installed.

    Args:
        visible: Which of so many GPUs are visible, by their numbers in the driver; the result counts them from 0.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # it is not installed, or there is no driver
        return []
    try:
        return [
            GpuProcess(number, each.pid, each.usedGpuMemory)
            for number, index in enumerate(visible(nvml.nvmlDeviceGetCount()))
            for each in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index))
        ]
    finally:
        nvml.nvmlShutdown()


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    group = _c10d.ProcessGroupNCCL
    options = _torch.collective_groups.group_options(group, timeout)
    return group(_c10d.PrefixStore(NCCL.name, store), rank, size, options)


NCCL: Final = GroupBackend("nccl", torch.distributed.is_nccl_available, _connect)
