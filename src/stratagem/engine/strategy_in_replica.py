"""What a strategy is inside a replica: it answers questions, and does nothing that is the main program's."""

import builtins
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, final

import torch

from stratagem.devices.device import LogicalDevice
from stratagem.engine import context
from stratagem.errors import StrategyError


@final
class StrategyInReplica:
    """The strategy, as code in one of its children sees it.

    Args:
        rank: Which replica of its machine.
        devices: Those of the replicas of its machine.
        first: The number of the machine's first replica among those of all machines.
        total: How many replicas there are on all machines.
    """

    def __init__(self, rank: int, devices: Sequence[LogicalDevice], first: int, total: int) -> None:
        self.global_rank = first + rank
        self.devices = tuple(devices)
        self.device: torch.device = devices[rank].torch_device
        self.num_replicas_in_sync = total

    @property
    def world_size(self) -> int:
        return self.num_replicas_in_sync

    num_replicas = world_size

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once, in replica 0."""
        if self.global_rank == 0:
            builtins.print(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block backward passes only add up this replica's own gradients."""
        with no_sync_here():
            yield

    def __enter__(self) -> NoReturn:
        self.__getattr__("close")

    def __exit__(self, *_: object) -> None:
        """Nothing was entered."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise StrategyError(
            f"strategy.{name} was used inside replica {self.global_rank}; use it in the main program, outside run()"
        )


@contextlib.contextmanager
def no_sync_here() -> Iterator[None]:
    """Holds back the exchange of gradients in the run that the code is in."""
    with context.current_runs[-1].no_sync() if context.current_runs else contextlib.nullcontext():
        yield
