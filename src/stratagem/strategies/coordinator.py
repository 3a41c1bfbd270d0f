"""Schedules functions on the workers of a parameter server, as TensorFlow's `ClusterCoordinator` does."""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from torch.utils.data import DataLoader

from stratagem import _tree
from stratagem._checks import StaysHere
from stratagem.engine import context
from stratagem.engine.queued import worker_calls
from stratagem.engine.queued.scheduler import Scheduler
from stratagem.engine.queued.step import QueuedStep
from stratagem.engine.queued.workers import ParameterWorkers
from stratagem.errors import EndOfDataError, StepCancelledError, StrategyError
from stratagem.inputs import DistributedLoader, DistributedStream, InputContext
from stratagem.objects import per_replica
from stratagem.placement import scopes
from stratagem.strategies.parameter_server import ParameterServerStrategy

_keys = itertools.count(1)


@final
class RemoteValue(StaysHere):
    """The future result of a scheduled function.

    Args:
        workers: Who run it.
        step: The call.
    Example:
        >>> import stratagem as sg
        >>> with sg.ParameterServerStrategy(num_workers=1) as strategy:
        ...     coordinator = sg.ClusterCoordinator(strategy)
        ...     coordinator.schedule(lambda: 2 + 2).fetch()
        4
    """

    _instead = "take fetch() of it, or give it to schedule in args"

    def __init__(self, workers: ParameterWorkers, step: QueuedStep) -> None:
        self.workers = workers
        self._step = step

    @property
    def is_done(self) -> bool:
        """Returns whether it can be fetched without waiting."""
        return self._step.is_done

    def fetch(self) -> Any:
        """Waits for the value and returns it.

        Raises:
            StepCancelledError: The function was never run, because another one had failed.
            Exception: What the function raised.
        """
        return self.workers.wait_for(self._step)

    get = fetch

    def __repr__(self) -> str:
        state = "failed" if self._step.has_failed else "done" if self._step.is_done else "..."
        return f"RemoteValue({state})"


@final
class PerWorkerDataset:
    """Data that every worker makes for itself; `iter` gives what scheduled functions take `next` of.

    Args:
        key: By which workers know it.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._passes = itertools.count(1)
        self._open: list[int] = []

    def __iter__(self) -> "PerWorkerIterator":
        number = next(self._passes)
        self._open.append(number)
        made = PerWorkerIterator(self._key, number, self._open)
        weakref.finalize(made, self._open.remove, number).atexit = False
        return made


@final
class PerWorkerIterator:
    """A pass over the data of each worker: in a scheduled function, over that of the worker that it runs in.

    Batches of data that the strategy has made are those of one device: plain tensors.

    Args:
        key: Which data.
        number: Which pass.
        open_passes: Those over the same data that the program still has; workers forget others.
    """

    def __init__(self, key: int, number: int, open_passes: Sequence[int]) -> None:
        self._key = key
        self._number = number
        self._open = open_passes

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        if context.current_replica() is None:
            raise StrategyError("a per-worker iterator is read in scheduled functions; give it to schedule in args")
        place = self._key, self._number
        if place not in _passes:
            for key, number in [each for each in _passes if each[0] == self._key and each[1] not in self._open]:
                del _passes[key, number]
            if self._key in _to_make:
                _to_make[self._key]()
            worker, data = _sources[self._key]
            _passes[place] = _Pass(worker, iter(data))
        batch = per_replica.load_deferred(per_replica.select(_passes[place].next_batch(), 0))
        device = context.state.replicas[-1].strategy.device
        return per_replica.brought(batch, device, computes_on=device)


@final
class ClusterCoordinator(StaysHere):
    """Gives functions to workers as they become free.

    Functions run at their own pace and in no fixed order. If a worker is lost, another worker runs its function again;
    updates that it had pushed are not made twice. Work is handed out during calls of this class and of
    the strategy. In a scheduled function the strategy has a single device: `run` calls a function at once,
    and `reduce` and `distribute` concern the data of this worker only.

    A function that fails cancels all functions that have not begun. `fetch` raises the error of its own function, each
    time. The next `schedule`, `join` or `done` raises the first error, also if it was fetched, and then work can go on,
    as in TensorFlow.

    A strategy has one coordinator: a second call returns the same object.

    Args:
        strategy: A `ParameterServerStrategy` with workers on this machine.
    Raises:
        StrategyError: The workers of the strategy share their steps (`Synchronous`).
    Example:
        >>> strategy = ParameterServerStrategy(num_workers=1)
        >>> coordinator = ClusterCoordinator(strategy)
        >>> value = coordinator.schedule(lambda x: x + 1, args=(41,))
        >>> coordinator.fetch(value)
        42
        >>> strategy.close()
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> "ClusterCoordinator":
        """The coordinator that the strategy has, if the program still has it."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise StrategyError(f"a ClusterCoordinator takes a ParameterServerStrategy, got {type(strategy).__name__}")
        strategy.require_usable()
        workers = strategy.workers
        if strategy.consistency.shares_steps:
            raise StrategyError(
                f"with {strategy.consistency} workers share each step, so that no worker can get its own step; use "
                f"Async() or BoundedStaleness(k)"
            )
        scheduled = _scheduled.setdefault(workers, _Scheduled(workers.scheduler))
        found = scheduled.coordinator()
        if found is None:
            found = super().__new__(cls)
            scheduled.coordinator = weakref.ref(found)
        return found

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.strategy = strategy
        self._workers = strategy.workers
        self._scheduled = _scheduled[self._workers]

    def schedule(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Schedules a call of a function on a free worker; returns at once.

        Args:
            fn: The function. It uses the worker's copy of distributed objects. Other captured objects are read when a
                worker gets the function: give what the program changes meanwhile as an argument.
            args: The arguments of `fn`. Remote values among them are fetched first. Tensors and arrays are copied if
                the call has to wait, so that the program may write to them.
            kwargs: The keyword arguments of `fn`, likewise.
        Raises:
            Exception: The error of a function that was scheduled before; all functions that have not begun are
                cancelled.
            NonFiniteGradientError: The gradients of such a function were not finite, as in `run`.
            StrategyError: The function or an argument cannot be sent.
        """
        context.require_controller("ClusterCoordinator.schedule()")
        self.strategy.require_call(fn, args, kwargs)
        with self._workers.in_turn("ClusterCoordinator.schedule()"), scopes.recording():
            return self._schedule(fn, args, kwargs)

    def _schedule(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> RemoteValue:
        self._look()
        given = _fetched((tuple(args), dict(kwargs or {})))
        self._workers.prepare()
        step = self._workers.new_step(fn, *per_replica.select(given, 0, sent=True))
        step.when_done = functools.partial(_take_in, weakref.ref(self._scheduled))
        self._scheduled.under_way.add(step)
        self._submit(step)
        if step.is_done and not step.is_sent:
            self._look()  # what cannot be sent is an error in this line
        return RemoteValue(self._workers, step)

    def join(self) -> None:
        """Waits until all scheduled functions are done.

        Raises:
            Exception: The first error of a function; all functions that have not begun are cancelled.
        """
        while not self.done():
            self._workers.attend(wait=True)

    def done(self) -> bool:
        """Returns whether all scheduled functions are done. Raises the same errors as `join`."""
        with self._workers.in_turn("ClusterCoordinator.done()"):
            self._workers.attend()
            self._look()
            return not self._scheduled.under_way

    def fetch(self, value: Any) -> Any:
        """Waits for remote values, also in a nesting, and returns what they stand for.

        Raises:
            StrategyError: There is no remote value in it, or one of another strategy.
        """
        found = [each for each in _tree.leaves(value) if isinstance(each, RemoteValue)]
        if not found and _tree.leaves(value):
            raise StrategyError(
                f"fetch takes what schedule returned, also in a nesting, got {type(value).__name__} {value!r}"
            )
        if any(each.workers is not self._workers for each in found):
            raise StrategyError("fetch was given a value of another strategy; ask the coordinator that scheduled it")
        return _fetched(value)

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Gives each worker its own data.

        Args:
            dataset: A function that is called once in every worker and returns an iterable. It may take an
                `InputContext`, which says which worker it is; workers that `resize` adds get the new number of
                workers, and the data of the others stays. Or the data itself (a list, a DataLoader, a dataset): each
                worker gets a copy and reads all of it. Both may be what `strategy.distribute` and
                `strategy.distribute_from_function` returned.
        Raises:
            Exception: What the function raised in a worker; the strategy can be used as before.
        """
        context.require_controller("ClusterCoordinator.create_per_worker_dataset()")
        dataset_fn = _function_for(dataset)
        with self._workers.in_turn("ClusterCoordinator.create_per_worker_dataset()"), scopes.recording():
            return self._create_per_worker_dataset(dataset_fn)

    def _create_per_worker_dataset(self, dataset_fn: Callable[..., Any]) -> PerWorkerDataset:
        workers, key = self._workers, next(_keys)
        workers.prepare()
        given = key, dataset_fn, workers.key
        numbers = list(workers.scheduler.group.members)
        steps = [workers.new_step(make_source, (len(numbers), *given), {}, worker=number) for number in numbers]
        workers.given.append((note_source, given))
        try:
            for step in steps:
                self._submit(step)
            for step in steps:
                workers.wait_for(step)
        except BaseException:
            workers.given.remove((note_source, given))
            raise
        return PerWorkerDataset(key)

    def _submit(self, step: QueuedStep) -> None:
        with self._workers.attending():
            self._workers.scheduler.submit(step)
            self._workers.scheduler.poll(0.0)

    def _look(self) -> None:
        """Raises the first failure among what was scheduled, when all that was begun is done."""
        own = self._scheduled
        finished, own.finished = own.finished, []
        try:
            if own.failed is not None:
                own.failed.raise_error()
            self._workers.judge(finished)
        except BaseException:
            own.cancel()
            self._workers.settle()
            own.failed, own.finished = None, []
            raise


@final
class _Scheduled:
    """What the workers of a strategy were given by its coordinators; a program may drop one and ask for another.

    Args:
        scheduler: Who hands it to workers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.under_way: set[QueuedStep] = set()
        self.finished: list[QueuedStep] = []  # whose gradients have not been judged
        self.failed: QueuedStep | None = None  # the first, of which nobody has been told
        self.coordinator: Callable[[], ClusterCoordinator | None] = lambda: None

    def take_in(self, step: QueuedStep) -> None:
        """Notes that a step is done; after a failure none is begun."""
        self.under_way.discard(step)
        self.finished.append(step)
        if step.has_failed and self.failed is None and not isinstance(step.error, StepCancelledError):
            self.failed = step
            self.cancel()

    def cancel(self) -> None:
        """Takes steps back that no worker has."""
        self._scheduler.cancel(
            self.under_way - self._scheduler.under_way(),
            lambda: StepCancelledError("not run: a function that was scheduled before has failed"),
        )


_scheduled: "weakref.WeakKeyDictionary[ParameterWorkers, _Scheduled]" = weakref.WeakKeyDictionary()


def _take_in(scheduled: "weakref.ref[_Scheduled]", step: QueuedStep) -> None:
    if (own := scheduled()) is not None:  # steps do not keep it alive, which would be a cycle
        own.take_in(step)


def _fetched(value: Any) -> Any:
    return _tree.map_only(RemoteValue, RemoteValue.fetch, value)


def _function_for(dataset: Any) -> Callable[..., Any]:
    """A function that gives a worker its data."""
    if isinstance(dataset, DistributedLoader | DistributedStream):
        dataset = dataset.undivided
    if _is_data(dataset):
        return functools.partial(_as_given, dataset)
    if callable(dataset):
        return dataset  # type: ignore[no-any-return]
    raise StrategyError(
        f"create_per_worker_dataset takes a function that makes data, or the data: something that can be iterated, or "
        f"a dataset; got {type(dataset).__name__} {dataset!r}"
    )


def _is_data(value: Any) -> bool:
    """Whether it can be iterated, by itself or by its indices; a class is a function that makes such a thing."""
    has_indices = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return not isinstance(value, type) and (hasattr(value, "__iter__") or has_indices)


# In a worker


def _as_given(dataset: Any) -> Any:
    return dataset


_sources: dict[int, tuple[int, Any]] = {}  # which worker this is, and its data
_to_make: dict[int, Callable[[], None]] = {}  # sources that this worker makes when it first needs them
_passes: dict[tuple[int, int], "_Pass"] = {}


@final
class _Pass:
    """A pass of this worker over its data.

    Args:
        worker: Its number.
        batches: What is left of the data.
    """

    def __init__(self, worker: int, batches: Iterator[Any]) -> None:
        self._worker = worker
        self._batches = batches
        self._num_read = 0

    def next_batch(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise EndOfDataError(
                f"worker {self._worker} has no more data in this pass, after {self._num_read} batches; iter(dataset) "
                f"begins another pass, and data without end or fewer scheduled steps need none"
            ) from None
        self._num_read += 1
        return batch


def make_source(num_workers: int, key: int, dataset_fn: Callable[..., Any], strategy: int) -> None:
    """Makes a worker's own data."""
    number = worker_calls.number_of(strategy)
    wants_context = any(
        each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in inspect.signature(dataset_fn).parameters.values()
    )
    made = dataset_fn(InputContext(num_workers, number, 1)) if wants_context else dataset_fn()
    if not _is_data(made):
        raise StrategyError(
            f"the function given to create_per_worker_dataset returned {type(made).__name__} {made!r}; it must return "
            f"an iterable of batches"
        )
    data = made if hasattr(made, "__iter__") else DataLoader(made, batch_size=None)  # which reads by index
    _sources[key] = number, data
    _to_make.pop(key, None)


def note_source(num_workers: int, key: int, dataset_fn: Callable[..., Any], strategy: int) -> None:
    """Lets a worker that has come later make its data in the first function that needs it, whose errors are told."""
    _to_make[key] = functools.partial(make_source, num_workers, key, dataset_fn, strategy)
