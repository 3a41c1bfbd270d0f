"""Streams, events and the current device of strict devices, of each thread.

Kernels of strict devices end before the call that starts them returns, so that streams keep an order and hold nothing
up. Torch's own streams of a backend in Python are all the same one; these take their place.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import torch

from stratagem import _torch
from stratagem.devices.strict import counts
from stratagem.devices.strict.device_memory import num_rooms, room
from stratagem.devices.strict.slot import HELD

_DEVICE_TYPE_NUMBER: Final = 20  # of the private slot, among torch's types of device


class _ChosenByThread(threading.local):
    """What a thread has chosen."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, int] = {}


_current = _ChosenByThread()
_numbers = itertools.count(1)


def carried() -> Callable[[], None]:
    """What gives another thread the device and the streams of this one."""
    device, chosen = _current.device, dict(_current.streams)

    def arrive() -> None:
        _current.device, _current.streams = device, dict(chosen)

    return arrive


def current_device() -> int:
    """The number of the device on which this thread makes what says no number."""
    return _current.device


def set_device(device: Any) -> None:
    """Chooses it; a negative number changes nothing."""
    index = index_of(device)
    if index >= 0:
        room(index)
        _current.device = index


def index_of(device: Any) -> int:
    """The number of a device given as a number, a name or one of torch's; the current one without a number."""
    if device is None:
        return _current.device
    if isinstance(device, int):
        return device
    given = torch.device(device)
    if given.type != HELD.torch_type:
        raise ValueError(f"expected a device of type {HELD.torch_type!r}, got {str(given)!r}")
    return _current.device if given.index is None else given.index


class selected_device:  # noqa: N801 - torch calls its own `device`
    """A block in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = _current.device
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _current.device = self._before


class _AlsoTorchs(type):
    """Lets torch's own objects pass for those of a class that takes the place of torch's."""

    def __instancecheck__(cls, instance: object) -> bool:
        own: Any = cls.__base__ if cls.__module__ == __name__ else None
        return super().__instancecheck__(instance) if own is None else isinstance(instance, own)


_TorchStream: Any = torch.Stream
_TorchEvent: Any = torch.Event
_TorchGenerator: Any = torch.Generator


class StrictStream(_TorchStream, metaclass=_AlsoTorchs):  # type: ignore[misc]
    """A stream: of a strict device its own order of work, of any other device torch's."""

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("device_type") is not None or (device is not None and isinstance(device, int))
        if given or (device is not None and torch.device(device).type != HELD.torch_type):
            return _TorchStream(*(() if device is None else (device,)), *args, **kwargs)
        return _stream(index_of(device), next(_numbers))

    def record_event(self, event: "StrictEvent | None" = None) -> "StrictEvent":
        event = event or StrictEvent(device=self.device)
        event.record(self)
        return event

    def wait_event(self, event: "StrictEvent") -> None:
        counts.note_work(f"wait event {event.number}", self.device_index, self.stream_id)

    def wait_stream(self, other: "StrictStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        counts.note_wait("stream.synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> "StrictStream":
        entered: list[tuple[int, int]] = self.__dict__.setdefault("entered", [])
        entered.append((_current.device, _current.streams.get(self.device_index, 0)))
        set_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.device, _current.streams[self.device_index] = self.__dict__["entered"].pop()


def _stream(device: int, number: int) -> StrictStream:
    made: StrictStream = _TorchStream.__new__(
        StrictStream, stream_id=number, device_index=device, device_type=_DEVICE_TYPE_NUMBER
    )
    return made


def set_stream(stream: Any) -> None:
    """Gives what this thread starts from now on to a stream, and makes its device the current one."""
    set_device(stream.device_index)
    _current.streams[stream.device_index] = stream.stream_id


def current_stream(device: Any = None) -> StrictStream:
    """The stream that gets what this thread starts on a device."""
    index = index_of(device)
    room(index)
    return _stream(index, current_stream_number(index))


def current_stream_number(index: int) -> int:
    """Its number."""
    return _current.streams.get(index, 0)


def default_stream(device: Any = None) -> StrictStream:
    """The stream that there is from the start."""
    return _stream(index_of(device), 0)


def synchronize(device: Any = None) -> None:
    """Waits until a device has done all that it was given; it has."""
    room(index_of(device))
    counts.note_wait("synchronize")


class StrictEvent(_TorchEvent, metaclass=_AlsoTorchs):  # type: ignore[misc]
    """A mark in the order of a stream: of a strict device; of any other device torch's."""

    number: int
    index: int
    recorded_s: float | None

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type != HELD.torch_type:
            return _TorchEvent(device, *args, **kwargs)
        made = _TorchEvent.__new__(cls, device=HELD.torch_type, **kwargs)
        made.number, made.recorded_s, made.index = next(_numbers), None, index_of(device)
        return made

    def record(self, stream: Any = None) -> None:
        stream = stream or current_stream(self.index)
        self.index, self.recorded_s = stream.device_index, time.perf_counter()
        counts.note_work(f"record event {self.number}", stream.device_index, stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        (stream or current_stream(self.index)).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        counts.note_wait("event.synchronize")

    def elapsed_time(self, end_event: "StrictEvent") -> float:
        if self.recorded_s is None or end_event.recorded_s is None:
            raise RuntimeError("both events must be recorded before the time between them is asked for")
        return float(1000 * (end_event.recorded_s - self.recorded_s))


# Random numbers


class _AlsoTorchsGenerator(_AlsoTorchs, type(torch.Generator)):  # type: ignore[misc]
    """The same for a class whose own metaclass is not `type`."""


class StrictGenerator(_TorchGenerator, metaclass=_AlsoTorchsGenerator):  # type: ignore[misc]
    """A generator of random numbers: on a strict device it draws what one of the CPU with that seed would."""

    def __new__(cls, device: Any = "cpu") -> Any:
        given = torch.device(device)
        if given.type != HELD.torch_type:
            return _TorchGenerator(given)
        made = _TorchGenerator.__new__(cls)
        made.strict_device = torch.device(HELD.torch_type, index_of(given))
        number = _torch.private_slot.identity_of(made)
        _device_by_generator[number] = made.strict_device
        weakref.finalize(made, _device_by_generator.pop, number, None)
        return made

    @property
    def device(self) -> torch.device:
        own: torch.device = self.strict_device
        return own

    def clone_state(self) -> "StrictGenerator":
        other: StrictGenerator = StrictGenerator(self.device)
        other.set_state(self.get_state())
        return other


_device_by_generator: dict[int, torch.device] = {}  # kernels get another object for the same generator
_generators: dict[int, StrictGenerator] = {}


def device_of(generator: Any) -> torch.device:
    """Where a generator that a kernel was given belongs."""
    found = _device_by_generator.get(_torch.private_slot.identity_of(generator))
    return torch.device(generator.device) if found is None else found


def generator_of(index: int) -> StrictGenerator:
    """The generator that a device draws from when a program gives none."""
    if index not in _generators:
        made: StrictGenerator = StrictGenerator(torch.device(HELD.torch_type, index))
        made.manual_seed(torch.initial_seed())
        _generators[index] = made
    return _generators[index]


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    generator_of(_current.device).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds all devices."""
    for index in range(num_rooms()):
        generator_of(index).manual_seed(int(seed))
