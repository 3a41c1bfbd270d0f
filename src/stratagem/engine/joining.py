"""Makes children of this machine replicas of a strategy and connects them, from the controller's side."""

import contextlib
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol

from stratagem.collectives.reconnecting import TorchLink
from stratagem.collectives.signals import PeerAborted
from stratagem.devices.device import LogicalDevice
from stratagem.devices.inventory import this_process
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
    configuration = this_process().configured()
    group.call(
        child_calls.join,
        [
            (
                *(key, rank, device, recipe, meeting, scratch),
                *(StrategyInReplica(rank, devices, recipe.first, recipe.total), None, configuration),
            )
            for rank, device in enumerate(devices)
            if rank
        ],
    )
    group.collect()
    raise_first(None, group.failures())


def connect(group: ChildGroup, key: int, own: TorchLink, started: contextlib.ExitStack | None) -> None:
    """Connects replica 0 and the children, all at once.

    Args:
        group: The children.
        key: By which they know the strategy.
        own: The connection of replica 0.
        started: Where to leave the file in which they meet, if it has to last as long as the connection does.
    """
    with contextlib.ExitStack() as folders:
        path = folders.enter_context(tempfile.TemporaryDirectory(prefix="stratagem-")) + "/store"
        group.call_all(child_calls.connect, key, path)
        with contextlib.suppress(PeerAborted):  # then a child says why
            own.connect(path)
        group.collect()
        raise_first(None, group.failures(besides=PeerAborted))
        # Else it goes at once: a program that is killed must not leave it behind.
        if started is not None:
            started.push(folders.pop_all())
