"""Metrics of a user's own class: every replica updates them with the global batch.

Keras' own metrics are sums over examples, so that what replicas add can be added up. What others do with a batch
nobody knows; a largest value, for instance, is no sum.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from keras.src import backend

from stratagem import _tree
from stratagem.engine.context import ReplicaContext


def own_metrics(model: Any) -> list[Any]:
    """Those of a model's metrics that Keras does not update in a way of its own."""
    flat = {id(each): each for metric in model.metrics for each in getattr(metric, "metrics", (metric,))}.values()
    return [metric for metric in flat if not type(metric).update_state.__module__.startswith("keras.")]


@contextlib.contextmanager
def of_global_batch(metrics: Sequence[Any], replica: ReplicaContext, num_examples: int) -> Iterator[None]:
    """Inside the block metrics are updated with the examples of all replicas.

    Args:
        metrics: Those of a user's own class.
        replica: Which replica this is.
        num_examples: How many of the global batch it has.
    """
    for metric in metrics:
        metric.__dict__["update_state"] = functools.partial(_update, metric.update_state, replica, num_examples)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.__dict__["update_state"]


def _update(update: Callable[..., Any], replica: ReplicaContext, num_examples: int, *args: Any, **kwargs: Any) -> Any:
    def of_all(value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return _mean(value, replica, num_examples)
        if len(value) != max(num_examples, 1):  # a replica without examples has a stand-in
            return value
        whole: torch.Tensor = replica.all_gather(value.detach()[:num_examples])
        mask = backend.get_keras_mask(value)
        if mask is not None:
            backend.set_keras_mask(whole, replica.all_gather(mask[:num_examples]))
        return whole

    args, kwargs = _tree.map_only(torch.Tensor, of_all, (args, kwargs))
    return update(*args, **kwargs)


def _mean(value: torch.Tensor, replica: ReplicaContext, num_examples: int) -> torch.Tensor:
    """The mean of a number, such as a loss, by the examples that it is of."""
    own = torch.stack([value.detach().double() * num_examples, torch.tensor(num_examples).to(value).double()])
    total, count = replica.all_reduce("sum", own if num_examples else torch.zeros_like(own)).unbind()
    mean: torch.Tensor = (total / count).to(value.dtype)
    return mean
