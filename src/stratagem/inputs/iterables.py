"""Distributes data that only the main program can read: it reads, and the slices travel with the run."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from stratagem.errors import StrategyError
from stratagem.inputs.reader import InputContext, InputHost, send_waiting
from stratagem.inputs.splitting import Evenness, join, split


class StreamFeed(ABC):
    """Where batches come from, one epoch after the other."""

    @abstractmethod
    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch."""

    @abstractmethod
    def __len__(self) -> int: ...


@final
class RepeatedFeed(StreamFeed):
    """Something that can be iterated many times: a list, a DataLoader."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def epoch(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # the TypeError of what has no length is the right one


@final
class OneTimeFeed(StreamFeed):
    """A generator or another iterator: one epoch, which may be left and taken up again."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._used_up = False

    def epoch(self) -> Iterator[Any]:
        if self._used_up:
            raise StrategyError(
                f"the {type(self._batches).__name__} given to distribute is used up; "
                f"give a list, a DataLoader or a function that makes a new one"
            )
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        for batch in self._batches:  # noqa: UP028  # `yield from` would close the generator of an epoch that is left
            yield batch
        self._used_up = True

    def __len__(self) -> int:
        raise TypeError(f"a {type(self._batches).__name__} has no length")


@final
class MadeFeed(StreamFeed):
    """A function that makes the batches of each epoch."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def epoch(self) -> Iterator[Any]:
        made = self._make()
        if not hasattr(made, "__iter__"):
            raise StrategyError(
                f"the function given to distribute returned {type(made).__name__} {made!r}; "
                f"it must return an iterable of batches"
            )
        return iter(made)

    def __len__(self) -> int:
        raise TypeError("a function that makes the batches has no length")


@final
class FunctionFeed(StreamFeed):
    """What `distribute_from_function` was given: made once if it can be iterated again, else for each epoch."""

    def __init__(self, make: Callable[[InputContext], Iterable[Any]], context: InputContext) -> None:
        self._make = make
        self._context = context
        self._made: Any = self._new()

    def epoch(self) -> Iterator[Any]:
        made = self._new() if self._made is None else self._made
        batches: Iterator[Any] = iter(made)
        if batches is made:
            self._made = None
        return batches

    def __len__(self) -> int:
        if self._made is None:
            raise TypeError("a generator has no length")
        return len(self._made)

    def _new(self) -> Any:
        made = self._make(self._context)
        if not hasattr(made, "__iter__"):
            raise StrategyError(
                f"the function given to distribute_from_function returned {type(made).__name__} {made!r}; "
                f"it must return an iterable of per-replica batches"
            )
        return made


@final
class DistributedStream:
    """Batches that the main program reads and the replicas share.

    Args:
        feed: Where they come from.
        host: The strategy.
        evenness: How uneven batches are treated.
        per_replica: Whether they are per-replica batches, one for each replica, and not global ones to be cut.
    """

    def __init__(self, feed: StreamFeed, host: InputHost, evenness: Evenness, *, per_replica: bool = False) -> None:
        self._feed = feed
        self._host = host
        self._evenness = evenness
        self._per_replica = per_replica

    def __iter__(self) -> Iterator[Any]:
        send_waiting(self._host)
        if not self._per_replica:
            self._host.draw_alike()
        batches = self._feed.epoch()
        return self._joined(batches) if self._per_replica else self._split(batches)

    def __len__(self) -> int:
        length = len(self._feed)
        return -(-length // len(self._host.replicas_here)) if self._per_replica else length

    def close(self) -> None:
        """Does nothing: the replicas keep none of this data."""

    def _split(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            yield split(batch, self._evenness, f"global batch {number}", self._host.replicas_here)

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        num_replicas = len(self._host.replicas_here)
        for number in itertools.count():
            group = list(itertools.islice(batches, num_replicas))
            if not group:
                return
            yield join(group, num_replicas, self._evenness, f"step {number}")
