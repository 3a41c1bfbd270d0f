"""The module `torch.gpu` or `torch.tpu`: what `torch.cuda` is for CUDA, for strict devices.

It has the names that programs and stratagem's own code for accelerators use, so that both run the same lines on strict
devices as on real ones.
"""

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from stratagem.devices.strict import device_memory, streams
from stratagem.devices.strict.slot import HELD


@functools.cache
def module() -> ModuleType:
    """Has the names of `torch.cuda` that programs for one or many GPUs use."""
    made: Any = ModuleType(f"torch.{HELD.torch_type}", f"Strict devices: simulated {HELD.kind}s that are torch's own.")
    for function in (
        *(streams.current_device, streams.set_device, streams.synchronize, streams.set_stream, streams.current_stream),
        *(streams.default_stream, streams.manual_seed, streams.manual_seed_all),
        *(is_available, device_count, is_initialized, get_device_properties, get_device_name, memory_allocated),
        *(max_memory_allocated, reset_peak_memory_stats, mem_get_info, set_per_process_memory_fraction, empty_cache),
        *(get_per_process_memory_fraction, get_rng_state, set_rng_state, get_amp_supported_dtype, is_bf16_supported),
        *(memory_stats, stream),
    ):
        setattr(made, function.__name__, function)
    made.device, made.Stream, made.Event = streams.selected_device, streams.StrictStream, streams.StrictEvent
    made.memory_reserved, made.max_memory_reserved = memory_allocated, max_memory_allocated
    made._initialized = True  # which activation checkpointing looks at, before it keeps the state of generators
    made._is_in_bad_fork = lambda: False
    result: ModuleType = made
    return result


def is_available() -> bool:
    """Whether there is a strict device."""
    return device_memory.num_rooms() > 0


def device_count() -> int:
    """How many there are."""
    return device_memory.num_rooms()


def is_initialized() -> bool:
    """They need no driver that would have to be woken."""
    return True


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """What a device is."""
    room = device_memory.room(streams.index_of(device))
    return SimpleNamespace(
        name=f"simulated {HELD.kind} (strict)", total_memory=room.total_bytes, multi_processor_count=1, major=0, minor=0
    )


def get_device_name(device: Any = None) -> str:
    """Its name."""
    return str(get_device_properties(device).name)


def memory_allocated(device: Any = None) -> int:
    """The bytes that tensors hold on a device."""
    return device_memory.room(streams.index_of(device)).current_bytes


def max_memory_allocated(device: Any = None) -> int:
    """The most that they have held."""
    return device_memory.room(streams.index_of(device)).peak_bytes


def reset_peak_memory_stats(device: Any = None) -> None:
    """Lets the most start again from what is held now."""
    room = device_memory.room(streams.index_of(device))
    room.peak_bytes = room.current_bytes


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The bytes that are free on a device, and all that it has."""
    room = device_memory.room(streams.index_of(device))
    return max(0, room.total_bytes - room.current_bytes), room.total_bytes


def memory_stats(device: Any = None) -> dict[str, Any]:
    """The same, by the names of `torch.cuda`."""
    room = device_memory.room(streams.index_of(device))
    return {
        f"{what}_bytes.all.{when}": value
        for what in ("allocated", "reserved")
        for when, value in (("current", room.current_bytes), ("peak", room.peak_bytes))
    }


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limits what this process may take of a device."""
    device_memory.room(streams.index_of(device)).fraction = fraction


def get_per_process_memory_fraction(device: Any = None) -> float:
    """That limit."""
    return device_memory.room(streams.index_of(device)).fraction


def empty_cache() -> None:
    """Nothing is kept that is not in use."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of the generator of a device."""
    state: torch.Tensor = streams.generator_of(streams.index_of(device)).get_state()
    return state


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Sets it."""
    streams.generator_of(streams.index_of(device)).set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast may compute in."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """As the CPU is, which computes."""
    return True


def stream(given: Any) -> Any:
    """A block in which work goes to a stream."""
    return given
