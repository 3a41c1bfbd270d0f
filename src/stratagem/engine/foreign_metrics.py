"""Metrics of torchmetrics: their states become buffers, which are joined over the replicas after each step.

They are known by their interface: `add_state(name, default, dist_reduce_fx)`, `update`, `compute`, `reset`. Between
runs the state is that of all replicas, so that `compute()` has nobody else to ask.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from stratagem.engine import context
from stratagem.errors import StrategyError
from stratagem.variables.aggregation import aggregate

_PREFIX = "dim_zero_"  # of the functions that torchmetrics has for the names of reductions
_JOINED = ("sum", "mean", "min", "max")


def is_one(obj: Any) -> bool:
    """Whether an object is such a metric."""
    return (
        isinstance(obj, torch.nn.Module)
        and hasattr(type(obj), "add_state")
        and isinstance(obj.__dict__.get("_reductions"), dict)
        and isinstance(obj.__dict__.get("_defaults"), dict)
    )


def adapt(objects: Iterable[Any]) -> None:
    """Makes the states of metrics among some objects buffers, before they are distributed.

    Raises:
        StrategyError: A state cannot be joined.
    """
    for metric in objects:
        if "_enable_compute_groups" in getattr(metric, "__dict__", {}):
            # A collection lets metrics share a state that is equal on its own rows: each replica would choose others.
            metric._enable_compute_groups, metric._groups_checked = False, False
            metric._groups = {}
        if is_one(metric):
            for name, reduction in metric._reductions.items():
                _adapt_state(metric, name, reduction)
            metric.sync_on_compute = metric._to_sync = False
            metric.__dict__["compute"] = _of_all(weakref.ref(metric), metric.compute)


def _adapt_state(metric: Any, name: str, reduction: Any) -> None:
    how = getattr(reduction, "__name__", str(reduction)).removeprefix(_PREFIX)
    if how not in _JOINED or not isinstance(metric._defaults[name], torch.Tensor):
        raise StrategyError(
            f"{type(metric).__name__} keeps {name!r} with dist_reduce_fx={how!r}; replicas can join only tensors "
            f"with {', '.join(_JOINED)}. Return the rows from the step, join them with strategy.gather, and "
            f"update a metric made outside the scope in the main program; some metrics take thresholds= and then "
            f"keep no rows"
        )
    value = metric.__dict__.pop(name, None)
    if value is not None:
        metric.register_buffer(name, value, persistent=False)  # torchmetrics saves what is to be saved itself
    aggregate(metric, name, how)


def _of_all(held: "weakref.ref[Any]", original: Callable[..., Any]) -> Callable[..., Any]:
    """What `compute` does in the main program, where workers of a parameter server may have updated the state."""

    @functools.wraps(original)
    def compute(*args: Any, **kwargs: Any) -> Any:
        metric: Any = held()
        if not context.state.replicas:
            context.before_read(metric)
            metric._computed = None
            is_used = any(not torch.equal(getattr(metric, name), each) for name, each in metric._defaults.items())
            metric._update_count = max(metric._update_count, int(is_used))
        return original(*args, **kwargs)

    return compute
