"""Metrics inside a step of a replica: they take in, and tell, what they would on one device.

Keras' own metrics are sums over examples, so that what replicas add can be added up (of single numbers `metric_state`
makes a replica's part). What metrics of a user's own class do with a batch nobody knows (a
largest value, for instance, is no sum): every replica updates them with the global batch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from keras.src import backend

from stratagem import _tree
from stratagem.engine.context import ReplicaContext
from stratagem.training.keras import loss_reductions


def own_metrics(model: Any) -> list[Any]:
    """Those of a model's metrics that Keras does not update in a way of its own."""
    return [metric for metric in _flat(model) if not type(metric).update_state.__module__.startswith("keras.")]


def _flat(model: Any) -> list[Any]:
    return list({id(each): each for metric in model.metrics for each in getattr(metric, "metrics", (metric,))}.values())


@contextlib.contextmanager
def of_global_batch(metrics: Sequence[Any], replica: ReplicaContext) -> Iterator[None]:
    """Inside the block metrics are updated with the examples of all replicas.

    Args:
        metrics: Those of a user's own class.
        replica: Which replica this is.
    """
    updates = [functools.partial(_update, metric.update_state, replica) for metric in metrics]
    with _replaced("update_state", metrics, updates):
        yield


@contextlib.contextmanager
def results(
    model: Any, of_all: Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]] | None
) -> Iterator[None]:
    """Inside the block the results of a model's metrics are those of all replicas, who ask for them alike.

    Args:
        model: The Keras model.
        of_all: Gives metrics' variables the values of all replicas, for the time of a block. `None` if the step asks
            only at its end: it is spared that, since the main program knows the results then.
    """
    if of_all is None:
        with _replaced("get_metrics_result", [model], [lambda: None]):
            yield
        return
    metrics = list({id(each): each for each in (*model.metrics, *_flat(model))}.values())
    told = [functools.partial(_asked, each.result, of_all, each.variables) for each in metrics]
    of_model = functools.partial(_asked, model.get_metrics_result, of_all, model.metrics_variables)
    with _replaced("result", metrics, told), _replaced("get_metrics_result", [model], [of_model]):
        yield


def _asked(ask: Callable[[], Any], of_all: Callable[[Sequence[Any]], Any], variables: Sequence[Any]) -> Any:
    with of_all(variables):
        return ask()


@contextlib.contextmanager
def _replaced(name: str, objects: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Inside the block objects have another method than their class gives them."""
    for each, value in zip(objects, values, strict=True):
        each.__dict__[name] = value
    try:
        yield
    finally:
        for each in objects:
            del each.__dict__[name]


def _update(update: Callable[..., Any], replica: ReplicaContext, *args: Any, **kwargs: Any) -> Any:
    num_examples = replica.num_examples

    def of_all(value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return _mean(value, replica)
        if len(value) != max(num_examples, 1):  # a replica without examples has a stand-in
            return value
        whole: torch.Tensor = replica.all_gather(value.detach()[:num_examples])
        mask = backend.get_keras_mask(value)
        if mask is not None:
            backend.set_keras_mask(whole, replica.all_gather(mask[:num_examples]))
        return whole

    args, kwargs = _tree.map_only(torch.Tensor, of_all, (args, kwargs))
    with loss_reductions.of_global_batch(None):
        return update(*args, **kwargs)


def _mean(value: torch.Tensor, replica: ReplicaContext) -> torch.Tensor:
    """The mean of a number, such as a loss, by the examples that it is of."""
    count = torch.tensor(replica.num_examples, dtype=torch.float64, device=value.device)
    own = torch.stack([value.detach().double() * count, count])
    total, count = replica.all_reduce("sum", own).unbind()
    mean: torch.Tensor = (total / count).to(value.dtype)
    return mean
