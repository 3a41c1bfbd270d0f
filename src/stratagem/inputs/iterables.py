"""Distributes data that only the main program can read: it reads, and the slices travel with the run."""

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, final

from stratagem._checks import StaysHere
from stratagem.engine import random_state
from stratagem.errors import StrategyError
from stratagem.inputs.loading import Prefetch
from stratagem.inputs.reader import Batches, InputContext, InputHost, length_of, send_waiting
from stratagem.inputs.splitting import BatchDim, Evenness, join, split
from stratagem.inputs.tf_data import as_iterable


class StreamFeed(ABC):
    """Where batches come from, one epoch after the other."""

    @abstractmethod
    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch."""

    def __iter__(self) -> Iterator[Any]:
        return self.epoch()

    @abstractmethod
    def __len__(self) -> int: ...

    def close(self) -> None:  # noqa: B027  # most read when they are asked
        """Waits for what is being read."""


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
    """A generator or another iterator: one epoch, which may be left and taken up again.

    Args:
        batches: The iterator.
        prefetch: Whether a thread reads ahead.
    """

    def __init__(self, batches: Iterator[Any], *, prefetch: bool = False) -> None:
        self._kind = type(batches).__name__
        self._batches = ReadAhead(batches) if prefetch else batches
        self._used_up = False

    def epoch(self) -> Iterator[Any]:
        if self._used_up:
            raise StrategyError(
                f"the {self._kind} given to distribute is used up; "
                f"give a list, a DataLoader or a function that makes a new one"
            )
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        for batch in self._batches:  # noqa: UP028  # `yield from` would close the generator of an epoch that is left
            yield batch
        self._used_up = True

    def __len__(self) -> int:
        raise TypeError(f"a {self._kind} has no length")

    def close(self) -> None:
        if isinstance(self._batches, ReadAhead):
            self._batches.close()


@final
class MadeFeed(StreamFeed):
    """A function that makes the batches of each epoch."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def epoch(self) -> Iterator[Any]:
        made = as_iterable(self._make())
        if not hasattr(made, "__iter__"):
            raise StrategyError(
                f"the function given to distribute returned {type(made).__name__} {made!r}; "
                f"it must return an iterable of batches"
            )
        return iter(made)

    def __len__(self) -> int:
        raise TypeError("a function that makes the batches has no length")


@final
class ReadAhead(Iterator[Any]):
    """Reads the next batch in a thread while the current one is in use.

    A thread shares the random numbers of its process, so what draws some is read without one: two runs with one seed
    must agree to the last bit.

    Args:
        batches: What is read.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._next: Prefetch | None = None
        self._threaded = True

    def __next__(self) -> Any:
        coming, self._next = self._next, None
        if coming is None:
            before = random_state.current() if self._threaded else None
            batch = next(self._batches, _END)
            self._threaded = before is not None and random_state.current().is_same(before)
        else:
            batch = coming.result()
            if coming.error is not None:
                raise coming.error
        if batch is _END:
            raise StopIteration
        if self._threaded:
            self._next = Prefetch(functools.partial(next, self._batches, _END))
        return batch

    def close(self) -> None:
        """Waits for what is being read; it is the next batch of whoever goes on."""
        if self._next is not None:
            self._next.result()


_END = object()


@final
class AheadFeed(StreamFeed):
    """Another feed, whose batches a thread reads ahead."""

    def __init__(self, feed: StreamFeed) -> None:
        self._feed = feed
        self._ahead: ReadAhead | None = None

    def epoch(self) -> Iterator[Any]:
        self.close()
        self._ahead = ReadAhead(self._feed.epoch())
        return self._ahead

    def __len__(self) -> int:
        return len(self._feed)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


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

    def __reduce__(self) -> Any:
        return FunctionFeed, (self._make, self._context)  # another process makes its own

    def _new(self) -> Any:
        made = as_iterable(self._make(self._context))
        if not hasattr(made, "__iter__"):
            raise StrategyError(
                f"the function given to distribute_from_function returned {type(made).__name__} {made!r}; "
                f"it must return an iterable of per-replica batches"
            )
        return made


@final
class DistributedStream(StaysHere):
    """Batches that the main program reads and the replicas share.

    Args:
        feed: Where they come from.
        host: The strategy.
        evenness: How uneven batches are treated.
        per_replica: Whether they are per-replica batches, one for each replica, and not global ones to be cut.
        batch_dim: Along which dimension they have their examples.
    """

    def __init__(
        self,
        feed: StreamFeed,
        host: InputHost,
        evenness: Evenness,
        *,
        per_replica: bool = False,
        batch_dim: BatchDim = 0,
    ) -> None:
        self._feed = feed
        self._host = host
        self._evenness = evenness
        self._per_replica = per_replica
        self._batch_dim = batch_dim

    def __iter__(self) -> Iterator[Any]:
        self._host.require_usable()
        send_waiting(self._host)
        if not self._per_replica:
            self._host.draw_alike()
            self._host.compare_data({"kind of data": "batches", "batches": length_of(self._feed)})
        batches = self._feed.epoch()
        return Batches(self._joined(batches) if self._per_replica else self._split(batches), self._host)

    def __len__(self) -> int:
        length = len(self._feed)
        return -(-length // len(self._host.replicas_here)) if self._per_replica else length

    @property
    def undivided(self) -> Iterable[Any]:
        """The batches as they were given: one pass is one epoch."""
        return self._feed

    def close(self) -> None:
        """Ends what reads ahead; the replicas keep none of this data."""
        self._feed.close()

    def _split(self, batches: Iterator[Any]) -> Generator[Any]:
        for number, batch in enumerate(batches):
            yield split(batch, self._evenness, f"global batch {number}", self._host.replicas_here, self._batch_dim)

    def _joined(self, batches: Iterator[Any]) -> Generator[Any]:
        num_replicas = len(self._host.replicas_here)
        for number in itertools.count():
            group = list(itertools.islice(batches, num_replicas))
            if not group:
                return
            yield join(group, num_replicas, self._evenness, f"step {number}", self._batch_dim)
