"""Apple's GPU: `torch.mps`. There is one, and it shares the memory of the machine."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from stratagem.devices.accelerators import take_and_drop
from stratagem.devices.device import DeviceDetails


def is_built() -> bool:
    """Whether this torch can see it."""
    return bool(torch.backends.mps.is_built())


def accelerator(kind: str) -> "MetalAccelerator":
    """That of this machine."""
    return MetalAccelerator(kind)


@final
class MetalAccelerator:
    """It keeps no peak; what its driver holds, freed tensors included, stands in for it."""

    torch_type = "mps"
    limits_memory = True

    def __init__(self, kind: str, module: Any = torch.mps) -> None:
        self.kind = kind
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
        take_and_drop(torch.device(self.torch_type, index), self._torch.recommended_max_memory(), limit_bytes)

    def selected(self, index: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()
