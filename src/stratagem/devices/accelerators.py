"""Asks torch about accelerators: how many, which, their memory.

Owns what all kinds have in common: the functions that `torch.cuda` has, and the modules of other kinds after its
model. What only one vendor has is in its file in `vendors`; which kinds there are is `kind_table`'s.
Counting does not initialise a driver, and nothing here allocates on a device except `reserve`.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, cast, final

import torch

from stratagem.devices.device import DeviceDetails
from stratagem.errors import DeviceConfigurationError, DeviceError

_PAGE_BYTES = 2 * 2**20

LIMIT_CALL: Final = "set_per_process_memory_fraction"
"""What torch's modules of accelerators call the function that limits the memory of a process."""


class Accelerator(Protocol):
    """One kind of accelerator, as torch sees it. Memory readings are those of this process."""

    @property
    def kind(self) -> str: ...

    @property
    def torch_type(self) -> str: ...

    @property
    def limits_memory(self) -> bool:
        """Whether torch can limit what a process takes, so that the device can be divided."""

    def count(self) -> int: ...

    def details(self, index: int) -> DeviceDetails: ...

    def memory_used(self, index: int) -> int | None:
        """By all processes; `None` where it cannot be told without allocating."""

    def memory_info(self, index: int) -> dict[str, int]:
        """What this process holds, as `current` and `peak`; raises `DeviceError` where torch does not tell."""

    def reset_peak(self, index: int) -> None: ...

    def memory_fraction(self, index: int) -> float:
        """The part of its memory that this process may use now."""

    def limit_memory(self, index: int, fraction: float) -> None:
        """Raises `DeviceConfigurationError` where torch cannot."""

    def reserve(self, index: int, limit_bytes: int | None) -> None:
        """Takes all memory up to the limit now and keeps it for later tensors."""

    def selected(self, index: int) -> AbstractContextManager[object]:
        """Makes it torch's current device of its kind, for a while."""


def described(properties: Any) -> DeviceDetails:
    """What a module after the model of `torch.cuda` says of a device."""
    return DeviceDetails(str(getattr(properties, "name", properties)), int(getattr(properties, "total_memory", 0)))


def untold(index: int) -> None:
    """How much memory all processes use, where the vendor does not tell."""


@final
class TorchAccelerator:
    """A kind of accelerator with a module of torch's, such as `torch.cuda`.

    Torch's own modules have all functions. Those of vendors may lack some: then `torch.accelerator` is asked, and what
    it does not know either is said to be unknown, or cannot be done.

    Args:
        kind: Its kind among stratagem's devices.
        torch_type: Its type among torch's.
        module: Where its functions are; `None` if this program has not loaded what brings them.
        describe: What the vendor's properties of a device mean.
        used_bytes: How much memory all processes use on a device, where the vendor tells without allocating.
        limit_call: The function of the module that limits a process to a part of the memory, if there is one.
    """

    def __init__(
        self,
        kind: str,
        torch_type: str,
        module: Any,
        *,
        describe: Callable[[Any], DeviceDetails] = described,
        used_bytes: Callable[[int], int | None] = untold,
        limit_call: str | None = LIMIT_CALL,
    ) -> None:
        self.kind = kind
        self.torch_type = torch_type
        self._torch = module
        self._describe = describe
        self._used_bytes = used_bytes
        self._limit_call = limit_call

    @property
    def limits_memory(self) -> bool:
        return self._limit_call is not None and hasattr(self._torch, self._limit_call)

    def count(self) -> int:
        return 0 if self._torch is None else int(self._torch.device_count())

    def details(self, index: int) -> DeviceDetails:
        if hasattr(self._torch, "get_device_properties"):
            return self._describe(self._torch.get_device_properties(index))
        free_and_total = self._free_and_total(index)
        return DeviceDetails(self.kind, 0 if free_and_total is None else free_and_total[1])

    def memory_used(self, index: int) -> int | None:
        return self._used_bytes(index)

    def memory_info(self, index: int) -> dict[str, int]:
        try:
            current, peak = self._function("memory_allocated"), self._function("max_memory_allocated")
            return {"current": int(current(index)), "peak": int(peak(index))}
        except (RuntimeError, NotImplementedError) as error:
            raise DeviceError(
                f"torch does not tell how much memory is in use on {self.torch_type}:{index}: neither torch."
                f"{self.torch_type} nor torch.accelerator reports it ({str(error).splitlines()[0]})"
            ) from error

    def reset_peak(self, index: int) -> None:
        # A driver that sleeps has no peak to reset.
        if getattr(self._torch, "is_initialized", lambda: True)():
            self._function("reset_peak_memory_stats")(index)

    def memory_fraction(self, index: int) -> float:
        told = getattr(self._torch, f"g{LIMIT_CALL.removeprefix('s')}", None)
        return 1.0 if told is None else float(told(index))

    def limit_memory(self, index: int, fraction: float) -> None:
        if not self.limits_memory:
            raise DeviceConfigurationError(why_no_limits(self))
        getattr(self._torch, str(self._limit_call))(fraction, index)

    def reserve(self, index: int, limit_bytes: int | None) -> None:
        free_and_total = self._free_and_total(index)
        if free_and_total is None:
            raise DeviceConfigurationError(
                f"the memory of {self.kind}:{index} cannot be reserved at the start, because torch does not tell how "
                f"much is free there; leave set_memory_growth(..., False) out"
            )
        take_and_drop(torch.device(self.torch_type, index), free_and_total[0], limit_bytes)

    def selected(self, index: int) -> AbstractContextManager[object]:
        if hasattr(self._torch, "device"):
            return cast(AbstractContextManager[object], self._torch.device(index))
        return torch.accelerator.device_index(index)

    def _function(self, name: str) -> Callable[[int], Any]:
        found: Callable[[int], Any] | None = getattr(self._torch, name, None)
        if found is None and str(torch.accelerator.current_accelerator()) == self.torch_type:
            found = getattr(torch.accelerator, name, None)
        if found is None:
            raise NotImplementedError(f"torch.accelerator is {torch.accelerator.current_accelerator()}")
        return found

    def _free_and_total(self, index: int) -> tuple[int, int] | None:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            own = getattr(self._torch, "mem_get_info", None)
            free_bytes, total_bytes = (own or self._function("get_memory_info"))(index)
            return int(free_bytes), int(total_bytes)
        return None


def why_no_limits(accelerator: Accelerator) -> str:
    """Why memory limits cannot be set on a kind of accelerator, and what to do."""
    return (
        f"the memory of a {accelerator.kind} cannot be limited or divided: torch.{accelerator.torch_type} has no "
        f"{LIMIT_CALL}; use the device whole, without memory_limit"
    )


def take_and_drop(device: torch.device, free_bytes: int, limit_bytes: int | None) -> None:
    """Takes a block and drops it: torch's allocators keep what is freed, so it stays this process'."""
    # Not all that is free: libraries such as cuBLAS allocate past torch. Whole allocator pages, and less than the
    # limit, which torch holds as a fraction: rounding must not go over it.
    wanted = int(0.95 * free_bytes) if limit_bytes is None else min(limit_bytes - 1, free_bytes)
    torch.empty(wanted // _PAGE_BYTES * _PAGE_BYTES, dtype=torch.uint8, device=device)
