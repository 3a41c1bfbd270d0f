"""What a replica must be able to do with its copies of the variables, wherever they lie.

Two ways exist: pages that all replicas share (`shared`), and copies of one's own on any
device (`private`). A `Replica` has one of them and does not know which. The same object
serves the controller between runs: there it gives tensors out and finds what was written to.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from stratagem.collectives.reconnecting import TorchLink
from stratagem.variables.aggregation import Aggregation
from stratagem.variables.ledger import Ledger
from stratagem.variables.participant import Updating
from stratagem.variables.slices import SplitUpdate
from stratagem.variables.store import OwnPart

WRITTEN_FLAG, BUFFERS_FLAG, ALL_WRITTEN_FLAG, ALL_BUFFERS_FLAG = 1, 2, 5, 6


@dataclasses.dataclass(frozen=True)
class Written:
    """What the controller wrote to between two runs and must travel by value: tensors and gradients, by name.

    `told` is what other machines compare, where there are any: labels and checksums.
    """

    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    exchanges: list[Any] = dataclasses.field(default_factory=list)
    after_failure: bool = False
    told: dict[str, int] = dataclasses.field(default_factory=dict)


class Copies(ABC):
    """One replica's variables, and how they agree with those of the others.

    Args:
        ledger: The gradients of its parameters.
        link: What must be connected before a run, where memory is not enough.
    """

    def __init__(self, ledger: Ledger, link: TorchLink | None = None) -> None:
        self.ledger = ledger
        self.link = link
        self._chosen: dict[int, Aggregation] = {}  # of buffers that are not joined as their type says, by name

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that still exist."""
        return [parameter for _, parameter in self.ledger.parameters()]

    @abstractmethod
    def buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The buffers that still exist, by name."""

    def choose(self, chosen: Mapping[int, Aggregation]) -> None:
        """Takes how some buffers, by `id`, are joined from now on."""
        if chosen:
            self._chosen |= {name: chosen[id(buffer)] for name, buffer in self.buffers() if id(buffer) in chosen}

    # Distributed tensors

    @abstractmethod
    def place(self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str]) -> list[Any]:
        """Makes the controller's tensors ready to be given out; returns what the children are sent."""

    @abstractmethod
    def build(self, placed: Any) -> dict[int, torch.Tensor]:
        """Makes a child's own tensors of what it was sent, by name."""

    @abstractmethod
    def add(self, placed: Any, tensors: Mapping[int, torch.Tensor]) -> None:
        """Takes this process' own tensors of what was placed or built."""

    @abstractmethod
    def drop(self, names: set[int]) -> None:
        """Lets go of tensors that the program has dropped."""

    @abstractmethod
    def split(self, optimizer: torch.optim.Optimizer, replica: Updating) -> SplitUpdate | None:
        """This replica's part of an optimizer's update; `None` if every replica makes the whole."""

    def own_part(self, tensor: torch.Tensor) -> OwnPart | None:
        """The elements of a tensor that this replica updates for all; `None` if each updates the whole of its own."""
        return None

    # Between runs

    @abstractmethod
    def take_written(self) -> Written:
        """In the controller: what it wrote to since the last run, as far as it travels by value."""

    @abstractmethod
    def receive(self, written: Written) -> None:
        """In a child: takes what the controller wrote to."""

    @abstractmethod
    def note_state(self) -> None:
        """In the controller, after a run: all replicas now have the same."""

    @abstractmethod
    def forget_state(self) -> None:
        """In the controller, after a run that failed: what others have is not known."""

    # A run

    @abstractmethod
    def publish_written(self) -> bool:
        """Makes parameters that the program changed in place, the same in every replica, everyone's.

        Returns:
            Whether all replicas have met for it.
        """

    @abstractmethod
    def share_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gives all replicas what replica 0 alone has written to parameters; every one must come here."""

    def take_wrote(self) -> bool:
        """Whether the last run wrote to parameters on this machine, and other machines have not been asked yet."""
        return False

    def take_from(self, machine: int, *, wrote: bool) -> None:
        """Gives all machines the parameters of one, before a run.

        Args:
            machine: Which: the first that wrote to them in the last run.
            wrote: Whether this one did too, and must have written the same.
        """
        raise NotImplementedError("only memory that is shared is written to in a run")

    @abstractmethod
    def settle(self, share: float, *, all_buffers: bool = False) -> bool:
        """At the end of a step: publishes what was written, and brings buffers to one state.

        Args:
            share: This replica's weight in the mean of buffers.
            all_buffers: Whether replicas may differ in any of them, and not only in those that this step wrote to.
        Returns:
            Whether this replica has still to publish what it wrote, in a meeting of all.
        """

    def settle_before_next(self, *, unsettled: bool) -> None:  # noqa: B027  # most have nothing left to settle
        """Between two steps of one call: brings parameters that steps wrote to after their last update to one state.

        Every replica must come here.

        Args:
            unsettled: Whether any replica of this machine has still to publish what it wrote.
        """

    def keep_own(self) -> None:
        """At the end of a step after which replicas stay different: what this one changed is its own."""
        raise NotImplementedError("variables that lie once cannot be different")

    def join_counters(self) -> None:
        """Brings counters and metrics (`aggregation.COUNTED`) of replicas that stay different to one state."""
        raise NotImplementedError("variables that lie once cannot be different")

    def take_back_buffers(self) -> None:
        """At the end of a step that does not count: buffers that are joined are what they were before it."""
        raise NotImplementedError("where replicas agree after each step, what does not count has no weight")

    @abstractmethod
    def close(self) -> None:
        """Gives everything up."""
