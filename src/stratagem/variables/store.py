"""Keeps the tensors of distributed objects in memory that all replicas share.

A store holds tensors of one dtype, one after the other. Every replica's parameter is a private view
of the same pages (`processes.region`): one copy serves all, updates through the shared view reach all, and a
change in place is the replica's own until it is published. Each tensor has a storage of its own, so that
`torch.save` writes that tensor and no other, and autograd counts its changes alone.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import call
from typing import Any, Final, NamedTuple, final

import torch

from stratagem import _torch
from stratagem.errors import StrategyError
from stratagem.processes.region import Region

_ALIGN_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a tensor lies in its store, and what it looks like."""

    name: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool
    label: str = ""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class OwnPart(NamedTuple):
    """The elements of a tensor that one replica updates for all.

    Args:
        first: The first of them, in the order of memory.
        last: The one after the last.
        placement: Where the whole tensor lies in `shared`.
        shared: Memory that all replicas see.
    """

    first: int
    last: int
    placement: Placement
    shared: torch.Tensor

    def values(self, first: int, last: int) -> torch.Tensor:
        """Elements of the tensor as a flat vector that all replicas see."""
        return self.shared[self.placement.offset + first : self.placement.offset + last]


@final
class Homes:
    """Where tensors lie in a flat memory, each in a storage of its own; the program's are brought back if they move.

    Args:
        flat: The memory.
        placements: Where each tensor lies in it.
    """

    def __init__(self, flat: torch.Tensor, placements: Sequence[Placement]) -> None:
        self._placements = placements
        self._device = flat.device
        if flat.device.type == "cpu":
            data = flat.view(torch.uint8).numpy()
            self._kept = [_part(data, flat.dtype, each) for each in placements]
        else:  # one storage for all, but a count of changes for each
            self._kept = [piece(flat, each.offset, each.offset + each.numel).data for each in placements]
        self._addresses = [each.data_ptr() for each in self._kept]
        self._dtype = flat.dtype

    def make(self, number: int) -> torch.Tensor:
        """A new tensor at the place of one."""
        placement, kept = self._placements[number], self._kept[number]
        made = torch.empty(0, dtype=self._dtype, device=self._device)
        made.set_(kept.untyped_storage(), kept.storage_offset(), placement.shape, placement.stride)
        return made

    def bring_back(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Brings tensors home that the program gave other memory (`weight.data = ...`), with their values.

        What the program has kept of a home (`backup = weight.data`) gets memory of its own, and keeps its values.

        Returns:
            Which had moved.
        """
        if type(None) not in set(map(type, tensors)) and list(map(_address, tensors)) == self._addresses:
            return []
        moved = [
            number
            for number, (tensor, address) in enumerate(zip(tensors, self._addresses, strict=True))
            if tensor is not None and tensor.data_ptr() != address
        ]
        if not moved:
            return moved
        for number in moved:
            self._check(tensors[number], self._placements[number])
        if self._device.type == "cpu":
            _torch.storages.move_aliases([each for number in moved if _is_used(each := self._kept[number])])
        with torch.no_grad():
            for number in moved:
                tensor: Any = tensors[number]
                tensor.data = self.make(number).copy_(tensor)
        return moved

    def _check(self, tensor: Any, placement: Placement) -> None:
        if tensor.dtype != self._dtype or tuple(tensor.shape) != placement.shape or tensor.device != self._device:
            where = "the CPU" if self._device.type == "cpu" else str(self._device)
            raise StrategyError(
                f"{placement.label!r} was distributed as {self._dtype} {placement.shape} on {where} and is now "
                f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; convert a model before its first run"
            )


@final
class Store:
    """Tensors of one dtype in shared memory, as one process sees them.

    Args:
        region: The memory.
        dtype: Of all tensors in it.
        placements: Where they lie.
    """

    def __init__(self, region: Region, dtype: torch.dtype, placements: Sequence[Placement]) -> None:
        self.region = region
        self.dtype = dtype
        self.placements = list(placements)
        self.num_elements = region.num_bytes // dtype.itemsize
        self.shared = region.shared(dtype, 0, self.num_elements)
        self.private = region.private(dtype, 0, self.num_elements)
        self.gone: set[int] = set()
        self._homes = Homes(self.private, self.placements)
        self._tensors: list[Any] = []
        self._are_referred_to = False  # the program's own are not kept alive

    def is_gap(self, first: int, last: int) -> bool:
        """Whether between two elements lies only what aligns the second, and no other tensor."""
        return 0 <= (last - first) * self.dtype.itemsize < _ALIGN_BYTES

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """The tensors that lie here; `None` for one that the program has dropped."""
        return list(map(call, self._tensors)) if self._are_referred_to else self._tensors

    @classmethod
    def take_in(
        cls,
        named: Sequence[tuple[int, torch.Tensor]],
        dtype: torch.dtype,
        labels: Mapping[int, str],
        align_bytes: int = _ALIGN_BYTES,
    ) -> "Store":
        """Moves tensors of this process into a new store; the tensors stay the same objects."""
        placements, offset = [], 0
        for name, tensor in named:
            form = torch.empty_like(tensor, memory_format=torch.preserve_format)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            label = labels.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
            shape = tuple(form.shape)
            placements.append(Placement(name, offset, shape, form.stride(), tensor.requires_grad, is_parameter, label))
            per_line = max(1, align_bytes // dtype.itemsize)
            offset += -(-tensor.numel() // per_line) * per_line
        store = cls(Region.create(offset * dtype.itemsize), dtype, placements)
        with torch.no_grad():
            for number, ((_, tensor), placement) in enumerate(zip(named, placements, strict=True)):
                shaped(store.shared, placement).copy_(tensor)
                tensor.data = store._homes.make(number)
        store._tensors, store._are_referred_to = [weakref.ref(tensor) for _, tensor in named], True
        return store

    def bring_back(self) -> None:
        """Moves tensors that the program gave other memory back into the store."""
        self._homes.bring_back(self.tensors)

    def build_tensors(self) -> None:
        """Makes this process' own tensors over the store, in a child."""
        for number, placement in enumerate(self.placements):
            made = self._homes.make(number)
            self._tensors.append(torch.nn.Parameter(made, placement.requires_grad) if placement.is_parameter else made)

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.region, self.dtype, self.placements)


def laid_out(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The tensor with its elements in the order of a placement: itself, or a copy."""
    if tensor.stride() == placement.stride:
        return tensor
    return torch.empty_strided(placement.shape, placement.stride, dtype=tensor.dtype).copy_(tensor)


def piece(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Elements of a tensor as a flat vector, in the order of its memory."""
    return tensor.as_strided((last - first,), (1,), tensor.storage_offset() + first)


def shaped(flat: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The tensor of a placement, as a view of a flat vector that is laid out like its store."""
    return flat.as_strided(placement.shape, placement.stride, flat.storage_offset() + placement.offset)


def _part(data: Any, dtype: torch.dtype, placement: Placement) -> torch.Tensor:
    if not placement.numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, offset=placement.offset * dtype.itemsize, count=placement.numel)


_address: Final[Callable[[Any], int]] = torch.Tensor.data_ptr


def _is_used(kept: torch.Tensor) -> bool:
    """Whether anything lies in the storage of a tensor besides the tensor itself."""
    return _torch.storages.num_storage_users(kept) > 2  # it, and the object that is asked
