"""A push of a worker: its gradients, applied once to the shared values with the optimizer's own rule.

The worker applies its push itself, under the locks of the shards that it touches, so that no value
travels through another process. It is whole or not there: the journal undoes what a worker that was
killed had begun.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from stratagem.collectives.collective import is_finite
from stratagem.parameters.local.board import NUM_BUCKETS, Board
from stratagem.parameters.local.journal import Saving, Target
from stratagem.parameters.local.shared_variables import TABLE, Held, LocalVariables
from stratagem.parameters.local.slot_memory import StateMemory, shared_part
from stratagem.variables.optimizer_slices import bare_step, copy_options, is_elementwise, over
from stratagem.variables.slots import Part
from stratagem.variables.store import laid_out, piece


@final
class SharedUpdate:
    """The update of one optimizer in one worker.

    Args:
        optimizer: The worker's own, over its own copies.
        memory: Its state, which all workers share.
        variables: Where the values lie.
        worker: Which worker this is.
        rate_of: The factor of the learning rate, by staleness; `None` for 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        memory: StateMemory,
        variables: LocalVariables,
        worker: int,
        rate_of: Callable[[int], float] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._memory = memory
        self._variables = variables
        self._worker = worker
        self._rate_of = rate_of
        self._step = bare_step(type(optimizer))
        self._is_elementwise = is_elementwise(optimizer)
        parts = memory.slots.parts
        self._parts = [(part, shared_part(part, variables), *variables.find(part.name)) for part in parts]
        self._cells = [{cell.key: (memory.slots.cell(cell), cell.is_number) for cell in part.cells} for part in parts]
        self._has_state = any(part.cells for part in parts)
        self._state_version = -1
        self._without_state: list[int] = []
        self._inner: Any = None

    @property
    def targets(self) -> Sequence[Target]:
        """What lets changes of the state be undone."""
        return self._memory.targets

    def shards_of(self, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        """The shards that an update with these gradients touches."""
        return sorted({held.shard for part, _, held, _ in self._parts if gradients[part.number] is not None})

    def savings(self, gradients: Sequence[torch.Tensor | None]) -> list[Saving]:
        """What an update with these gradients may write to."""
        ranges: dict[int, tuple[Held, int, int]] = {}
        plan: list[Saving] = []
        shards = set()
        for part, _, held, placement in self._parts:
            gradient = gradients[part.number]
            if gradient is None:
                continue
            shards.add(held.shard)
            if held.kind == TABLE:
                plan += self._savings_of_table(part, held, gradient)
            else:
                _, start, stop = ranges.get(id(held), (held, placement.offset, placement.offset))
                first, last = placement.offset + part.first, placement.offset + part.last
                ranges[id(held)] = held, min(start, first), max(stop, last)
        plan += [(held.target, (start, stop)) for held, start, stop in ranges.values()]
        if self._has_state:
            plan += [(self._memory.targets[each], (0, len(self._memory.targets[each].live))) for each in sorted(shards)]
        return plan

    def _savings_of_table(self, part: Part, held: Held, gradient: torch.Tensor) -> list[Saving]:
        rows = gradient.indices()[0] if gradient.is_sparse else torch.arange(len(held.target.live))
        own = [self._memory.targets[cell.region] for cell in part.cells if len(cell.shape) > 1]
        return [(target, rows) for target in (held.target, *own) if target.live.dim() > 1]

    def apply(self, gradients: Sequence[torch.Tensor | None], staleness: int) -> None:
        """Updates the shared values; the caller holds the shards and has saved what may change."""
        if self._inner is None:
            self._build()
        copy_options(self._optimizer, self._inner)
        if self._rate_of is not None:
            for group in self._inner.param_groups:
                group["lr"] = group["lr"] * self._rate_of(staleness)
        # Others may have replaced what is no tensor, or no tensor that is changed in place.
        is_old = not self._is_elementwise or self._state_version != self._variables.board.state_version
        if self._has_state and is_old:
            self._take_state()
        self._give_gradients(gradients)
        try:
            with torch.no_grad():
                self._step(self._inner)
            if self._has_state:
                self._share_state()
        except BaseException:
            self._state_version = -1  # what it has by now is not what will be there
            raise
        finally:
            for _, tensor, _, _ in self._parts:
                tensor.grad = None
        note_staleness(self._variables.board, self._worker, staleness)

    def _build(self) -> None:
        """Makes an optimizer over the shared values; now that the worker's own has the groups of the main program."""
        numbers = itertools.count()
        by_number: dict[int, list[torch.Tensor]] = {}
        for part, tensor, *_ in self._parts:
            by_number.setdefault(part.number, []).append(tensor)
        groups = [
            {**group, "params": [each for _ in group["params"] for each in by_number[next(numbers)]]}
            for group in self._optimizer.param_groups
        ]
        self._inner = over(self._optimizer, groups)

    def _give_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        ordered: dict[int, torch.Tensor] = {}
        for part, tensor, _, placement in self._parts:
            gradient = gradients[part.number]
            if gradient is None or not part.is_flat:
                tensor.grad = gradient
                continue
            if part.number not in ordered:
                ordered[part.number] = laid_out(gradient, placement)
            tensor.grad = piece(ordered[part.number], part.first, part.last)

    def _take_state(self) -> None:
        """Lets the optimizer work on the state that all share."""
        self._state_version = self._variables.board.state_version
        self._inner.state.clear()
        self._without_state = []
        for place, (part, tensor, _, _) in enumerate(self._parts):
            if part.cells and self._memory.slots.cell(part.flag):
                self._inner.state[tensor] = self._values(place)
            elif part.cells:
                self._without_state.append(place)

    def _values(self, place: int) -> dict[str, Any]:
        return {key: cell.item() if is_number else cell for key, (cell, is_number) in self._cells[place].items()}

    def _share_state(self) -> None:
        """Brings into shared memory what the optimizer has made or replaced."""
        places = self._without_state if self._is_elementwise else range(len(self._parts))
        has_news = False
        for place in places:
            part, tensor, _, _ = self._parts[place]
            state = self._inner.state.get(tensor)
            if not state:
                continue
            for key, (cell, is_number) in self._cells[place].items():
                value = state.get(key)
                if is_number:
                    cell.fill_(value)
                elif isinstance(value, torch.Tensor) and value is not cell:
                    cell.copy_(value)
                    state[key] = cell
            if not self._memory.slots.cell(part.flag):
                self._memory.slots.cell(part.flag).fill_(1)
                has_news = True
        if has_news:
            board = self._variables.board
            board.state_version += 1
            self._take_state()


def note_staleness(board: Board, worker: int, staleness: int) -> None:
    """Counts a push of a worker."""
    board.histogram[worker, min(staleness, NUM_BUCKETS - 1)] += 1


def as_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as an optimizer applies it to what lies in memory of the host: rows summed and in order."""
    return (gradient.coalesce() if gradient.is_sparse else gradient).cpu()


def is_finite_gradient(gradient: torch.Tensor) -> bool:
    """Whether a gradient can be applied: all of its numbers are finite."""
    numbers = as_gradient(gradient).values() if gradient.is_sparse else gradient
    return not numbers.is_floating_point() or is_finite(numbers)
