"""Losses as TensorFlow's custom loops scale them: by the global batch, so that their sum over replicas is the loss.

The backward pass counts each replica's losses by its weight; a loss from here has its part of the whole already, so
that its way back undoes that weight. Losses of both kinds can be added.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from stratagem._checks import require_count
from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.errors import StrategyError


def compute_average_loss(
    per_example_loss: Any, *, sample_weight: Any = None, global_batch_size: Any = None
) -> torch.Tensor:
    """Returns the sum of a replica's losses divided by the global batch size, as `tf.nn.compute_average_loss`.

    Summed over the replicas (`strategy.reduce("sum", loss)`) it is the mean over the global batch, however the rows are
    divided. It trains as that mean does, also if other losses are added to it. Without examples it is 0.

    Args:
        per_example_loss: One loss for each example of this replica, or more; a tensor, array or list.
        sample_weight: One weight for each example, of shape `(n,)` or `(n, 1)`; one for each loss; or one for all.
        global_batch_size: By default the number of examples of all replicas.
    Raises:
        StrategyError: There is one loss for all examples, or weights do not fit.
    Example:
        >>> compute_average_loss(torch.tensor([1.0, 3.0]), global_batch_size=4)
        tensor(1.)
    """
    replica = _replica("compute_average_loss") if global_batch_size is None else context.current_replica()
    losses = _tensor(per_example_loss)
    if losses is None or not losses.dim():
        raise StrategyError(
            f"per_example_loss is a tensor with a loss for each example, got {type(per_example_loss).__name__} "
            f"{per_example_loss!r}; use reduction='none'"
        )
    if sample_weight is not None:
        losses = (losses * _fitting(sample_weight, losses)).to(losses.dtype)
    share = replica.share if replica is not None else 1.0
    size = len(losses) / (share or 1.0) if global_batch_size is None else _count(global_batch_size)
    return _counted_fully(losses.sum() / max(size, 1), replica)


def scale_regularization_loss(regularization_loss: Any) -> torch.Tensor:
    """Returns a replica's part of losses that are the same in all replicas, as `tf.nn.scale_regularization_loss`.

    It is the sum of these losses times the replica's share of the rows, so that the sum over all replicas is the whole.

    Args:
        regularization_loss: A tensor, or a list of them such as Keras' `model.losses`.
    Example:
        >>> scale_regularization_loss([torch.tensor(1.0), torch.tensor(2.0)])
        tensor(3.)
    """
    replica = _replica("scale_regularization_loss")
    losses = _tensor(regularization_loss)
    if losses is None:
        raise StrategyError(
            f"regularization_loss is a tensor or a list of them, got {type(regularization_loss).__name__} "
            f"{regularization_loss!r}"
        )
    return _counted_fully(losses.sum() * (replica.share if replica is not None else 1.0), replica)


def _replica(what: str) -> ReplicaContext | None:
    """The replica that the code is in; refuses a guess where the main program stands for several."""
    replica = context.current_replica()
    if replica is None and context.has_strategy():
        raise StrategyError(f"{what} was called in the main program, inside a scope; call it in the function of run")
    return replica


def _counted_fully(loss: torch.Tensor, replica: ReplicaContext | None) -> torch.Tensor:
    if replica is None:
        return loss
    counted: torch.Tensor = _CountedFully.apply(loss, replica)  # type: ignore[no-untyped-call]
    return counted


@final
class _CountedFully(torch.autograd.Function):
    """A part of a sum over all replicas: what the backward pass multiplies it by is divided out again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loss: torch.Tensor, replica: ReplicaContext) -> torch.Tensor:
        return _own_part(loss, replica)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.replica = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight = ctx.replica.loss_weight  # of this pass: `weight()` may have been called after the loss was computed
        return (gradient / weight if weight else torch.zeros_like(gradient)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _own_part(tangents[0], ctx.replica)


def _own_part(value: torch.Tensor, replica: ReplicaContext) -> torch.Tensor:
    return value.clone() if replica.has_examples else torch.zeros_like(value)


def _tensor(value: Any) -> torch.Tensor | None:
    """A tensor of what has numbers; gradients flow through lists of tensors too."""
    if isinstance(value, Sequence) and value and all(isinstance(each, torch.Tensor) for each in value):
        return torch.stack(list(value))
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _fitting(weight: Any, losses: torch.Tensor) -> torch.Tensor:
    """Weights with the axes of the losses: examples come first, and an axis of one too many is left out."""
    made = _tensor(weight)
    if made is not None:
        made = made.to(losses.device)
        if made.dim() == losses.dim() + 1 and made.shape[-1] == 1:
            made = made.squeeze(-1)
        if made.dim():
            made = made.reshape(*made.shape, *[1] * (losses.dim() - made.dim()))
        if made.dim() <= losses.dim() and all(
            own in (1, size) for own, size in zip(made.shape, losses.shape, strict=bool(made.dim()))
        ):
            return made
    came = type(weight).__name__ if made is None else f"shape {tuple(torch.as_tensor(weight).shape)}"
    raise StrategyError(
        f"sample_weight has one weight for each example, for losses of shape {tuple(losses.shape)}: shape "
        f"({len(losses)},) or ({len(losses)}, 1), got {came}"
    )


def _count(size: Any) -> int:
    if isinstance(size, np.integer) or (isinstance(size, torch.Tensor) and not size.dim() and _is_whole(size)):
        size = int(size)
    require_count(global_batch_size=size)
    return int(size)


def _is_whole(number: torch.Tensor) -> bool:
    return not number.is_floating_point() and not number.is_complex() and number.dtype != torch.bool
