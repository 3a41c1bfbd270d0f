"""The state of optimizers of the parameter server: in the shards of its variables; changes of it can be undone."""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch

from stratagem.parameters.local.journal import Target
from stratagem.parameters.local.shared_variables import TABLE, LocalVariables
from stratagem.variables.optimizer_slices import is_elementwise
from stratagem.variables.slots import Layout, Part, Slots, blocks, forms_of
from stratagem.variables.store import shaped


@final
@dataclasses.dataclass(frozen=True)
class StateMemory:
    """The shared memory of the state of one optimizer.

    Args:
        slots: The state.
        targets: Lets changes be undone; one for each region.
    """

    slots: Slots
    targets: tuple[Target, ...]


def layout_of(optimizer: torch.optim.Optimizer, names: Sequence[int], variables: LocalVariables) -> Layout:
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
            is_table = held.kind == TABLE
            is_flat = is_elementwise(optimizer) and not is_table and not group.get("differentiable")
            forms = forms_of(optimizer, group, parameter, is_flat=is_flat, is_table=is_table)
            ranges = (list(blocks(0, placement.numel)) or [(0, 0)]) if is_flat else None
            layout.add(number, placement, forms, ranges, region=held.shard, separate=is_table)
    return layout


def make_memory(layout: Layout, variables: LocalVariables) -> StateMemory:
    """Shared memory for a state that is laid out; it holds none yet."""
    slots = layout.make()
    targets = [
        variables.journal.new_target(number, shard, region, dtype, shape)
        for number, region, (shard, shape, dtype) in zip(
            variables.journal.free_numbers(), slots.regions, layout.kinds, strict=False
        )
    ]
    return StateMemory(slots, tuple(targets))


def shared_part(part: Part, variables: LocalVariables) -> torch.Tensor:
    """What the optimizer sees of a part, where it lies."""
    held, placement = variables.find(part.name)
    if not part.is_flat:
        return shaped(held.store.shared, placement)
    return held.store.shared[placement.offset + part.first : placement.offset + part.last]
