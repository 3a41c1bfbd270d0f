"""What distributed data asks of a strategy, and what it tells a program about it.

Owns the news that wait for the children: an object that is collected must not call anybody, so
what it leaves behind in the children is noted here and sent with a later call.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from stratagem.errors import StrategyError


class InputHost(Protocol):
    """The side of a strategy that distributed data needs."""

    @property
    def num_replicas(self) -> int:
        """How many replicas share a global batch."""

    @property
    def replicas_here(self) -> range:
        """Those of them that this program drives; the others are other machines'."""

    @property
    def input_pipeline(self) -> tuple[int, int]:
        """How many programs read data, and the number of this one."""

    def draw_alike(self) -> None:
        """Lets all programs that read the same data draw the same random numbers from here on."""

    def is_any(self, has_data: bool) -> bool:
        """Whether any of the programs that read data still has some; all ask at the same time."""

    def call_in_children(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function in every child process and waits; does nothing where there are none (any more)."""


@dataclass(frozen=True)
class InputContext:
    """Where in the system a function given to `distribute_from_function` makes its data.

    Args:
        num_input_pipelines: How many processes make data.
        input_pipeline_id: The number of this one.
        num_replicas_in_sync: How many replicas share a global batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Each replica's part of a global batch.

        Raises:
            StrategyError: The global batch does not divide evenly.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise StrategyError(
                f"global_batch_size {global_batch_size} does not divide evenly over "
                f"{self.num_replicas_in_sync} replicas; choose a multiple of {self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync


Call = tuple[Callable[..., None], tuple[Any, ...]]

_waiting: weakref.WeakKeyDictionary[Any, list[Call]] = weakref.WeakKeyDictionary()


def waiting_calls(host: InputHost) -> list[Call]:
    """The calls that the children of a host are to get with the next occasion."""
    return _waiting.setdefault(host, [])


def send_waiting(host: InputHost) -> None:
    """Makes the calls that finalizers have left; the strategy may do so whenever its children are idle."""
    waiting = waiting_calls(host)
    while waiting:
        function, arguments = waiting.pop(0)
        host.call_in_children(function, *arguments)
