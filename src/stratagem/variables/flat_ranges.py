"""Neighbouring parts of small parameters that one update takes as a single flat range.

Models have hundreds of small parameters, and each operation of an optimizer on one of them costs more than what it
computes. Where neighbours have their gradients and their state side by side too, as the exchange and `slots` lay them
out, the optimizer gets one tensor over all of them. A range is taken apart for an update in which one of its
parameters has no gradient, or one that lies elsewhere, and as long as their counts of steps differ.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from stratagem.variables.optimizer_slices import BLOCK
from stratagem.variables.slots import Part, SlotCell, Slots
from stratagem.variables.store import Placement, Store


@final
@dataclasses.dataclass(frozen=True)
class UpdatedPart:
    """A part of a parameter that this replica updates.

    Args:
        group: Which group of the optimizer.
        number: Which parameter, counted over all groups.
        tensor: The values, where they lie.
        store: Where the parameter lies.
        placement: Its place there.
        first: Its first element, in the order of memory.
        last: The one after its last.
        place: Where its state lies; `None` if there is no memory for it yet.
    """

    group: int
    number: int
    tensor: torch.Tensor
    store: Store
    placement: Placement
    first: int
    last: int
    place: Part | None

    @property
    def has_state(self) -> bool:
        """Whether there is memory for a state of it."""
        return self.place is not None and bool(self.place.cells)

    @property
    def start(self) -> int:
        """Where it begins in the store."""
        return self.placement.offset + self.first

    @property
    def end(self) -> int:
        """Where it ends there."""
        return self.placement.offset + self.last


@final
class FlatRange:
    """Parts that lie side by side; a single one if it has no such neighbours.

    Args:
        parts: The parts.
        slots: Where their state lies.
        sum_of: The sums of the gradients of a store, flat; `None` as long as they are not summed.
    """

    def __init__(
        self, parts: Sequence[UpdatedPart], slots: Slots, sum_of: Callable[[Store], torch.Tensor | None]
    ) -> None:
        self.parts = parts
        self._store, self._start, self._end = parts[0].store, parts[0].start, parts[-1].end
        self.tensor = self._store.shared[self._start : self._end]
        self.state: dict[str, torch.Tensor] = {}
        self._counts: list[torch.Tensor] = []  # what every parameter has for itself, such as its number of steps
        self._sum_of = sum_of
        self._numbers = [part.number for part in parts]
        # Where gradients are expected, and their strides.
        self._expected: tuple[list[int], list[tuple[int, ...]]] | None = None
        self._differs = False
        if len(parts) > 1:
            self._join_state(slots)

    def _join_state(self, slots: Slots) -> None:
        place = self.parts[0].place
        for cell in place.cells if place is not None else ():
            region = slots.regions[cell.region]
            if cell.shape:
                self.state[cell.key] = region.shared(cell.dtype, cell.offset, self._end - self._start)
            else:
                counts = region.shared(cell.dtype, cell.offset, len(self.parts))
                self.state[cell.key] = counts[0]
                self._counts.append(counts)

    def takes(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the next update can take all of it at once.

        Args:
            parameters: Those of the optimizer.
        """
        if len(self.parts) == 1:
            return False
        gradients: list[Any] = [parameters[number].grad for number in self._numbers]
        if type(None) in set(map(type, gradients)):
            self._differs = bool(self._counts)  # whatever else keeps this update from taking all
            return False
        if not self._finds_gradients():
            return False
        if set(map(_layout, gradients)) != {torch.strided}:
            return False
        found = list(map(_address, gradients)), list(map(_stride, gradients))
        if found != self._expected and not (self._finds_gradients(anew=True) and found == self._expected):
            return False
        self._differs = self._differs and any(bool((each != each[0]).any()) for each in self._counts)
        return not self._differs

    def _finds_gradients(self, *, anew: bool = False) -> bool:
        """Whether it knows where they will be; the sums may lie elsewhere than before."""
        if (anew or self._expected is None) and (flat := self._sum_of(self._store)) is not None:
            self.tensor.grad = flat[self._start : self._end]
            start, itemsize = flat.data_ptr(), flat.dtype.itemsize
            addresses = [start + each.placement.offset * itemsize for each in self.parts]
            self._expected = addresses, [each.placement.stride for each in self.parts]
        return self._expected is not None

    def note_update(self) -> None:
        """After an update of all: every parameter has the counts of the first."""
        for counts in self._counts:
            counts[1:] = counts[0]


def joined(
    parts: Sequence[UpdatedPart], slots: Slots, sum_of: Callable[[Store], torch.Tensor | None]
) -> list[FlatRange]:
    """Parts in ranges that are as long as may be, and stay in the cache."""
    ranges: list[list[UpdatedPart]] = []
    for part in parts:
        if ranges and part.end - ranges[-1][0].start <= BLOCK and _is_next(ranges[-1][-1], part, slots):
            ranges[-1].append(part)
        else:
            ranges.append([part])
    return [FlatRange(each, slots, sum_of) for each in ranges]


def _is_next(one: UpdatedPart, other: UpdatedPart, slots: Slots) -> bool:
    """Whether a part and its state lie right behind another and its."""
    if max(one.placement.numel, other.placement.numel) > BLOCK:
        return False  # what is left of a large parameter, whose gradient need not lie beside those of its neighbours
    if one.store is not other.store or one.group != other.group or not one.store.is_gap(one.end, other.start):
        return False
    if one.place is None or other.place is None or len(one.place.cells) != len(other.place.cells):
        return False
    if one.place.cells and not (slots.cell(one.place.flag) and slots.cell(other.place.flag)):
        return False
    cells = zip(one.place.cells, other.place.cells, strict=True)
    return all(_is_next_cell(*each, other.start - one.start, slots) for each in cells)


def _is_next_cell(one: SlotCell, other: SlotCell, distance: int, slots: Slots) -> bool:
    if (one.key, one.region, one.dtype) != (other.key, other.region, other.dtype) or one.is_number:
        return False
    if one.shape and other.shape:
        return other.offset - one.offset == distance * one.dtype.itemsize
    if one.shape or other.shape or other.offset - one.offset != one.dtype.itemsize:
        return False
    return bool(slots.cell(one) == slots.cell(other))


_layout = operator.attrgetter("layout")
_address, _stride = torch.Tensor.data_ptr, torch.Tensor.stride
