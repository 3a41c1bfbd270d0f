"""Makes children of this machine replicas of a strategy, from the controller's side."""

from collections.abc import Sequence
from typing import Any, Protocol

from stratagem.devices.device import LogicalDevice
from stratagem.engine import child_calls
from stratagem.engine.recipe import Recipe
from stratagem.engine.strategy_in_replica import StrategyInReplica
from stratagem.processes.children import Children
from stratagem.processes.group import ChildGroup
from stratagem.processes.losses import raise_first
from stratagem.processes.region import Region


class Elsewhere(Protocol):
    """Where the children of a strategy are, if not on this machine: they share no memory with it."""

    @property
    def children(self) -> Children:
        """Where they come from."""

    def meet(self, name: str) -> dict[str, Any]:
        """What a collective is told so that it finds the others under a name that is new."""

    def join(self, group: ChildGroup, key: int, recipe: Recipe, devices: Sequence[LogicalDevice]) -> None:
        """Makes them replicas of the strategy."""


def join(
    group: ChildGroup,
    key: int,
    recipe: Recipe,
    devices: Sequence[LogicalDevice],
    meeting: Region,
    scratch: Region,
) -> None:
    """Gives every child its device and the memory in which all meet."""
    group.call(
        child_calls.join,
        [
            (
                *(key, rank, device, recipe, meeting, scratch),
                StrategyInReplica(rank, devices, recipe.first, recipe.total),
            )
            for rank, device in enumerate(devices)
            if rank
        ],
    )
    group.collect()
    raise_first(None, group.failures())
