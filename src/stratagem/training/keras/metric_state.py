"""Metrics of Keras for steps of one's own: their state is joined over the replicas after each step.

A metric that a program makes in a scope keeps its variables in buffers, each joined as its `aggregation` says. What
Keras makes for its own loop is left as it is: there `step_state` adds up what replicas have.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from keras.src import metrics as keras_metrics
from keras.src.backend import Variable
from keras.src.metrics.metric import Metric

from stratagem.engine import context
from stratagem.errors import StrategyError
from stratagem.strategies.strategy_in_worker import StrategyInWorker
from stratagem.training.keras import loss_reductions
from stratagem.training.keras.keras_objects import tensor_of
from stratagem.training.metrics import is_number, part_of_weight
from stratagem.variables.aggregation import Aggregation, aggregate

_HELD = "_distributed_state"  # of a metric and of its variables
_OF_STEP = "_was_made_in_a_step"
AGGREGATIONS = {
    "sum": Aggregation.SUM,
    "mean": Aggregation.MEAN,
    "only_first_replica": Aggregation.FIRST,
}
"""How what Keras calls so is joined."""
_for_loop: list[None] = []  # blocks in which Keras makes metrics for its own loop


@final
class MetricState(torch.nn.Module):
    """The variables of one metric, as a distributed object with buffers.

    Args:
        metric: What it is of, for messages.
    """

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric = metric

    def hold(self, variable: Any) -> None:
        """Takes a variable; it stays the same object."""
        value = tensor_of(variable).detach()
        variable._value = value  # no parameter any more
        name = f"state_{len(list(self.buffers()))}"
        self.register_buffer(name, value)
        if variable.aggregation in AGGREGATIONS:
            aggregate(self, name, AGGREGATIONS[variable.aggregation])
        variable.__dict__[_HELD] = self

    def has(self, variable: Any) -> bool:
        """Whether a variable has its value here, and not one of Keras' own loop."""
        return any(tensor_of(variable) is each for each in self.buffers())


@contextlib.contextmanager
def for_loop() -> Iterator[None]:
    """A block in which Keras makes metrics for its own loop."""
    _for_loop.append(None)
    try:
        yield
    finally:
        _for_loop.pop()


@functools.cache
def install() -> None:
    """Lets metrics that are made in a scope have such a state; in every process, once."""
    original, make = Metric.add_variable, Metric.__init__

    @functools.wraps(make)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__[_OF_STEP] = context.current_replica() is not None
        make(self, *args, **kwargs)

    @functools.wraps(original)
    def add_variable(self: Any, *args: Any, **kwargs: Any) -> Any:
        _require_built(self)
        variable = original(self, *args, **kwargs)
        if (
            context.current_scope() is not None
            and not context.current_replica()
            and not _for_loop
            and variable._value is not None
        ):
            if _HELD not in self.__dict__:
                _watch_reads()
                self.__dict__[_HELD] = MetricState(type(self).__name__)
            self.__dict__[_HELD].hold(variable)
        return variable

    Metric.__init__, Metric.add_variable = begin, add_variable


def _require_built(metric: Any) -> None:
    """Refuses a metric that makes its variables in a step: they would be those of one replica."""
    replica = context.current_replica()
    if replica is None or _for_loop or metric.__dict__.get(_OF_STEP, True):
        return
    if replica.num_replicas_in_sync > 1 or isinstance(replica.strategy, StrategyInWorker):
        raise StrategyError(
            f"{type(metric).__name__} {metric.name!r} makes its variables in its first update, and that was in a "
            f"step: only one replica would have them; update it once in the scope, with values of the same shapes, "
            f"and call reset_state()"
        )


@functools.cache
def _watch_reads() -> None:
    """Lets the main program read such variables only when no step is under way that changes them."""
    inner = Variable.value.fget

    def value(self: Any) -> Any:
        if (state := self.__dict__.get(_HELD)) is not None:
            context.before_read(state)
        return inner(self)

    Variable.value = property(value)


@functools.cache
def _connect() -> None:
    """Lets Keras' own metrics do what a part of the global batch needs; in every process, once."""
    keras_metrics.Mean.update_state = _counting_once(keras_metrics.Mean.update_state)
    kinds: list[Any] = [each for each in vars(keras_metrics).values() if inspect.isclass(each)]
    for kind in kinds:
        if issubclass(kind, Metric) and "reset_state" in kind.__dict__:
            kind.reset_state = _between_runs(kind.reset_state)


def _in_step_of(metric: Any) -> context.ReplicaContext | None:
    """The replica that uses a metric in a step of the program's own; `None` elsewhere."""
    replica, state = context.current_replica(), metric.__dict__.get(_HELD)
    if replica is None or state is None or not all(map(state.has, metric.variables)):
        return None
    return replica


def _counting_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """One number for the rows of a replica, such as a loss: together replicas count once, each by its rows.

    In Keras' own loop and in steps of the program's own.
    """

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        replica = (loss_reductions.computing.get() or _in_step_of(self)) if is_number(values) else None
        if replica is not None and replica.share < 1.0:
            sample_weight = part_of_weight(sample_weight, replica)
        return original(self, values, sample_weight)

    return update_state


def _between_runs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset_state(self: Any) -> Any:
        replica = _in_step_of(self)
        if replica is not None and replica.num_replicas_in_sync > 1:
            raise StrategyError(
                f"{type(self).__name__}.reset_state() was called inside replica {replica.replica_id_in_sync_group}, "
                f"which has only its own part; call it in the main program, outside run()"
            )
        return original(self)

    return reset_state


_connect()
install()
