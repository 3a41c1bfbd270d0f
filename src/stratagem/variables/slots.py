"""The state of optimizers in shared memory: where each value lies, and views of it.

Optimizers make their state in their first step. What that will be is found out by a step on zeros, so
that its memory is there before the first update. A slot of a parameter's shape lies as the parameter
does, in one piece, whatever parts it is updated in: so the state of whole parameters is views of it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from stratagem.errors import ParameterError, StrategyError
from stratagem.processes.region import Region
from stratagem.variables.optimizer_slices import BLOCK, bare_step, over
from stratagem.variables.store import Placement, laid_out, piece

_ALIGN_BYTES = 64


@final
@dataclasses.dataclass(frozen=True)
class SlotCell:
    """Where one value of an optimizer's state lies.

    Args:
        key: Its name in the state.
        region: Which of the regions of the state.
        offset: In bytes.
        shape: Of the tensor.
        dtype: Of the tensor.
        is_number: Whether it is a number of Python's, kept as a tensor.
    """

    key: str
    region: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_number: bool


@final
@dataclasses.dataclass(frozen=True)
class Part:
    """A range of a parameter, or all of it, with its state.

    Args:
        number: Which parameter of the optimizer, counted over all groups.
        placement: Of the parameter.
        first: Its first element, in the order of memory.
        last: The one after its last.
        is_flat: Whether the optimizer sees a flat vector.
        flag: Where it stands whether there is a state: a cell of one number.
        cells: The state.
    """

    number: int
    placement: Placement
    first: int
    last: int
    is_flat: bool
    flag: SlotCell
    cells: tuple[SlotCell, ...]

    @property
    def name(self) -> int:
        """Of the parameter."""
        return self.placement.name

    def require_fitting(self, state: Mapping[str, Any] | None, kind: str) -> None:
        """Refuses a state for which there is no memory.

        Args:
            state: Of the whole parameter; `None` if it has none.
            kind: The class of the optimizer.
        """
        for cell in self.cells if state else ():
            value = state.get(cell.key) if state else None
            shape = self.placement.shape if self.is_flat and cell.shape else cell.shape
            if value is None or torch.as_tensor(value).numel() != torch.Size(shape).numel():
                found = "nothing" if value is None else f"a value of shape {tuple(torch.as_tensor(value).shape)}"
                raise StrategyError(
                    f"a new state that a step gives a {kind} must have all parts of the old one: {cell.key!r} of "
                    f"{self.placement.label!r} is of shape {shape}, got {found}; give it whole, or clear it"
                )


@final
@dataclasses.dataclass(frozen=True)
class Slots:
    """The state of one optimizer, in shared memory.

    Args:
        parts: What the optimizer works on, group after group.
        regions: The memory.
    """

    parts: tuple[Part, ...]
    regions: tuple[Region, ...]

    def cell(self, cell: SlotCell) -> torch.Tensor:
        """The value of a cell, where it lies."""
        numel = torch.Size(cell.shape).numel()
        return self.regions[cell.region].shared(cell.dtype, cell.offset, numel).view(cell.shape)

    def views(self) -> dict[int, dict[str, Any]]:
        """The state of whole parameters, by name, where it lies; without those that have none yet.

        What is written to a view is this process' own until `write` takes it: else a change in place that all
        replicas make would be made several times. What is not of a parameter's shape, as a count of steps, each part
        has for itself: shown is that of the first.
        """
        found: dict[int, dict[str, Any]] = {}
        for part in self.parts:
            if part.name not in found and self.cell(part.flag):
                found[part.name] = {cell.key: self._whole(part, cell) for cell in part.cells}
        return found

    def _whole(self, part: Part, cell: SlotCell) -> Any:
        if cell.is_number:
            return self.cell(cell).item()
        region = self.regions[cell.region]
        if not part.is_flat or not cell.shape:
            return region.private(cell.dtype, cell.offset, torch.Size(cell.shape).numel()).view(cell.shape)
        start = cell.offset - part.first * cell.dtype.itemsize
        flat = region.private(cell.dtype, start, part.placement.numel)
        return flat.as_strided(part.placement.shape, part.placement.stride)

    def is_written(self) -> bool:
        """Whether this process has written to views."""
        return any(len(region.written_pages()) for region in self.regions)

    def drop_written(self) -> None:
        """Lets views show what all have."""
        for region in self.regions:
            region.drop(region.written_pages())

    def read(self) -> dict[int, dict[str, Any]]:
        """Copies of the state of whole parameters, by name; the caller sees to it that nobody writes."""
        return {
            name: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
            for name, own in self.views().items()
        }

    def write(self, states: Mapping[int, Mapping[str, Any]], parts: Iterable[Part] | None = None) -> None:
        """Takes the state of whole parameters, by name; the caller sees to it that nobody reads.

        Args:
            states: The state of each; those that are not in it have none.
            parts: Which parts of them; by default all.
        """
        for part in self.parts if parts is None else parts:
            given = states.get(part.name)
            self.cell(part.flag).fill_(1 if given else 0)
            for cell in part.cells if given else ():
                if given is None or given.get(cell.key) is None:
                    continue
                value = torch.as_tensor(given[cell.key])
                if part.is_flat and value.dim():
                    value = piece(laid_out(value, part.placement), part.first, part.last)
                self.cell(cell).copy_(value.view(cell.shape))


Form = tuple[str, tuple[int, ...] | None, torch.dtype, bool]
"""Of a value of a state: its key, its shape (none: that of the part), its dtype, whether it is a plain number."""


def forms_of(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    *,
    is_flat: bool,
    is_table: bool = False,
) -> list[Form]:
    """What the state of a parameter looks like: as it is, or as a step on zeros makes it.

    Args:
        optimizer: Whose state.
        group: That of the parameter.
        parameter: The parameter.
        is_flat: Whether the optimizer sees flat vectors of it.
        is_table: Whether it has sparse gradients.
    """
    shape = (2,) if is_flat else tuple(parameter.shape)
    found = optimizer.state.get(parameter)
    if found and (parameter.dim() or not is_flat):  # of a single number a state does not show what is of its shape
        shape = tuple(parameter.shape)
    else:
        few = (min(2, shape[0]), *shape[1:]) if is_table else shape
        trial = torch.zeros(few, dtype=parameter.dtype)
        trial.grad = torch.zeros_like(trial)
        if is_table:
            trial.grad = trial.grad.to_sparse(1).coalesce()
        inner = over(optimizer, [{**group, "params": [trial]}])
        with torch.no_grad():
            bare_step(type(optimizer))(inner)
        found, shape = inner.state.get(trial, {}), few
    forms: list[Form] = []
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and value.is_sparse:
            raise ParameterError(
                f"{type(optimizer).__name__} keeps {key!r} of a table with sparse gradients, which grows with all rows "
                f"ever touched; use SGD without momentum, Adagrad or SparseAdam for it"
            )
        if isinstance(value, torch.Tensor):
            same = value.shape == shape and value.dim() > 0
            forms.append((key, None if same else tuple(value.shape), value.dtype, False))
        elif isinstance(value, bool | int | float):
            forms.append((key, (), torch.float64 if isinstance(value, float) else torch.int64, True))
        elif value is not None:
            raise ParameterError(
                f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}, which workers cannot share; "
                f"keep tensors and numbers in the state of a parameter, each under a key of its own"
            )
    return forms


def blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements that are updated at a time."""
    for start in range(first, last, BLOCK):
        yield start, min(start + BLOCK, last)


@final
@dataclasses.dataclass(frozen=True)
class _Added:
    """A parameter that is to have a state (`Layout.add`)."""

    number: int
    placement: Placement
    forms: tuple[Form, ...]
    ranges: tuple[tuple[int, int], ...] | None
    region: int
    separate: bool

    def is_followed_by(self, other: "_Added") -> bool:
        """Whether another lies right behind it, and will have the same state."""
        if None in (self.ranges, other.ranges) or self.separate or other.separate:
            return False
        gap = other.placement.offset - self.placement.offset - self.placement.numel
        return (self.forms, self.region) == (other.forms, other.region) and 0 <= gap < _ALIGN_BYTES


@final
class Layout:
    """Where a state will lie: slots of neighbouring parameters side by side, as the parameters lie.

    So a range of several parameters has its state in ranges of the same form, and can be updated at once.

    Args:
        num_regions: How many regions parameters are put in; more are added where a slot has one to itself.
    """

    def __init__(self, num_regions: int = 1) -> None:
        self._added: list[_Added] = []
        self._parts: list[Part] = []
        self._sizes = [0] * num_regions  # in bytes
        self._separate: list[tuple[int, tuple[int, ...], torch.dtype]] = []

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the optimizer works on."""
        self._place_all()
        return tuple(self._parts)

    @property
    def kinds(self) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
        """For each region the number that its parameters were added with, its shape and its dtype."""
        self._place_all()
        flat = [(number, (max(1, size),), torch.uint8) for number, size in enumerate(self._sizes)]
        return [*flat, *self._separate]

    def make(self) -> Slots:
        """The memory; it holds no state yet."""
        regions = [Region.create(torch.Size(shape).numel() * dtype.itemsize) for _, shape, dtype in self.kinds]
        return Slots(self.parts, tuple(regions))

    def add(
        self,
        number: int,
        placement: Placement,
        forms: Sequence[Form],
        ranges: Sequence[tuple[int, int]] | None,
        *,
        region: int = 0,
        separate: bool = False,
    ) -> None:
        """Adds a parameter with its state.

        Args:
            number: Which parameter of the optimizer.
            placement: Of the parameter.
            forms: Of its state.
            ranges: The elements that are updated at a time, as flat vectors; `None` to update it whole.
            region: In which memory.
            separate: Whether slots of its shape lie in regions of their own.
        """
        own = None if ranges is None else tuple(ranges)
        self._added.append(_Added(number, placement, tuple(forms), own, region, separate))

    def _place_all(self) -> None:
        added, self._added = self._added, []
        neighbours: list[_Added] = []
        for each in added:
            if neighbours and not neighbours[-1].is_followed_by(each):
                self._place(neighbours)
                neighbours = []
            neighbours.append(each)
        if neighbours:
            self._place(neighbours)

    def _place(self, neighbours: Sequence[_Added]) -> None:
        head, tail = neighbours[0], neighbours[-1].placement
        span = tail.offset + tail.numel - head.placement.offset
        num_parts = sum(1 if each.ranges is None else len(each.ranges) for each in neighbours)
        flags = self._reserve(head.region, num_parts * torch.int64.itemsize)
        starts: dict[str, tuple[int, int]] = {}
        for key, shape, dtype, _ in head.forms:
            if shape is None and head.separate:
                self._separate.append((head.region, head.placement.shape, dtype))
                starts[key] = len(self._sizes) + len(self._separate) - 1, 0
            else:
                numel = span if shape is None else num_parts * torch.Size(shape).numel()
                starts[key] = head.region, self._reserve(head.region, numel * dtype.itemsize)
        counted = itertools.count()
        for each in neighbours:
            before = each.placement.offset - head.placement.offset
            for first, last in [(0, each.placement.numel)] if each.ranges is None else each.ranges:
                own = each.placement.shape if each.ranges is None else (last - first,)
                count = next(counted)
                offset = flags + count * torch.int64.itemsize
                flag = SlotCell("", head.region, offset, (), torch.int64, is_number=False)
                cells = []
                for key, shape, dtype, is_number in head.forms:
                    where, start = starts[key]
                    position = before + first if shape is None else count * torch.Size(shape).numel()
                    form = own if shape is None else shape
                    cells.append(SlotCell(key, where, start + position * dtype.itemsize, form, dtype, is_number))
                part = Part(each.number, each.placement, first, last, each.ranges is not None, flag, tuple(cells))
                self._parts.append(part)

    def _reserve(self, region: int, num_bytes: int) -> int:
        offset = self._sizes[region]
        self._sizes[region] = offset + -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return offset
