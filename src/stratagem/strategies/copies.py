"""What a replica must be able to do with its copies of the variables, wherever they lie.

Two ways exist: pages that all replicas share (`shared_copies`), and copies of one's own on any
device (`private_copies`). A `Runtime` has one of them and does not know which. The same object
serves the controller between runs: there it gives tensors out and finds what was written to.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stratagem.strategies.link import Link
from stratagem.strategies.updates import SplitUpdate

WRITTEN_FLAG, BUFFERS_FLAG = 1, 2


@dataclasses.dataclass(frozen=True)
class Written:
    """What the controller wrote to between two runs and must travel by value: tensors and gradients, by name."""

    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = dataclasses.field(default_factory=dict)


class Copies(ABC):
    """One replica's variables, and how they agree with those of the others.

    Args:
        link: What must be connected before a run, where memory is not enough.
    """

    def __init__(self, link: Link | None = None) -> None:
        self.link = link
        # Of the last sum of gradients, the same in every replica.
        self.finite = True
        self.culprits: list[tuple[int, str]] = []

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
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that still exist."""

    @abstractmethod
    def split(self, optimizer: torch.optim.Optimizer) -> SplitUpdate | None:
        """This replica's part of an optimizer's update; `None` if every replica makes the whole."""

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
    def begin_backward(self, *, syncing: bool) -> None:
        """Prepares a backward pass, whose gradients are summed if `syncing`."""

    @abstractmethod
    def end_backward(self, *, syncing: bool) -> None:
        """Makes `.grad` what it must be when the pass returns; every replica must come here."""

    @abstractmethod
    def abandon_backward(self) -> None:
        """Cleans up after a pass that has failed."""

    @abstractmethod
    def publish_written(self) -> None:
        """Makes parameters that the program changed in place, the same in every replica, everyone's."""

    @abstractmethod
    def settle(self, share: float) -> bool:
        """At the end of a run: publishes what was written, and brings buffers to one state.

        Args:
            share: This replica's weight in the mean of floating-point buffers; others become replica 0's.
        Returns:
            Whether this replica has still to publish what it wrote, in a meeting of all.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives everything up."""
