"""Knows which logical device each tensor is on, and how full each device is.

A mark on the tensor's storage says it: views, parameters and what autograd keeps share the storage, and the mark dies
with it. A storage without a mark is at home, on the device that this thread computes on (`home`), or on the first
logical device that has its torch device. Owns the count of what is on each device and the error when it goes over the
limit; `docs/decisions/0020-placement.md` says what is counted.
"""

import contextlib
import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

import torch

from stratagem import _torch
from stratagem.devices import kind_table
from stratagem.devices.device import LogicalDevice, mib
from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.inventory import Inventory, this_process
from stratagem.devices.memory import OutOfMemoryError
from stratagem.errors import DeviceTypeError
from stratagem.placement import resolution
from stratagem.placement.names import type_of

_MARK = "_stratagem_residence"
_NUM_SHOWN = 3
_CPU = torch.device("cpu")


@final
class ResidencePlace:
    """A logical device and what is on it.

    Attributes:
        lacks: Names of torch's functions that it cannot compute, where that is known in advance.
        used_bytes: What the marked tensors take.
        peak_bytes: The most that they took.
    """

    def __init__(self, device: LogicalDevice, places: "Places") -> None:
        self.device = device
        self.torch_device = device.torch_device
        self._places = places
        self.lacks = kind_table.row_of(device.device_type).lacks if device.simulated else frozenset[str]()
        self.used_bytes = 0
        self.peak_bytes = 0
        self._limit_bytes = math.inf if device.memory_limit_bytes is None else device.memory_limit_bytes
        self._residents: dict[int, _Resident] = {}

    @property
    def tracked(self) -> bool:
        """Whether tensors on it are marked; those that nobody has placed are at home, which need not be."""
        here = self._places.here()
        return here.place is not self or here.counts

    def settle(self, tensor: torch.Tensor, maker: Callable[..., Any]) -> None:
        """Marks a new tensor as being here; one that is somewhere already stays there."""
        if not self.tracked or tensor.device != self.torch_device:
            return
        storage = storage_of(tensor)
        if storage is None or _mark_on(storage) is not None:
            return
        num_bytes = storage.nbytes()
        if self.used_bytes + num_bytes > self._limit_bytes:
            self.refuse(tensor, maker, num_bytes)
        tenant = home.tenant if (home := self._places.here().home) is not None else None
        resident = _Resident(num_bytes, maker, tensor.shape, tensor.dtype, tenant)
        setattr(storage, _MARK, _Mark(self, resident))

    def require_room(self, tensor: torch.Tensor, maker: Callable[..., Any]) -> None:
        """Refuses a copy of a tensor that would not fit."""
        if self._limit_bytes is not math.inf:
            num_bytes = tensor.numel() * tensor.element_size()
            if self.tracked and self.used_bytes + num_bytes > self._limit_bytes:
                self.refuse(tensor, maker, num_bytes)

    def refuse(self, tensor: torch.Tensor, maker: Callable[..., Any], num_bytes: int) -> None:
        """Raises the error of a device that is full."""
        limit_bytes = int(self._limit_bytes)
        largest = sorted(self._residents.items(), key=lambda each: -each[1].num_bytes)[:_NUM_SHOWN]
        names = _parameter_names() if largest else {}
        shown = "; ".join(
            f"{names.get(key) or type_of(each.maker)}, {_form(each.shape, each.dtype)}, {mib(each.num_bytes)}"
            for key, each in largest
        )
        raise OutOfMemoryError(
            f"out of memory on {self.device.name}: {type_of(maker)} needs {_form(tensor.shape, tensor.dtype)}, "
            f"{mib(num_bytes)}, with {mib(self.used_bytes)} in use; its limit is {mib(limit_bytes)}. "
            f"Largest on it: {shown or 'nothing'}. Use a smaller batch or model, place a part on another device, or "
            f"give this one a larger memory_limit",
            device=self.device.name,
            limit_bytes=limit_bytes,
            requested_bytes=num_bytes,
        )

    @contextlib.contextmanager
    def reserved(self, tensors: Iterable[torch.Tensor], maker: Callable[..., Any]) -> Iterator[None]:
        """Counts tensors as being here for a while, of views only what they show."""
        num_bytes = 0
        for tensor in tensors:
            if _mark_of(tensor) is None:
                self.require_room(tensor, maker)
                taken = tensor.numel() * tensor.element_size()
                num_bytes += taken
                self._take(taken)
        try:
            yield
        finally:
            self.used_bytes -= num_bytes

    def _take(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @property
    def empty(self) -> bool:
        return not self._residents

    def enter(self, mark: "_Mark", resident: "_Resident") -> None:
        self._residents[id(mark)] = resident
        self._take(resident.num_bytes)

    def leave(self, mark: "_Mark") -> None:
        if id(mark) in self._residents:
            self._remove([id(mark)])

    def vacate(self, tenant: "Tenant") -> None:
        """Lets go of what counts here for a tenant, whoever still has it."""
        if own := [key for key, each in self._residents.items() if each.tenant is tenant]:
            self._remove(own)

    def _remove(self, keys: Iterable[int]) -> None:
        self.used_bytes -= sum(self._residents.pop(key).num_bytes for key in keys)
        if not self._residents:
            for each in _emptied:
                each()


@final
class Tenant:
    """Whoever computes on devices for a while, as a strategy does.

    What came there for it is at home again when it has ended, also if something still holds it.
    """

    has_ended = False

    def end(self) -> None:
        self.has_ended = True
        if _Current.places is not None:
            _Current.places.vacate(self)


class _Resident(NamedTuple):
    """What is remembered of a tensor, without keeping it alive."""

    num_bytes: int
    maker: Callable[..., Any]
    shape: torch.Size
    dtype: torch.dtype
    tenant: Tenant | None


@final
class _Mark:
    """Says where a storage is, as long as it lives; torch keeps what is set on a storage for its whole life."""

    __slots__ = ("number", "place", "tenant")

    def __init__(self, place: ResidencePlace, resident: _Resident) -> None:
        self.place = place
        self.tenant = resident.tenant
        self.number = next_mark()
        place.enter(self, resident)

    def __del__(self) -> None:
        # torch.compile makes objects of what it reads without calling their constructors.
        if (place := getattr(self, "place", None)) is not None:
            place.leave(self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a storage is another one, and not marked


next_mark = itertools.count().__next__
"""Numbers the marks: the greater ones were made later."""

_emptied: list[Callable[[], None]] = []


def when_emptied(call: Callable[[], None]) -> None:
    """Has a function called whenever the last tensor on a device is gone, in whichever thread that was."""
    _emptied.append(call)


@final
class Places:
    """The logical devices of one configuration."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.configured = inventory.configured()
        self._by_name = {device.name: ResidencePlace(device, self) for device in inventory.logical()}
        self.host = self._by_name[resolution.host(inventory).name]
        self._first = {place.torch_device: place for place in reversed(self._by_name.values())} | {_CPU: self.host}
        self._by_spec: dict[tuple[DeviceSpec, bool], Asked | None] = {}
        self._threads = _SeenByThread()

    def at(self, device: LogicalDevice) -> ResidencePlace:
        if device.name not in self._by_name:  # of another machine's configuration
            self._by_name[device.name] = ResidencePlace(device, self)
        return self._by_name[device.name]

    @property
    def home(self) -> ResidencePlace:
        """Where tensors of this thread are that nobody has placed."""
        return self.here().place

    def here(self) -> "_Here":
        """The places as this thread sees them; on an accelerator, what torch has there is at home too."""
        home, found = home_here(), self._threads.here
        if found is None or found.home is not home:
            found = self._threads.here = self._seen_from(home)
        return found

    def _seen_from(self, home: "Home | None") -> "_Here":
        if home is None:
            return _Here(None, self.host, self.host.device.memory_limit_bytes is not None, self._first)
        by_torch = self._first | {home.device.torch_device: self.at(home.device)}
        return _Here(home, by_torch[_CPU], home.counts, by_torch)

    def asked(self, spec: DeviceSpec, operation: str) -> "Asked | None":
        """What a spec asks for (`resolution.resolve`)."""
        key = spec, resolution.is_soft()
        if key not in self._by_spec:
            device = resolution.resolve(spec, operation, inventory=self.inventory)
            self._by_spec[key] = None if device is None else self._fulfil(spec, device)
        return self._by_spec[key]

    def _fulfil(self, spec: DeviceSpec, device: LogicalDevice) -> "Asked":
        exists = spec.device_type in (None, device.device_type) and spec.device_index in (None, device.index)
        name, why = (device.name, "scope") if exists else (str(spec), "no such device")
        return Asked(self.at(device), name, why)

    def of(self, tensor: torch.Tensor) -> ResidencePlace:
        """Where a tensor is."""
        mark = _mark_of(tensor)
        if mark is not None:
            return mark.place
        found = self.here().by_torch.get(tensor.device)
        return self.host if found is None else found

    def has_placed(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of some tensors is where a scope, or what a scope has placed, put it."""
        return any(_mark_of(each) is not None for each in tensors)

    def vacate(self, tenant: Tenant) -> None:
        """Lets go of what is on any of them for a tenant."""
        for place in self._by_name.values():
            place.vacate(tenant)

    @property
    def empty(self) -> bool:
        return all(place.empty for place in self._by_name.values())


class Asked(NamedTuple):
    """What scopes ask for.

    Attributes:
        place: Where that is, or what comes nearest.
        name: The device that was asked for.
        why: Why operations run at the place.
    """

    place: ResidencePlace
    name: str
    why: str


class Home(NamedTuple):
    """The device that a thread computes on.

    Attributes:
        device: The device.
        replica: Which replica computes there; `None` outside of runs.
        counts: Whether what is on it is counted here, because a limit was set that nothing else holds.
        tenant: For whom.
    """

    device: LogicalDevice
    replica: int | None = None
    counts: bool = False
    tenant: Tenant | None = None


class _Here(NamedTuple):
    """The places as a thread sees them that is at home on one.

    Attributes:
        home: Its home.
        place: Where its tensors are that nobody has placed.
        counts: Whether these are counted.
        by_torch: Where tensors without a mark are, by their torch device.
    """

    home: Home | None
    place: ResidencePlace
    counts: bool
    by_torch: dict[torch.device, ResidencePlace]


class _SeenByThread(threading.local):
    """How a thread saw the places last."""

    here: _Here | None = None


class _Current:
    """The places of this process, as long as its configuration stands, and where it is at home for life."""

    places: Places | None = None
    home: Home | None = None


class _Moved(threading.local):
    """Where this thread is at home instead."""

    home: Home | None = None


_moved = _Moved()


def home_here() -> Home | None:
    """Where this thread is at home: where it was moved to, else where the process is."""
    return _moved.home or _Current.home


def move_home(home: Home | None) -> Home | None:
    """Makes another device the home of this thread, `None` that of the process; returns what was given before."""
    before, _moved.home = _moved.home, home
    return before


def stay_at(home: Home) -> None:
    """Makes a device the home of this process, for all threads that are not elsewhere."""
    _Current.home = home


def replica() -> int | None:
    """Which replica of a strategy this thread computes as; `None` outside of runs."""
    home = home_here()
    return None if home is None else home.replica


def counting_home() -> ResidencePlace | None:
    """The place where this thread computes, if what is there is counted."""
    home = home_here()
    return current().home if home is not None and home.counts else None


def current() -> Places:
    """The places of this process' configuration; the same ones as long as it, or anything on them, stays."""
    found, inventory = _Current.places, this_process()
    if (
        found is None
        or found.inventory is not inventory
        or (found.empty and found.configured != inventory.configured())
    ):
        found = _Current.places = Places(inventory)
    return found


def in_use() -> bool:
    """Whether any tensor is on a device that counts them, or what is made at home counts."""
    home = home_here()
    if home is not None and home.counts:
        return True
    places = _Current.places
    return places is not None and places.inventory is this_process() and not places.empty


def release(tensors: Iterable[torch.Tensor], since: int = 0) -> None:
    """Takes tensors off the devices that they were placed on; they are at home again.

    Args:
        tensors: The tensors.
        since: A number from `next_mark`; tensors that were marked before it stay where they are.
    """
    for tensor in tensors:
        storage = storage_of(tensor)
        mark = _mark_on(storage)
        if mark is not None and mark.number >= since:
            delattr(storage, _MARK)


def device_of(tensor: torch.Tensor) -> LogicalDevice:
    """Returns the logical device that a tensor is on.

    Raises:
        DeviceTypeError: It is not a tensor.
    Example:
        >>> device_of(torch.ones(2)).name
        '/device:CPU:0'
    """
    if not isinstance(tensor, torch.Tensor):
        raise DeviceTypeError(
            f"device_of takes a tensor, got {type(tensor).__name__}; for a module, ask its parameters"
        )
    mark = _mark_of(tensor)
    if mark is None:
        for ask in _owners if home_here() is None else ():
            if (owned := ask(tensor)) is not None:
                return owned
    return (mark.place if mark is not None else current().of(tensor)).device


_owners: list[Callable[[torch.Tensor], LogicalDevice | None]] = []


@contextlib.contextmanager
def owned(ask: Callable[[torch.Tensor], LogicalDevice | None]) -> Iterator[None]:
    """In the block, `device_of` asks whether a tensor that nobody has placed is a variable, and where."""
    _owners.append(ask)
    try:
        yield
    finally:
        _owners.remove(ask)


def memory_info(device: LogicalDevice) -> dict[str, int] | None:
    """What tensors take on a device that counts them, in bytes; `None` where none were placed."""
    place = _counting(device)
    return None if place is None else {"current": place.used_bytes, "peak": place.peak_bytes}


def reset_peak(device: LogicalDevice) -> None:
    """Lets the peak start again from what is there now."""
    if place := _counting(device):
        place.peak_bytes = place.used_bytes


def _counting(device: LogicalDevice) -> ResidencePlace | None:
    places = _Current.places
    if places is None or places.inventory is not this_process() or device.torch_device.type != "cpu":
        return None
    place = current().at(device)
    return place if place.peak_bytes else None


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, of a sparse one that of its values; `None` where torch only wraps others."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        if tensor.layout is torch.sparse_coo:
            return _torch.tensors.sparse_values(tensor).untyped_storage()
        return None if tensor.layout is torch.strided else tensor.values().untyped_storage()


def _mark_of(tensor: torch.Tensor) -> _Mark | None:
    return _mark_on(storage_of(tensor))


def _mark_on(storage: torch.UntypedStorage | None) -> _Mark | None:
    mark: _Mark | None = getattr(storage, _MARK, None)
    return None if mark is None or (mark.tenant is not None and mark.tenant.has_ended) else mark


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a {str(dtype).removeprefix('torch.')} tensor of shape {tuple(shape)}"


def _parameter_names() -> dict[int, str]:
    """The names of marked parameters and buffers, by mark; looks through the whole program."""
    names: dict[int, str] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            for name, tensor in (*each.named_parameters(), *each.named_buffers()):
                key = id(_mark_of(tensor))
                if len(name) > len(names.get(key, "")):
                    names[key] = name
    return {key: f"parameter {name!r}" for key, name in names.items()}
