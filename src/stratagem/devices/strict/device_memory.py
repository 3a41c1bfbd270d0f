"""Keeps the memory of strict devices: which memory of the host stands for which, how much, and how much there may be.

A tensor on a strict device is a plain tensor of torch whose storage is on that device. The memory behind it is the
host's: DLPack, the exchange format of tensors, says where memory is, and here it says the strict device.
"""

import ctypes
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch.utils import dlpack

from stratagem import _torch
from stratagem.devices.device import mib
from stratagem.devices.memory import OutOfMemoryError, served_share
from stratagem.devices.strict import counts
from stratagem.devices.strict.slot import HELD


class _DLPackHead(ctypes.Structure):
    """The beginning of DLPack's `DLManagedTensor`: the memory and where it is."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


_to_capsule: Final[Callable[[torch.Tensor], Any]] = operator.attrgetter("to_dlpack")(dlpack)
_EXTENSION_DEVICE: Final = 12  # DLPack's number for devices that it does not know
_pointer_of: Callable[..., int] = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@final
class _Room:
    """The memory of one device."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.fraction = 1.0
        self.current_bytes = 0
        self.peak_bytes = 0

    @property
    def limit_bytes(self) -> int:
        return int(self.total_bytes * self.fraction)


_lock = threading.RLock()
_rooms: list[_Room] = []
_held: dict[
    int, "weakref.ref[torch.Tensor]"
] = {}  # by the address of a storage on a device, the host's tensor behind it
_freed: deque[tuple[int, int]] = deque()  # device and bytes; collected wherever Python frees, counted when asked for


def set_rooms(num_devices: int, total_bytes: int) -> None:
    """So many devices with so much memory each; what tensors hold already stays counted."""
    with _lock:
        del _rooms[num_devices:]
        for room in _rooms:
            room.total_bytes = total_bytes
        _rooms.extend(_Room(total_bytes) for _ in range(num_devices - len(_rooms)))


def num_rooms() -> int:
    """How many devices there are."""
    return len(_rooms)


def room(index: int) -> _Room:
    """The memory of a device, up to date.

    Raises:
        RuntimeError: There is no such device.
    """
    with _lock:
        while _freed:
            device, num_bytes = _freed.popleft()
            if device < len(_rooms):
                _rooms[device].current_bytes -= num_bytes
        if not 0 <= index < len(_rooms):
            raise RuntimeError(
                f"invalid device ordinal: {HELD.torch_type}:{index} does not exist, there are {len(_rooms)} strict "
                f"{HELD.kind}s"
            )
        return _rooms[index]


def require(num_bytes: int, index: int) -> None:
    """Refuses an allocation that a device has no room for."""
    own = room(index)
    if own.current_bytes + num_bytes > own.limit_bytes:
        share = served_share(index)
        name = f"/device:{HELD.kind}:{index}" if share is None else share.name
        raise OutOfMemoryError(
            f"out of memory on {name}: {mib(num_bytes)} ({num_bytes} bytes) were asked for, "
            f"{mib(own.current_bytes)} of its limit of {mib(own.limit_bytes)} are in use. Make the batch or the model "
            f"smaller, or raise memory_limit",
            name,
            own.limit_bytes,
            num_bytes,
        )


def to_device(host: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor of the host, which nobody else holds, as one on a device; its memory stays where it is."""
    storage = host.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes != host.numel() * host.itemsize or not _is_dense(host):
        host = host.clone(memory_format=torch.contiguous_format)
        storage = host.untyped_storage()
        num_bytes = storage.nbytes()
    require(num_bytes, index)
    capsule = _to_capsule(host)
    head = _DLPackHead.from_address(_pointer_of(capsule, b"dltensor"))
    head.device_type, head.device_id = _EXTENSION_DEVICE, index
    made: torch.Tensor = dlpack.from_dlpack(capsule)
    pointer = storage.data_ptr()
    if pointer:
        _hold(host, pointer, index, num_bytes)
    return made


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The host's tensor in the memory of one on a device."""
    pointer = tensor.untyped_storage().data_ptr()
    if not pointer:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    host = held() if (held := _held.get(pointer)) is not None else None
    if host is None:
        raise RuntimeError(f"the memory of a tensor on {tensor.device} is not that of a strict device")
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    found = torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage(), *place)
    found = found.conj() if tensor.is_conj() else found  # torch only marks these, and computes them when they are read
    return _torch.tensors.negated_view(found) if tensor.is_neg() else found


def is_on_device(host: torch.Tensor) -> bool:
    """Whether a tensor of the host is in the memory of one on a device."""
    return host.untyped_storage().data_ptr() in _held


def _hold(host: torch.Tensor, pointer: int, index: int, num_bytes: int) -> None:
    def free(reference: "weakref.ref[torch.Tensor]") -> None:
        _freed.append((index, num_bytes))
        if _held.get(pointer) is reference:  # the address may be another tensor's by now
            del _held[pointer]

    with _lock:
        own = room(index)
        own.current_bytes += num_bytes
        own.peak_bytes = max(own.peak_bytes, own.current_bytes)
        _held[pointer] = weakref.ref(host, free)
    counts.note_allocation(index)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it covers its memory once: no element twice, none left out."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.storage_offset() == 0


# Memory of the host from which devices copy while the host goes on

_pinned: dict[int, "weakref.ref[torch.UntypedStorage]"] = {}


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory."""
    copy = tensor.clone()
    storage = copy.untyped_storage()
    pointer = storage.data_ptr()

    def unpin(reference: "weakref.ref[torch.UntypedStorage]") -> None:
        if _pinned.get(pointer) is reference:
            del _pinned[pointer]

    _pinned[pointer] = weakref.ref(storage, unpin)
    return copy


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the host is in pinned memory."""
    return tensor.untyped_storage().data_ptr() in _pinned
