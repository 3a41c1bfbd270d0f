"""Makes strict devices devices of torch: `torch.device("gpu:1")`, `torch.gpu`, `torch.accelerator`.

Owns what is put into torch, once and for the life of a process: torch has one private slot for a backend, and no way
to give it back. So all strict devices of a process are of one kind. How many there are may change as long as none is
in use.
`docs/decisions/0027-strict-devices.md` says what torch's hook carries and what it does not.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from stratagem import _torch
from stratagem.devices import kind_table
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.strict import device_memory, device_module, kernels, mixed_precision, streams
from stratagem.devices.strict.slot import HELD
from stratagem.errors import DeviceConfigurationError

_KEY: Final = "PrivateUse1"
_libraries: list[torch.library.Library] = []  # what they registered lasts as long as they do
_waiting: list[Callable[[], None]] = []


def install(kind: str, num_devices: int, total_bytes: int) -> TorchAccelerator:
    """Lets this process have so many strict devices of a kind with so much memory each.

    Raises:
        DeviceConfigurationError: Another backend has torch's private slot, or strict devices of another kind have it.
    """
    _require_registered(kind)
    device_memory.set_rooms(num_devices, total_bytes)
    return TorchAccelerator(kind, HELD.torch_type, device_module.module())


def strict_device(kind: str, index: int) -> torch.device:
    """Names a strict device, also in a process that has not been told yet how many there are."""
    _require_registered(kind)
    return torch.device(HELD.torch_type, index)


def when_registered(act: Callable[[], None]) -> None:
    """Does something once torch knows strict devices in this process; at once if it does."""
    if HELD.kind:
        act()
    else:
        _waiting.append(act)


def _require_registered(kind: str) -> None:
    if HELD.kind == kind:
        return
    if HELD.kind:
        raise DeviceConfigurationError(
            f"all strict devices of a process are of one kind, as torch has one private slot for backends: this "
            f"process has strict {HELD.kind}s and cannot have strict {kind}s; simulate one of them without strict"
        )
    holder = _torch.private_slot.holder()
    if holder is not None:
        raise DeviceConfigurationError(
            f"strict devices need torch's private slot for backends, which {holder!r} holds in this process; use "
            f"the devices of {holder!r}, or simulate_devices without strict"
        )
    HELD.kind, HELD.torch_type = kind, str(kind_table.row_of(kind).strict_type)
    register()
    while _waiting:
        _waiting.pop()()


def register() -> None:
    """Puts the devices that `HELD` names into torch's private slot."""
    library: Any = torch.library.Library  # which has no annotations
    _torch.private_slot.take(HELD.torch_type, device_module.module())
    anything = library("_", "IMPL")
    anything.fallback(kernels.run, _KEY)
    for key, what in kernels.REFUSED.items():
        anything.fallback(functools.partial(kernels.refuse, what), key)
    aten = library("aten", "IMPL")
    for name, kernel in _own_kernels().items():
        aten.impl(name, kernel, _KEY)
    for name, kernel in kernels.HOST_KERNELS.items():
        aten.impl(name, kernel, "CPU")
    for name, kernel in mixed_precision.kernels().items():
        aten.impl(name, kernel, mixed_precision.AUTOCAST_KEY)
    anything.fallback(torch.library.fallthrough_kernel, mixed_precision.AUTOCAST_KEY)
    _libraries.extend((anything, aten))
    _torch.private_slot.replace_accelerator_functions(_accelerator_functions())
    _torch.private_slot.run_backward_of_private_slot(torch.device(HELD.torch_type, 0), streams.carried)
    _replace_in_torch()


def _own_kernels() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for operation in (*_torch.operations.operations_of("CPU"), *_torch.operations.foreach_operations()):
        schema = _torch.operations.schema_of(operation)
        name = schema.name.partition("::")[2] + (f".{schema.overload_name}" if schema.overload_name else "")
        shown = [each.alias_info for each in schema.arguments if each.alias_info is not None]
        is_view = name.startswith("set_.source") or any(not each.is_write for each in shown)
        found[name] = functools.partial(_torch.operations.run_kernel_of_cpu if is_view else kernels.run, operation)
    return found | kernels.KERNELS


# `torch.accelerator`


def _accelerator_functions() -> dict[str, Callable[..., Any]]:
    return {
        "getDeviceIndex": streams.current_device,
        "setDeviceIndex": streams.set_device,
        "exchangeDevice": _exchange_device,
        "maybeExchangeDevice": _exchange_device,
        "synchronizeDevice": streams.synchronize,
        "getStream": streams.current_stream,
        "setStream": streams.set_stream,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": device_module.empty_cache,
        "getDeviceStats": _nested_stats,
        "resetAccumulatedStats": lambda _: None,
        "resetPeakStats": device_module.reset_peak_memory_stats,
        "getMemoryInfo": device_module.mem_get_info,
    }


def _exchange_device(index: int) -> int:
    before = streams.current_device()
    streams.set_device(index)
    return before


def _nested_stats(index: int) -> dict[str, Any]:
    room = device_memory.room(index)
    both = {"all": {"current": room.current_bytes, "peak": room.peak_bytes, "allocated": 0, "freed": 0}}
    return {"allocated_bytes": both, "reserved_bytes": both}


# What torch asks its guard for, which does not know the current device


def _replace_in_torch() -> None:
    """A device without a number is the current one: torch's own code would take number 0."""
    anything: Any = torch
    for owner, name in (
        *((torch, each) for each in ("tensor", "as_tensor", "asarray")),
        *((torch.Tensor, each) for each in ("to", "new_tensor")),
    ):
        setattr(owner, name, _on_current_device(getattr(owner, name)))
    _torch.private_slot.number_device_contexts(_numbered)
    _torch.private_slot.let_data_move(HELD.torch_type)
    anything.Stream, anything.Event = streams.StrictStream, streams.StrictEvent
    anything.Generator = streams.StrictGenerator
    original = torch.UntypedStorage.__new__
    anything.UntypedStorage.__new__ = staticmethod(functools.partial(_new_storage, original))


def _on_current_device(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _numbered(kwargs["device"])
        elif len(args) > 1:
            args = (args[0], _numbered(args[1]), *args[2:])
        return original(*args, **kwargs)

    return function


def _numbered(device: Any) -> Any:
    if isinstance(device, torch.device):
        without = device.type == HELD.torch_type and device.index is None
    else:
        without = isinstance(device, str) and device == HELD.torch_type
    return torch.device(HELD.torch_type, streams.current_device()) if without else device


def _new_storage(original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != HELD.torch_type:
        return original(kind, *args, **kwargs)
    with _torch.modes.without_function_modes():
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()
