"""Keeps the tensors of distributed objects in memory that all replicas share.

A store holds tensors of one dtype, one after the other. Every replica's parameter is a private view
of the same pages (`processes.region`): one copy serves all, updates through the shared view reach all, and a
change in place is the replica's own until it is published.
"""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

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
        self._tensors: list[Any] = []

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """The tensors that lie here; `None` for one that the program has dropped."""
        return [each() if isinstance(each, weakref.ref) else each for each in self._tensors]

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
            for (_, tensor), placement in zip(named, placements, strict=True):
                shaped(store.shared, placement).copy_(tensor)
                tensor.data = shaped(store.private, placement)
        store._tensors = [weakref.ref(tensor) for _, tensor in named]
        return store

    def bring_back(self) -> None:
        """Moves tensors that the program gave other memory (`weight.data = ...`) back into the store."""
        start, size = self.private.data_ptr(), self.dtype.itemsize
        for tensor, placement in zip(self.tensors, self.placements, strict=True):
            if tensor is None or tensor.data_ptr() == start + placement.offset * size or not placement.numel:
                continue
            if tensor.dtype != self.dtype or tuple(tensor.shape) != placement.shape or tensor.device.type != "cpu":
                raise StrategyError(
                    f"{placement.label!r} was distributed as {self.dtype} {placement.shape} on the CPU and is now "
                    f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; convert a model before its first run"
                )
            view = shaped(self.private, placement)
            with torch.no_grad():
                view.copy_(tensor)
            tensor.data = view

    def build_tensors(self) -> None:
        """Makes this process' own tensors over the store, in a child."""
        storage, start = self.private.untyped_storage(), self.private.storage_offset()
        for placement in self.placements:
            # Not views of one tensor: those count changes together, and autograd then takes a change of one for a
            # change of all.
            view = torch.empty(0, dtype=self.dtype)
            view.set_(storage, start + placement.offset, placement.shape, placement.stride)
            self._tensors.append(torch.nn.Parameter(view, placement.requires_grad) if placement.is_parameter else view)

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
