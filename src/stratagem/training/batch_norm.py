"""Normalizes over the global batch: batch normalization whose statistics are those of all replicas.

Owns the conversion of a model and the arithmetic. What travels is a few numbers for each channel:
once in the forward pass, and once in the backward pass if the input needs a gradient. Gradients
of weight and bias are left as this replica's own; `variables.ledger` sums them as it sums all others.
"""

import dataclasses
from typing import Any, Final, TypeVar, final

import torch
from torch.autograd.function import once_differentiable

from stratagem import _torch
from stratagem.engine import context
from stratagem.engine.context import ReplicaContext
from stratagem.errors import StrategyError

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)

_KINDS: Final = {kind.__name__: kind for kind in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)}


def convert_sync_batchnorm(module: AnyModule) -> AnyModule:
    """Makes every batch normalization of a model compute its statistics over the global batch.

    The layers are changed in place: they stay the same objects with the same parameters, buffers,
    hooks and state_dict keys, so optimizers may be made before or after. Call it before the model's
    first `strategy.run`, inside the scope or after it.

    Args:
        module: A model, or a single `torch.nn.BatchNorm1d`, `2d` or `3d`. Layers that are torch's own
            `SyncBatchNorm` need no conversion.
    Returns:
        The same module; each layer in it is now a `SyncBatchNorm`.
    Raises:
        StrategyError: Replicas already have the model, or a layer is a class of its own whose
            computation would be lost. Nothing has been changed then.
    Example:
        >>> model = convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)))
        >>> type(model[1]).__name__
        'SyncBatchNorm'
    """
    if not isinstance(module, torch.nn.Module):
        raise StrategyError(
            f"convert_sync_batchnorm takes a torch module and changes it, got {type(module).__name__} {module!r}"
        )
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _torch.module_parts.BatchNorm) and not isinstance(layer, torch.nn.SyncBatchNorm)
    }
    for name, layer in layers.items():
        where = repr(name) if name else "the module itself"
        if type(layer) not in _KINDS.values():
            raise StrategyError(
                f"convert_sync_batchnorm converts {', '.join(_KINDS)}; {where} is a {type(layer).__name__}, "
                f"whose own computation would be lost. Replace it by one of them first"
            )
        if context.holders_of(layer):
            raise StrategyError(
                f"convert_sync_batchnorm changes a model before its first strategy.run, but the replicas already "
                f"have {where}. Convert right after the model is made:\n"
                f"    with strategy.scope():\n"
                f"        model = sg.convert_sync_batchnorm(Net())"
            )
    for layer in layers.values():
        layer.kind = type(layer).__name__  # type: ignore[assignment]
        layer.__class__ = SyncBatchNorm
    return module


def adapt(layer: torch.nn.Module) -> None:
    """Makes a layer that is torch's own `SyncBatchNorm` meet the replicas of its strategy."""
    layer.__class__ = SyncBatchNorm


@final
class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Batch normalization over the global batch; made by `convert_sync_batchnorm`.

    Inside `strategy.run`, wherever plain batch normalization would take the statistics of its
    batch, this takes those of the batches of all replicas together; replicas with few examples or
    none take part like the others. With running statistics (`eval()`), with one replica and outside
    `run` it is plain batch normalization. All replicas must call it equally often. It can be
    differentiated once.
    """

    kind: str = ""  # of a layer that was converted: its class

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized input: this replica's part of what one device would give."""
        replica = context.current_replica()
        from_batch = self.training or (self.running_mean is None and self.running_var is None)
        if replica is None or replica.num_replicas_in_sync == 1 or not from_batch:
            return _torch.module_parts.BatchNorm.forward(self, input)
        self._check_input_dim(input)
        statistics = _statistics(input.detach(), replica)
        if statistics.count == 0:
            return _torch.module_parts.BatchNorm.forward(self, input)
        if statistics.count == 1:
            raise ValueError(
                f"batch normalization needs more than 1 value per channel in training, but the global batch has 1 "
                f"(replica {replica.replica_id_in_sync_group} got shape {tuple(input.shape)}); give more examples"
            )
        output: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, statistics, self.eps, replica)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            self._track(statistics)
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        _torch.module_parts.check_input_dim(_KINDS.get(self.kind, torch.nn.SyncBatchNorm), self, input)

    @torch.no_grad()
    def _track(self, statistics: "_Statistics") -> None:
        """Moves the running statistics towards those of this batch, in float64, rounded once."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        factor = factor or 0.0
        unbiased = statistics.variance * (statistics.count / (statistics.count - 1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            if running is not None:
                running.copy_(factor * new + (1.0 - factor) * running)


@dataclasses.dataclass(frozen=True)
class _Statistics:
    """What the global batch has in each channel, in float64; the same bits in every replica."""

    count: int
    mean: torch.Tensor
    variance: torch.Tensor


@torch.no_grad()
def _statistics(batch: torch.Tensor, replica: ReplicaContext) -> _Statistics:
    """The mean and biased variance of each channel over the batches of all replicas.

    Each replica takes its own mean, then the squares of the deviations from it; these are combined
    exactly (Chan et al.), so that one exchange does, and nothing cancels where the mean is large.
    """
    batch = batch.to(_precision(batch))
    axes, count = _reduced_axes(batch), batch.numel() // max(1, batch.shape[1])
    mean = batch.sum(axes, dtype=torch.float64) / max(1, count)
    squares = (batch - _per_channel(mean, batch)).square_().sum(axes, dtype=torch.float64)
    own = torch.stack([torch.full_like(mean, count), mean, squares])
    own = own if replica.has_examples else torch.zeros_like(own)  # it finds its own among the others'
    counts, means, all_squares = replica.all_gather(own.unsqueeze(0)).unbind(dim=1)
    total = int(counts[:, 0].sum())
    mean = (counts * means).sum(dim=0) / max(1, total)
    squares = (all_squares + counts * (means - mean).square()).sum(dim=0)
    return _Statistics(total, mean, squares / max(1, total))


class _Normalize(torch.autograd.Function):
    """Normalizes with given statistics, and knows that they depend on the inputs of all replicas."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
        eps: float,
        replica: ReplicaContext,
    ) -> torch.Tensor:
        ctx.save_for_backward(batch, weight)
        ctx.statistics, ctx.eps, ctx.replica = statistics, eps, replica
        ctx.bias_dtype = None if bias is None else bias.dtype
        dtype = _precision(batch)
        # The kernel of evaluation takes the statistics that it is given.
        return torch.nn.functional.batch_norm(
            batch.to(dtype),
            statistics.mean.to(dtype),
            statistics.variance.to(dtype),
            weight=None if weight is None else weight.to(dtype),
            bias=None if bias is None else bias.to(dtype),
            eps=eps,
        ).to(batch.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, weight = ctx.saved_tensors
        statistics, dtype = ctx.statistics, _precision(batch)
        axes, gradient = _reduced_axes(batch), gradient.to(dtype)
        deviations = batch.to(dtype) - _per_channel(statistics.mean, gradient)
        inverse = (statistics.variance + ctx.eps).rsqrt()
        own = torch.stack(
            [
                gradient.sum(axes, dtype=torch.float64),
                (gradient * deviations).sum(axes, dtype=torch.float64) * inverse,
            ]
        )
        to_batch = None
        if ctx.needs_input_grad[0]:
            # Also where this replica has no examples: the others wait for its zeros.
            along_ones, along_normalized = ctx.replica.all_reduce("sum", own) / statistics.count
            scale = inverse if weight is None else inverse * weight
            to_batch = deviations.mul_(_per_channel(-along_normalized * inverse, deviations))
            to_batch.add_(gradient).sub_(_per_channel(along_ones, deviations)).mul_(_per_channel(scale, deviations))
            to_batch = to_batch.to(batch.dtype)
        to_weight = None if weight is None else own[1].to(weight.dtype)
        to_bias = None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype)
        return to_batch, to_weight, to_bias, None, None, None


def _precision(batch: torch.Tensor) -> torch.dtype:
    """The type to compute in: low precision is computed in float32."""
    return torch.float64 if batch.dtype == torch.float64 else torch.float32


def _reduced_axes(batch: torch.Tensor) -> list[int]:
    return [axis for axis in range(batch.dim()) if axis != 1]


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value for each channel, in the type of a batch and shaped to meet it."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))
