"""Exchanges tensors so that gradients flow through the exchange, to the replicas that they come from.

The gradient of what all replicas got is the sum of what each makes of it. Passes back through an exchange
are exchanges too, which can be differentiated again; every replica must make them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from stratagem.collectives.collective import Collective


def all_reduce(
    collective: Collective, tensor: torch.Tensor, op: str = "sum", counted: Sequence[bool] | None = None
) -> torch.Tensor:
    """The sum, mean, max or min over all replicas.

    Args:
        collective: How they exchange tensors.
        tensor: This replica's.
        op: Which.
        counted: Whose tensors count, and what comes back for them in a backward pass; by default everyone's.
    """
    counts = counted is None or counted[collective.rank]
    num_counted = collective.size if counted is None else sum(counted)
    if not _has_gradient(tensor):
        result = collective.all_reduce(tensor if counts else neutral(tensor, op), op)
        return result * (collective.size / num_counted) if op == "mean" and num_counted < collective.size else result
    if op in ("sum", "mean"):
        total: torch.Tensor = _Sum.apply(collective, tensor, counts)  # type: ignore[no-untyped-call]
        return total / num_counted if op == "mean" else total
    extreme: torch.Tensor = _Extreme.apply(collective, tensor, op, counts)  # type: ignore[no-untyped-call]
    return extreme


def all_gather(
    collective: Collective, tensor: torch.Tensor, counted: Sequence[bool] | None = None
) -> list[torch.Tensor]:
    """The tensors of all replicas, which may differ in shape.

    Args:
        collective: How they exchange tensors.
        tensor: This replica's.
        counted: Whose tensors count; by default everyone's. Those that do not are seen by the replicas that have such.
    """
    counts = counted is None or counted[collective.rank]
    parts: Sequence[torch.Tensor] = collective.all_gather(tensor) if not _has_gradient(tensor) else ()
    parts = parts or _Gather.apply(collective, tensor, counts)  # type: ignore[no-untyped-call]
    return [each for rank, each in enumerate(parts) if counted is None or counted[rank] or not counts]


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def neutral(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """What changes nothing in the result of others."""
    if op in ("sum", "mean"):
        return torch.zeros_like(tensor)
    if tensor.dtype == torch.bool:
        return torch.full_like(tensor, op == "min")
    if tensor.is_floating_point():
        return torch.full_like(tensor, -math.inf if op == "max" else math.inf)
    limits = torch.iinfo(tensor.dtype)
    return torch.full_like(tensor, limits.min if op == "max" else limits.max)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: Collective, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        ctx.collective, ctx.counts = collective, counts
        # No view: the program may add to it.
        return collective.all_reduce(tensor if counts else torch.zeros_like(tensor)).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, _Sum.apply(ctx.collective, gradient, ctx.counts), None  # type: ignore[no-untyped-call]


class _Extreme(torch.autograd.Function):
    """The maximum or minimum; its gradient goes in equal parts to the elements that are."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, tensor: torch.Tensor, op: str, counts: bool) -> torch.Tensor:
        own = tensor if counts else neutral(tensor, op)
        result = collective.all_reduce(own, op).clone()
        ctx.collective, ctx.counts = collective, counts
        ctx.save_for_backward(own, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensor, result = ctx.saved_tensors
        mask = (tensor == result).to(gradient.dtype)
        total: torch.Tensor = _Sum.apply(ctx.collective, gradient, ctx.counts)  # type: ignore[no-untyped-call]
        return None, total * (mask / ctx.collective.all_reduce(mask)), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: Collective, tensor: torch.Tensor, counts: bool) -> tuple[torch.Tensor, ...]:
        ctx.collective, ctx.counts = collective, counts
        return tuple(each.clone() for each in collective.all_gather(tensor))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = torch.cat([each.reshape(-1) for each in gradients])
        row: torch.Tensor = _Sum.apply(ctx.collective, whole, ctx.counts)  # type: ignore[no-untyped-call]
        rank = ctx.collective.rank
        own = torch.split(row, [each.numel() for each in gradients])[rank]
        return None, own.view(gradients[rank].shape), None
