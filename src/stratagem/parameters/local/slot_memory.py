"""The state of an optimizer in shared memory, so that every worker applies its pushes with the same.

Optimizers make their state in their first step. What that will be is found out by a step on zeros, so
that its memory is there before the first push. Optimizers that treat each element by itself work on
blocks that fit the cache; others on whole variables.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from stratagem.errors import ParameterError
from stratagem.parameters.local.journal import Target
from stratagem.parameters.local.shared_variables import TABLE, Held, LocalVariables
from stratagem.processes.region import Region
from stratagem.variables.optimizer_slices import BLOCK, bare_step, is_elementwise, over
from stratagem.variables.store import Placement, laid_out, piece, shaped

_ALIGN_BYTES = 64


@final
@dataclasses.dataclass(frozen=True)
class Cell:
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
    """A block of a variable, or all of it, with its state.

    Args:
        number: Which parameter of the optimizer, counted over all groups.
        name: Of the variable.
        first: Its first element, in the order of memory.
        last: The one after its last.
        is_flat: Whether the optimizer sees a flat vector.
        flag: Where it stands whether there is a state: a cell of one number.
        cells: The state.
    """

    number: int
    name: int
    first: int
    last: int
    is_flat: bool
    flag: Cell
    cells: tuple[Cell, ...]


@final
@dataclasses.dataclass(frozen=True)
class StateMemory:
    """The shared memory of the state of one optimizer.

    Args:
        parts: What the optimizer works on, group after group.
        regions: The memory.
        targets: Lets changes be undone; one for each region.
    """

    parts: tuple[Part, ...]
    regions: tuple[Region, ...]
    targets: tuple[Target, ...]

    def cell(self, cell: Cell) -> torch.Tensor:
        """The value of a cell, where it lies."""
        numel = torch.Size(cell.shape).numel()
        return self.regions[cell.region].shared(cell.dtype, cell.offset, numel).view(cell.shape)

    def read(self, variables: LocalVariables) -> dict[int, dict[str, Any]]:
        """Copies of the state of whole parameters, by name; the caller holds the shards."""
        found: dict[int, dict[str, Any]] = {}
        for part in self.parts:
            if not self.cell(part.flag):
                continue
            placement, own = variables.find(part.name)[1], found.setdefault(part.name, {})
            for cell in part.cells:
                value = self.cell(cell)
                if cell.is_number:
                    own[cell.key] = value.item()
                elif part.is_flat and value.dim():
                    form = torch.empty_strided(placement.shape, placement.stride, dtype=cell.dtype)
                    full = own.setdefault(cell.key, form)
                    piece(full, part.first, part.last).copy_(value)
                elif cell.key not in own:
                    own[cell.key] = value.clone()
        return found

    def write(self, states: Mapping[int, Mapping[str, Any]], variables: LocalVariables) -> None:
        """Takes the state of whole parameters, by name; the caller holds the shards."""
        for part in self.parts:
            given = states.get(part.name)
            self.cell(part.flag).fill_(1 if given else 0)
            for cell in part.cells if given else ():
                if given is None or given.get(cell.key) is None:
                    continue
                value = torch.as_tensor(given[cell.key])
                if part.is_flat and value.dim():
                    ordered = laid_out(value, variables.find(part.name)[1])
                    value = piece(ordered, part.first, part.last)
                self.cell(cell).copy_(value.view(cell.shape))


def layout_of(optimizer: torch.optim.Optimizer, names: Sequence[int], variables: LocalVariables) -> "Layout":
    """Where the state of an optimizer would lie, in the main program.

    Args:
        optimizer: Whose.
        names: Of its parameters' variables, group after group.
        variables: Where these lie.
    """
    layout = Layout(variables.memory.num_shards)
    numbers = iter(range(len(names)))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            number = next(numbers)
            held, placement = variables.find(names[number])
            is_flat = is_elementwise(optimizer) and held.kind != TABLE and not group.get("differentiable")
            forms = _forms(optimizer, group, parameter, is_flat=is_flat, is_table=held.kind == TABLE)
            layout.add(number, names[number], held, placement, forms, is_flat=is_flat)
    return layout


def make_memory(layout: "Layout", variables: LocalVariables) -> StateMemory:
    """Shared memory for a state that is laid out; it holds none yet."""
    regions, targets = [], []
    for number, (shard, shape, dtype) in zip(variables.journal.free_numbers(), layout.kinds, strict=False):
        region = Region.create(torch.Size(shape).numel() * dtype.itemsize)
        regions.append(region)
        targets.append(Target.create(number, shard, region, dtype, shape))
    return StateMemory(layout.parts, tuple(regions), tuple(targets))


Form = tuple[str, tuple[int, ...] | None, torch.dtype, bool]
"""Of a value of a state: its key, its shape (none: that of the part), its dtype, whether it is a plain number."""


def _forms(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    *,
    is_flat: bool,
    is_table: bool,
) -> list[Form]:
    """What the state of a parameter looks like: as it is, or as a step on zeros makes it."""
    shape = (2,) if is_flat else tuple(parameter.shape)
    found = optimizer.state.get(parameter)
    if found:
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


@final
class Layout:
    """Where a state lies: one region for each shard, one for each table and key.

    Args:
        num_shards: How many shards.
    """

    def __init__(self, num_shards: int) -> None:
        self._parts: list[Part] = []
        self._sizes: dict[int, int] = {}  # of the region of each shard, in bytes
        self._tables: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        self._num_shards = num_shards

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the optimizer works on."""
        return tuple(self._parts)

    @property
    def kinds(self) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
        """For each region its shard, shape and dtype."""
        flat = [(shard, (self._sizes.get(shard, 1),), torch.uint8) for shard in range(self._num_shards)]
        return [*flat, *self._tables]

    def add(
        self, number: int, name: int, held: Held, placement: Placement, forms: Sequence[Form], *, is_flat: bool
    ) -> None:
        """Adds a parameter with its state."""
        size = BLOCK if is_flat else max(1, placement.numel)
        for first in range(0, max(1, placement.numel), size):
            last = min(first + size, placement.numel)
            shape = (last - first,) if is_flat else placement.shape
            flag = self._cell(held.shard, "", (), torch.int64)
            cells = []
            for key, own, dtype, is_number in forms:
                if own is None and held.kind == TABLE:
                    self._tables.append((held.shard, shape, dtype))
                    region = self._num_shards + len(self._tables) - 1
                    cells.append(Cell(key, region, 0, shape, dtype, is_number))
                else:
                    cells.append(self._cell(held.shard, key, shape if own is None else own, dtype, is_number))
            self._parts.append(Part(number, name, first, last, is_flat, flag, tuple(cells)))

    def _cell(self, shard: int, key: str, shape: tuple[int, ...], dtype: torch.dtype, is_number: bool = False) -> Cell:
        offset = self._sizes.get(shard, 0)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._sizes[shard] = offset + -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return Cell(key, shard, offset, shape, dtype, is_number)


def shared_part(part: Part, variables: LocalVariables) -> torch.Tensor:
    """What the optimizer sees of a part, where it lies."""
    held, placement = variables.find(part.name)
    if not part.is_flat:
        return shaped(held.store.shared, placement)
    return held.store.shared[placement.offset + part.first : placement.offset + part.last]
