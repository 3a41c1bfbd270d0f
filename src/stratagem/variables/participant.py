"""What variables need of the replica that they belong to, whoever drives it."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from stratagem.collectives.between import Between
from stratagem.collectives.collective import Collective
from stratagem.collectives.signals import Signals
from stratagem.variables.store import OwnPart, Placement, Store


class Options(Protocol):
    """What all replicas of a strategy have in common, as far as it concerns variables."""

    @property
    def size(self) -> int:
        """How many replicas this machine has."""

    @property
    def total(self) -> int:
        """How many all machines have."""

    @property
    def num_machines(self) -> int: ...

    @property
    def unused(self) -> str:
        """What a gradient that only some replicas have means: `zero` in the others, or an `error`."""

    @property
    def on_nonfinite(self) -> str:
        """What a gradient that is not finite does to its step: `skip`, `raise` or `apply`."""

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type as which gradients of a type travel between replicas."""


class Participant(Protocol):
    """One replica, as its variables see it."""

    @property
    def rank(self) -> int:
        """Which replica of this machine."""

    @property
    def global_rank(self) -> int:
        """Which replica of all machines."""

    @property
    def recipe(self) -> Options: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def signals(self) -> Signals:
        """Where the replicas of this machine meet."""

    @property
    def control(self) -> Collective:
        """How they exchange small tensors."""

    @property
    def collective(self) -> Collective:
        """How replicas of all machines exchange tensors."""

    @property
    def between(self) -> Between | None:
        """How the first replicas of all machines do; only they have it."""

    @property
    def counted(self) -> list[bool]:
        """Which replicas of this machine have examples in the step."""

    @property
    def weight(self) -> float:
        """By which what this replica computes counts."""

    @property
    def is_mean(self) -> bool:
        """Whether the weights of all replicas are parts of one."""

    @property
    def all_counted(self) -> list[bool]:
        """Which of all machines have."""

    @property
    def first_with_examples(self) -> int:
        """The first of them; the first of all if none has."""

    @property
    def compared_step(self) -> int:
        """The number of the step if replicas compare their copies of the parameters at its end; else 0."""


class Updating(Protocol):
    """One replica, as its optimizers see it."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def update_elsewhere(self) -> Callable[[torch.optim.Optimizer], None] | None:
        """In replica 0: has the values updated by somebody else, and fetches them; `None` if it does so itself."""

    def may_update(self, parameters: Iterable[torch.Tensor], *, checked: bool = False) -> bool:
        """Whether the gradients of these parameters are fit to be applied; the same in every replica."""

    def split_update(
        self, parameters: Iterable[torch.Tensor], *, checked: bool = False
    ) -> contextlib.AbstractContextManager[bool]:
        """Around an update of which each replica does its own part."""

    def publish_written(self) -> None:
        """Makes parameters that the program changed in place everyone's."""

    def share_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gives all replicas what replica 0 alone has written to parameters."""


class Located(Protocol):
    """Parameters of which each replica updates a part, in memory that all share."""

    def find(self, tensor: torch.Tensor) -> tuple[Store, Placement]:
        """Where a tensor lies."""

    def own_part(self, tensor: torch.Tensor) -> OwnPart:
        """The elements of a tensor that this replica updates."""

    def sum_of(self, store: Store) -> torch.Tensor | None:
        """The sums of the gradients of a store, flat; `None` if they are not summed. Large ones may lie elsewhere."""

    def part_of(self, rank: int, tensor: torch.Tensor) -> OwnPart:
        """Those that another one updates."""
