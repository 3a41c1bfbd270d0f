"""Loads the batches of one replica in the process that uses them, one ahead of their use.

Owns the prefetch thread and the worker processes; both end with `close`. Which indices a batch has
is decided by the controller.
"""

import contextlib
import ctypes
import functools
import signal
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from stratagem import _torch
from stratagem.engine import random_state
from stratagem.processes.child import this_child

_PR_SET_PDEATHSIG = 1

Indices = Sequence[Any]
Numbered = tuple[int, Indices]


@dataclass(frozen=True)
class Source:
    """A map-style dataset and how batches are made of it: the settings of a DataLoader.

    Args:
        in_memory: Whether loading is a mere copy, not worth a thread.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    num_workers: int = 0
    prefetch_factor: int | None = None
    timeout_s: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    start_method: str | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    in_memory: bool = False

    def fetch(self, indices: Indices) -> Any:
        """The batch of some indices, loaded here and now."""
        many = getattr(self.dataset, "__getitems__", None)
        batch = self.collate_fn(many(indices) if many else [self.dataset[index] for index in indices])
        if self.pin_memory and torch.accelerator.is_available():
            return _torch.loading_parts.pin_memory(batch)  # type: ignore[no-untyped-call]  # torch does not say its types
        return batch

    @property
    def num_ahead(self) -> int:
        """How many batches are under way beyond the one in use."""
        return self.num_workers * (self.prefetch_factor or 2) if self.num_workers else 1

    def loader(self, seed: int) -> "Loader":
        """A loader for one replica and one epoch, or for many if it can go on."""
        return WorkerLoader(self, seed) if self.num_workers else ThreadLoader(self)


class Loader(ABC):
    """Gives the batches of one replica in one epoch, in rising order of their numbers."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._latest = -sys.maxsize

    def load(self, number: int, indices: Indices, ahead: Sequence[Numbered]) -> Any:
        """The batch of this number; those in `ahead` are expected to follow."""
        if number <= self._latest:
            return self._source.fetch(indices)
        self._latest = number
        return self._load(number, indices, ahead)

    @abstractmethod
    def _load(self, number: int, indices: Indices, ahead: Sequence[Numbered]) -> Any: ...

    def go_on(self) -> bool:
        """At the end of an epoch: makes itself ready for another one; whether it can."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Ends what works in the background, and waits for it."""


@final
class ThreadLoader(Loader):
    """Loads the next batch in a thread while the current one is in use.

    A thread shares the random numbers of its process, so a dataset that draws some (augmentation)
    is loaded without one: two runs with one seed must agree to the last bit.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._next: Prefetch | None = None
        self._threaded = not source.in_memory

    def _load(self, number: int, indices: Indices, ahead: Sequence[Numbered]) -> Any:
        coming, self._next = self._next, None
        batch = coming.result() if coming is not None else None
        if coming is None or coming.number != number:
            before = random_state.current() if self._threaded else None
            batch = self._source.fetch(indices)
            self._threaded = before is not None and random_state.current().is_same(before)
        elif coming.error is not None:
            raise coming.error
        if self._threaded and ahead:
            number, indices = ahead[0]
            self._next = Prefetch(functools.partial(self._source.fetch, indices), number)
        return batch

    def close(self) -> None:
        if self._next is not None:
            self._next.result()
            self._next = None


@final
class WorkerLoader(Loader):
    """Loads with worker processes of torch's DataLoader, which is fed with index lists as they become known."""

    def __init__(self, source: Source, seed: int) -> None:
        super().__init__(source)
        self._generator = torch.Generator().manual_seed(seed)
        self._feed: deque[Indices] = deque()
        self._fed: deque[int] = deque()
        self._workers: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None

    def _load(self, number: int, indices: Indices, ahead: Sequence[Numbered]) -> Any:
        if not self._fed:  # new, or too far behind: workers without work have been told to end or to wait
            self._batches = None
            self._feed.clear()
        newest = self._fed[-1] if self._fed else -sys.maxsize
        for each, own in ((number, indices), *ahead):
            if each > newest:
                self._feed.append(own)
                self._fed.append(each)
        if self._batches is None:
            with warnings.catch_warnings():  # of more workers than cores: the program's own loader has said so
                warnings.filterwarnings("ignore", "This DataLoader will create")
                if self._workers is None:
                    self._workers = self._make()
                self._batches = iter(self._workers)  # the same processes again, if they persist
        while self._fed.popleft() != number:
            with contextlib.suppress(Exception):  # a batch that nobody wanted
                next(self._batches)
        return next(self._batches)

    def go_on(self) -> bool:
        self._fed.clear()
        self._latest = -sys.maxsize
        return self._source.persistent_workers

    def close(self) -> None:
        # The iterator of a DataLoader ends and joins its workers when it goes.
        self._batches = self._workers = None
        self._feed.clear()
        self._fed.clear()

    def _make(self) -> DataLoader[Any]:
        source = self._source
        in_child = this_child() is not None
        return DataLoader(
            source.dataset,
            batch_sampler=_Feed(self._feed),  # type: ignore[arg-type]  # any iterable will do
            collate_fn=source.collate_fn,
            num_workers=source.num_workers,
            prefetch_factor=source.prefetch_factor,
            timeout=source.timeout_s,
            worker_init_fn=_InitInChild(source.worker_init_fn) if in_child else source.worker_init_fn,
            # A child has the user's classes by value; only a fork of it has them too.
            multiprocessing_context=source.start_method or ("fork" if in_child else None),
            pin_memory=source.pin_memory and torch.accelerator.is_available(),
            persistent_workers=source.persistent_workers,
            generator=self._generator,
        )


@final
class _Feed:
    """Index lists on their way to the workers. It may have none now and some later."""

    def __init__(self, waiting: deque[Indices]) -> None:
        self._waiting = waiting

    def __iter__(self) -> Iterator[Indices]:
        return self

    def __next__(self) -> Indices:
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()


@final
class _InitInChild:
    """Prepares a worker process of a child: it ends with the child, and leaves the child's pipe alone."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        if self._then is not None:
            self._then(worker)


@final
class Prefetch:
    """A batch that a thread loads; the thread ends with it.

    Args:
        fetch: Loads it.
        number: Which batch.
    """

    def __init__(self, fetch: Callable[[], Any], number: int = 0) -> None:
        self.number = number
        self.error: BaseException | None = None
        self._batch: Any = None
        self._thread = threading.Thread(
            target=self._run, args=(fetch,), name=f"stratagem-prefetch-{number}", daemon=True
        )
        self._thread.start()

    def result(self) -> Any:
        if self._thread is not threading.current_thread():
            self._thread.join()
        return self._batch

    def _run(self, fetch: Callable[[], Any]) -> None:
        try:
            self._batch = fetch()
        except BaseException as error:
            self.error = error
