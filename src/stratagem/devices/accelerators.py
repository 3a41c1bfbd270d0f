"""Asks torch about the real accelerators: how many, which, their memory.

One class speaks to `torch.cuda` and `torch.xpu`, which offer the same functions, one to `torch.mps`.
Counting does not initialise a driver, and nothing here allocates on a device except `reserve`.
"""

import contextlib
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol, cast, final

import torch

from stratagem.devices import xla
from stratagem.devices.device import DeviceDetails
from stratagem.devices.device_spec import GPU, MPS, TPU, XPU
from stratagem.devices.host import Host

_PAGE_BYTES = 2 * 2**20


class Accelerator(Protocol):
    """One kind of accelerator, as torch sees it. Memory readings are those of this process."""

    @property
    def kind(self) -> str: ...

    @property
    def torch_type(self) -> str: ...

    def count(self) -> int: ...

    def details(self, index: int) -> DeviceDetails: ...

    def memory_used(self, index: int) -> int | None:
        """By all processes; `None` where it cannot be told without allocating."""

    def memory_info(self, index: int) -> dict[str, int]: ...

    def reset_peak(self, index: int) -> None: ...

    def memory_fraction(self, index: int) -> float:
        """The part of its memory that this process may use now."""

    def limit_memory(self, index: int, fraction: float) -> None: ...

    def reserve(self, index: int, limit_bytes: int | None) -> None:
        """Takes all memory up to the limit now and keeps it for later tensors."""

    def selected(self, index: int) -> AbstractContextManager[object]:
        """Makes it torch's current device of its kind, for a while."""


@final
class CachingAccelerator:
    """CUDA, ROCm or XPU: a driver behind torch's caching allocator.

    Args:
        kind: Its kind among stratagem's devices.
        torch_type: Its type among torch's.
        module: `torch.cuda` or `torch.xpu`.
    """

    def __init__(self, kind: str, torch_type: str, module: ModuleType) -> None:
        self.kind = kind
        self.torch_type = torch_type
        self._torch = module

    def count(self) -> int:
        return int(self._torch.device_count())

    def details(self, index: int) -> DeviceDetails:
        properties = self._torch.get_device_properties(index)
        major = getattr(properties, "major", None)
        cores = getattr(properties, "multi_processor_count", getattr(properties, "gpu_subslice_count", None))
        return DeviceDetails(
            device_name=str(properties.name),
            total_memory_bytes=int(properties.total_memory),
            num_cores=cores,
            compute_capability=None if major is None else (major, properties.minor),
        )

    def memory_used(self, index: int) -> int | None:
        # Needs NVIDIA's management library for Python, which is not a dependency.
        try:
            return int(self._torch.device_memory_used(index))
        except (ImportError, RuntimeError, AttributeError):
            return None

    def memory_info(self, index: int) -> dict[str, int]:
        return {
            "current": int(self._torch.memory_allocated(index)),
            "peak": int(self._torch.max_memory_allocated(index)),
        }

    def reset_peak(self, index: int) -> None:
        if self._torch.is_initialized():
            self._torch.reset_peak_memory_stats(index)

    def memory_fraction(self, index: int) -> float:
        return float(self._torch.get_per_process_memory_fraction(index))

    def limit_memory(self, index: int, fraction: float) -> None:
        self._torch.set_per_process_memory_fraction(fraction, index)

    def reserve(self, index: int, limit_bytes: int | None) -> None:
        free_bytes, _ = self._torch.mem_get_info(index)
        _take_and_drop(torch.device(self.torch_type, index), free_bytes, limit_bytes)

    def selected(self, index: int) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], self._torch.device(index))


@final
class MetalAccelerator:
    """MPS: Apple's GPU, which shares the memory of the machine.

    It keeps no peak; what its driver holds, freed tensors included, stands in for it.
    """

    kind = MPS
    torch_type = "mps"

    def __init__(self, module: ModuleType = torch.mps) -> None:
        self._torch = module

    def count(self) -> int:
        return int(self._torch.device_count()) if torch.backends.mps.is_available() else 0

    def details(self, index: int) -> DeviceDetails:
        return DeviceDetails(device_name="Apple GPU", total_memory_bytes=int(self._torch.recommended_max_memory()))

    def memory_used(self, index: int) -> int | None:
        return None

    def memory_info(self, index: int) -> dict[str, int]:
        current = int(self._torch.current_allocated_memory())
        return {"current": current, "peak": max(current, int(self._torch.driver_allocated_memory()))}

    def reset_peak(self, index: int) -> None:
        self._torch.empty_cache()

    def memory_fraction(self, index: int) -> float:
        return 1.0  # torch does not tell

    def limit_memory(self, index: int, fraction: float) -> None:
        self._torch.set_per_process_memory_fraction(fraction)

    def reserve(self, index: int, limit_bytes: int | None) -> None:
        _take_and_drop(torch.device(self.torch_type, index), self._torch.recommended_max_memory(), limit_bytes)

    def selected(self, index: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


@final
class XlaAccelerator:
    """TPUs by torch_xla, or the CPU in their place: devices that compute one program together.

    Args:
        host: The machine.
    """

    kind = TPU
    torch_type = xla.TORCH_TYPE

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()

    def count(self) -> int:
        return xla.num_devices(self._host)

    def details(self, index: int) -> DeviceDetails:
        if xla.is_on_cpu():
            return DeviceDetails("XLA on the CPU", self._host.total_memory_bytes() // self.count())
        return DeviceDetails("TPU", 0)

    def memory_used(self, index: int) -> int | None:
        return None

    def memory_info(self, index: int) -> dict[str, int]:
        return {"current": 0, "peak": 0}  # torch_xla tells only of programs that have begun

    def reset_peak(self, index: int) -> None:
        pass

    def memory_fraction(self, index: int) -> float:
        return 1.0

    def limit_memory(self, index: int, fraction: float) -> None:
        pass

    def reserve(self, index: int, limit_bytes: int | None) -> None:
        pass

    def selected(self, index: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


def of_this_machine() -> tuple[Accelerator, ...]:
    """Every kind of accelerator that torch may have been built for."""
    return (
        CachingAccelerator(GPU, "cuda", torch.cuda),
        CachingAccelerator(XPU, "xpu", torch.xpu),
        MetalAccelerator(),
        XlaAccelerator(),
    )


def _take_and_drop(device: torch.device, free_bytes: int, limit_bytes: int | None) -> None:
    """Takes a block and drops it: torch's allocators keep what is freed, so it stays this process'."""
    # Not all that is free: libraries such as cuBLAS allocate past torch. Whole allocator pages, so
    # that rounding up does not go over the limit.
    wanted = int(0.95 * free_bytes) if limit_bytes is None else min(limit_bytes, free_bytes)
    torch.empty(wanted // _PAGE_BYTES * _PAGE_BYTES, dtype=torch.uint8, device=device)


def is_cpu_build() -> bool:
    """Whether this torch was built without support for any accelerator."""
    versions = (torch.version.cuda, torch.version.hip, torch.version.xpu)
    return not any(versions) and not torch.backends.mps.is_built()
