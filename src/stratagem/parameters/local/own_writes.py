"""Which parameters a worker's step has written to itself, without an optimizer.

Torch counts the changes of every tensor, for autograd; a count that has gone on since it was noted is a write.
What is written through `.data` is not counted. What becomes of a write is `variables`' part.
"""

from collections.abc import Iterable, Mapping
from typing import final

import torch

from stratagem import _torch


@final
class OwnWrites:
    """The parameters of one worker, and the changes that are known of each."""

    def __init__(self) -> None:
        self._parameters: dict[int, torch.Tensor] = {}
        self._marks: dict[int, int] = {}

    def add(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Takes parameters, by name."""
        self._parameters |= tensors
        self.settle(tensors)

    def drop(self, name: int) -> None:
        """Lets go of a parameter, if it is one."""
        self._parameters.pop(name, None)
        self._marks.pop(name, None)

    def names(self) -> list[int]:
        """Those that have been written to."""
        return [name for name, each in self._parameters.items() if _torch.tensors.version_of(each) != self._marks[name]]

    def note(self, names: Iterable[int]) -> None:
        """Takes parameters, of those that it has, for written to."""
        self._marks |= {name: -1 for name in names if name in self._marks}

    def settle(self, names: Iterable[int] | None = None) -> None:
        """Takes parameters, by default all, for not written to."""
        chosen = self._parameters if names is None else names
        self._marks |= {name: _torch.tensors.version_of(self._parameters[name]) for name in chosen}

    def note_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Lets autograd know of new values: a graph that was made with the old ones is refused, as on one device."""
        torch.autograd.graph.increment_version(list(parameters))
        self.settle()
