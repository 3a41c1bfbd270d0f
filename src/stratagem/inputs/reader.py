"""What distributed data asks of a strategy, and what it tells a program about it.

Owns the news that wait for the children: an object that is collected must not call anybody, so
what it leaves behind in the children is noted here and sent with a later call.
"""

import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

from stratagem._checks import StaysHere, require_count
from stratagem.errors import StrategyError

Told: TypeAlias = Mapping[str, int | str | None]
"""What a program knows of its data, by what it is called in errors; `None` where it does not know."""


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

    def require_usable(self) -> None:
        """Refuses use after the end."""

    def draw_alike(self) -> None:
        """Lets all programs that read the same data draw the same random numbers from here on."""

    def compare_data(self, told: Told) -> None:
        """Raises the error of programs whose copies of the data differ; all tell of theirs at the same time."""

    def is_any(self, has_data: bool) -> bool:
        """Whether any of the programs that read data still has some; all ask at the same time."""

    def call_in_children(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function in every child process and waits; does nothing where there are none (any more)."""


@dataclass(frozen=True)
class InputContext:
    """Tells a function of `distribute_from_function` for which process it makes data.

    Args:
        num_input_pipelines: The number of processes that make data.
        input_pipeline_id: The number of this process.
        num_replicas_in_sync: The number of replicas that share a global batch.
    Example:
        >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(64)
        16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of examples that each replica gets of a global batch.

        Raises:
            StrategyError: The global batch does not divide evenly.
        """
        require_count(global_batch_size=global_batch_size)
        if global_batch_size % self.num_replicas_in_sync:
            raise StrategyError(
                f"global_batch_size {global_batch_size} does not divide evenly over "
                f"{self.num_replicas_in_sync} replicas; choose a multiple of {self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync


@final
class Optional:
    """A batch that may be there or not, as TensorFlow's iterators give it.

    Args:
        value: The batch; nothing after the last.
    """

    def __init__(self, *value: Any) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Whether there is one."""
        return bool(self._value)

    def get_value(self) -> Any:
        """The batch."""
        if not self._value:
            raise StrategyError("there is no batch after the last; ask has_value() before get_value()")
        return self._value[0]


class Pass(StaysHere, Iterator[Any]):
    """One pass over distributed batches.

    Args:
        host: The strategy.
        meets_others: Whether all programs that train together come together for each batch.
    """

    def __init__(self, host: InputHost, *, meets_others: bool = False) -> None:
        self.host = host
        self.meets_others = meets_others

    @abstractmethod
    def close(self) -> None:
        """Ends the pass, in all replicas."""

    def prepare(self) -> None:  # most read when they are asked
        """Draws the random numbers that belong to the pass and not to a batch."""

    def draw(self) -> Any:
        """The next batch; `StopIteration` after the last, without an end of the pass: some may not be loaded yet."""
        return next(self)

    def get_next(self) -> Any:
        """The next batch, in TensorFlow's word; `StopIteration` after the last."""
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """The next batch if there is one."""
        return Optional(*itertools.islice(self, 1))


@final
class Batches(Pass):
    """One pass over distributed batches, while their strategy can be used.

    Args:
        batches: The pass.
        host: The strategy.
        meets_others: Whether all programs that train together come together for each batch.
    """

    def __init__(self, batches: Generator[Any], host: InputHost, *, meets_others: bool = False) -> None:
        super().__init__(host, meets_others=meets_others)
        self._batches = batches

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        self.host.require_usable()
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()


def length_of(data: Any) -> int | None:
    """How many something has; `None` if it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


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
