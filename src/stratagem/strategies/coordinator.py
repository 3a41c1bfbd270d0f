"""Schedules functions on the workers of a parameter server, as TensorFlow's `ClusterCoordinator` does."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils import _pytree as pytree

from stratagem.errors import StepCancelledError, StrategyError
from stratagem.inputs import InputContext
from stratagem.replicas import values
from stratagem.strategies import context, in_child
from stratagem.strategies.parameter_server import ParameterServerStrategy
from stratagem.strategies.parameter_server_crew import Step
from stratagem.strategies.parameter_server_engine import ParameterWorkers
from stratagem.strategies.strategy import require_call

_keys = itertools.count(1)


@final
class RemoteValue:
    """What a scheduled function will have returned.

    Args:
        workers: Who run it.
        step: The call.
    """

    def __init__(self, workers: ParameterWorkers, step: Step) -> None:
        self._workers = workers
        self._step = step

    @property
    def is_done(self) -> bool:
        """Whether it can be fetched without waiting."""
        return self._step.is_done

    def fetch(self) -> Any:
        """Waits for the value.

        Raises:
            StepCancelledError: The function was never run, because another one had failed.
            Exception: What the function raised.
        """
        return self._workers.wait_for(self._step)

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

    def __iter__(self) -> "PerWorkerIterator":
        return PerWorkerIterator(self._key, next(self._passes))


@final
class PerWorkerIterator:
    """A pass over the data of each worker: in a scheduled function, over that of the worker that it runs in.

    Args:
        key: Which data.
        number: Which pass.
    """

    def __init__(self, key: int, number: int) -> None:
        self._key = key
        self._number = number

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        if context.in_cross_replica_context():
            raise StrategyError("a per-worker iterator is read in scheduled functions; give it to schedule in args")
        place = self._key, self._number
        if place not in _passes:
            for old in [each for each in _passes if each[0] == self._key]:
                del _passes[old]
            _passes[place] = iter(_sources[self._key])
        return next(_passes[place])


@final
class ClusterCoordinator:
    """Hands functions to workers as they become free.

    Functions run at their own pace and in no fixed order. One whose worker is lost is run again by another;
    updates that it had pushed by then are not made twice. Progress is made in the calls of this class and of
    the strategy.

    Args:
        strategy: Whose workers.
    Raises:
        StrategyError: Its workers take all steps together.
    Example:
        >>> strategy = ParameterServerStrategy(num_workers=1)
        >>> coordinator = ClusterCoordinator(strategy)
        >>> value = coordinator.schedule(lambda x: x + 1, args=(41,))
        >>> coordinator.fetch(value)
        42
        >>> strategy.close()
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise StrategyError(f"a ClusterCoordinator takes a ParameterServerStrategy, got {type(strategy).__name__}")
        self.strategy = strategy
        self._workers = strategy.workers
        self._steps: list[Step] = []

    def schedule(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Enters a call of a function; returns at once.

        Args:
            fn: The function; distributed objects that it uses are those of the worker. What else it captures is
                read when a worker gets it: give what the program changes meanwhile as an argument.
            args: Its arguments; remote values among them are fetched first. Tensors and arrays are copied if they
                have to wait, so that the program may fill them anew.
            kwargs: Its keyword arguments.
        Raises:
            Exception: What a function that was scheduled before has raised; all that was not begun is cancelled.
        """
        context.require_controller("ClusterCoordinator.schedule()")
        require_call(fn, args, kwargs)
        self._look()
        given = _fetched((tuple(args), dict(kwargs or {})))
        self._workers.prepare()
        step = self._workers.new_step(fn, *values.select(given, 0, sent=True))
        self._steps.append(step)
        self._workers.submit(step)
        return RemoteValue(self._workers, step)

    def join(self) -> None:
        """Waits until all that was scheduled is done.

        Raises:
            Exception: What one of the functions has raised; all that was not begun is cancelled.
        """
        while not self.done():
            self._workers.attend(wait=True)

    def done(self) -> bool:
        """Whether all that was scheduled is done; raises as `join` does."""
        self._workers.attend()
        self._look()
        return not self._steps

    def fetch(self, value: Any) -> Any:
        """A nesting with what remote values in it stand for; waits for them."""
        return _fetched(value)

    def create_per_worker_dataset(self, dataset_fn: Callable[..., Any]) -> PerWorkerDataset:
        """Lets each worker make data of its own.

        Args:
            dataset_fn: Called once in every worker, returns something that can be iterated; may take an
                `InputContext`, which tells which worker it is.
        """
        if not callable(dataset_fn):
            raise StrategyError(f"create_per_worker_dataset takes a function, got {type(dataset_fn).__name__}")
        key = next(_keys)
        self._workers.give_all(make_source, key, dataset_fn, self.strategy.num_workers, self._workers.key)
        return PerWorkerDataset(key)

    def _look(self) -> None:
        """Raises the first failure among what was scheduled, and cancels what was not begun."""
        failed = next((step for step in self._steps if step.is_done and step.has_failed), None)
        if failed is None:
            self._steps = [step for step in self._steps if not step.is_done]
            return
        self._workers.cancel(
            self._steps, StepCancelledError("not run: a function that was scheduled before has failed")
        )
        self._workers.settle()
        self._steps = []
        failed.raise_error()


def _fetched(value: Any) -> Any:
    return pytree.tree_map(lambda each: each.fetch() if isinstance(each, RemoteValue) else each, value)


# In a worker

_sources: dict[int, Any] = {}
_passes: dict[tuple[int, int], Iterator[Any]] = {}


def make_source(key: int, dataset_fn: Callable[..., Any], num_workers: int, strategy: int) -> None:
    """Makes a worker's own data."""
    number = in_child.runtime_of(strategy).worker  # type: ignore[attr-defined]  # it is one of a parameter server
    wants_context = any(
        each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in inspect.signature(dataset_fn).parameters.values()
    )
    _sources[key] = dataset_fn(InputContext(num_workers, number, 1)) if wants_context else dataset_fn()
