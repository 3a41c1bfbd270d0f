"""Losses of Keras that are no means over examples: sums, and means over what a mask or weights let count.

A replica's loss counts by its number of examples. Of a loss with another divisor the replica's part is made so that
what comes out is the loss of the global batch. Connected by `connect`, in the main program and in children.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from keras.src.losses import loss as losses

from stratagem.engine.context import ReplicaContext

_MEANS = ("mean", "sum_over_batch_size")


@functools.cache
def connect() -> None:
    """Lets losses be those of the global batch, once for the process."""
    losses.reduce_weighted_values = functools.partial(_reduced, losses.reduce_weighted_values)


@contextlib.contextmanager
def of_global_batch(replica: ReplicaContext | None) -> Iterator[None]:
    """Inside the block losses are a replica's part of those of the global batch.

    Args:
        replica: Which replica this is; `None` if what is looked at is the global batch already.
    """
    token = computing.set(replica)
    try:
        yield
    finally:
        computing.reset(token)


# Which replica computes on a part of a batch.
computing: contextvars.ContextVar[ReplicaContext | None] = contextvars.ContextVar("computing", default=None)


def _reduced(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """What Keras makes of the losses of examples; a sum, or a mean over something else, is that of all replicas."""
    loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    replica = computing.get()
    if replica is None or not values.shape:  # a loss that makes one number of a batch itself
        return loss
    if reduction == "sum":
        divisor: Any = 1.0
    elif reduction in _MEANS and mask is not None:
        divisor = mask.sum()
    elif reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        divisor = losses.apply_mask(sample_weight, mask, dtype=loss.dtype, reduction="sum").sum()
    else:
        return loss
    own = torch.tensor([float(divisor), replica.num_examples], dtype=torch.float64, device=loss.device)
    total = replica.all_reduce("sum", own)
    if not replica.num_examples:
        return loss
    divisors = own[0] / total[0] if reduction != "sum" else 1.0
    return loss * (divisors * total[1] / own[1]).nan_to_num().to(loss.dtype)
