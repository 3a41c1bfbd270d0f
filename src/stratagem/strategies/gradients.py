"""Makes `loss.backward()` give every replica the gradient of the global batch.

Owns the wrapper around torch's backward: it scales the start of the backward pass by the replica's
part of the global batch (so that sums over replicas are means over examples), and when the pass is
done sums what came out over the replicas. Parameters that no replica used keep no gradient;
replicas without examples count for nothing, whatever their loss is.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from stratagem.collectives.exchange import Exchange
from stratagem.errors import StrategyError
from stratagem.replicas.variables import Placement, Store, shaped
from stratagem.strategies import context

if TYPE_CHECKING:
    from stratagem.strategies.runtime import Runtime

FINITE_FLAG, CULPRIT_FLAG = 0, 3


@final
class GradientStore:
    """The gradients of the parameters of one store."""

    def __init__(self, store: Store, exchange: Exchange) -> None:
        self.exchange = exchange
        self.store = store
        self.placements = store.placements
        self._views = [shaped(exchange.sum, placement) for placement in self.placements]
        start = exchange.sum.data_ptr()
        self._range = range(start, start + exchange.sum.nbytes)
        self._kept: list[tuple[torch.Tensor, torch.Tensor] | None] = []

    def set_aside(self) -> None:
        """Takes gradients of an earlier step, already summed, out of the way of this step's."""
        self._kept = []
        for parameter in self.store.tensors:
            gradient = None if parameter is None else parameter.grad
            summed = gradient is not None and gradient.data_ptr() in self._range
            # Its memory is written over if any replica has a new one; else it stays what it is.
            self._kept.append((gradient, gradient.clone()) if gradient is not None and summed else None)
            if parameter is not None and summed:
                parameter.grad = None

    def flat_local(self) -> list[torch.Tensor | None]:
        """This replica's own gradients, each as a flat vector in the order of its parameter's memory."""
        pairs = zip(self.store.tensors, self.placements, strict=True)
        return [None if parameter is None else _flat(parameter, placement) for parameter, placement in pairs]

    def give_out(self, present: Sequence[bool]) -> None:
        """Makes the sums everyone's gradients."""
        for parameter, view, there, kept in zip(self.store.tensors, self._views, present, self._kept, strict=True):
            if parameter is None:
                continue
            if there:
                # A new tensor each time: gradients belong to one step.
                parameter.grad = view.detach()
                if kept is not None:
                    parameter.grad.add_(kept[1])
            elif kept is not None:
                # The same tensor as before, with what the program had done to it.
                parameter.grad = kept[0].copy_(kept[1])
            else:
                parameter.grad = None


@final
class GradientSync:
    """Sums the gradients of one strategy's parameters after each backward pass."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self.stores: list[GradientStore] = []
        self.finite = True
        self.culprits: list[tuple[int, str]] = []

    def sum(self) -> None:
        """Publishes, sums and gives out; every replica must come here."""
        signals, counted = self._runtime.signals, self._runtime.counted
        locals_ = [store.flat_local() for store in self.stores]
        finite, present = True, []
        for store, vectors in zip(self.stores, locals_, strict=True):
            store.exchange.forget()
            there, own_part_is_finite = store.exchange.add_up(vectors, counted)
            if self._runtime.settings.unused == "error":
                self._refuse_unused(store, counted)
            present.append(there)
            finite &= own_part_is_finite
        signals.put_flag(FINITE_FLAG, int(finite))
        signals.barrier()
        self.finite = all(signals.flags(FINITE_FLAG))
        self.culprits = [] if self.finite else self._find_culprits(locals_)
        for store, there in zip(self.stores, present, strict=True):
            store.give_out(there)

    def _refuse_unused(self, store: GradientStore, counted: Sequence[bool]) -> None:
        for placement, ranks in zip(store.placements, store.exchange.present_in(), strict=True):
            having = [rank for rank in ranks if counted[rank]]
            missing = [rank for rank, counts in enumerate(counted) if counts and rank not in having]
            if having and missing:
                raise StrategyError(
                    f"{placement.label!r} got a gradient on replica {having[0]} but not on {missing[0]}; "
                    f"use unused='zero' if this is meant"
                )

    def _find_culprits(self, locals_: Sequence[Sequence[torch.Tensor | None]]) -> list[tuple[int, str]]:
        """Which replicas had gradients that are not finite, and where first."""
        signals, counted = self._runtime.signals, self._runtime.counted
        labels = [placement.label for store in self.stores for placement in store.placements]
        vectors = [vector for each in locals_ for vector in each]
        bad = [number for number, each in enumerate(vectors) if each is not None and not each.isfinite().all()]
        firsts = signals.exchange_flag(CULPRIT_FLAG, bad[0] + 1 if bad and counted[signals.rank] else 0)
        signals.barrier()
        return [(rank, labels[first - 1]) for rank, first in enumerate(firsts) if first]


def _flat(parameter: torch.Tensor, placement: Placement) -> torch.Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise StrategyError(
            f"a parameter of shape {placement.shape} got a sparse gradient, which replicas cannot sum; "
            f"use sparse=False in its nn.Embedding"
        )
    if gradient.stride() != placement.stride:
        gradient = torch.empty_strided(placement.shape, placement.stride, dtype=gradient.dtype).copy_(gradient)
    return gradient.as_strided((placement.numel,), (1,))


_original_backward = torch.autograd.backward


def install() -> None:
    """Wraps torch's backward, once for the process."""
    if torch.autograd.backward is not _original_backward:
        return

    @functools.wraps(_original_backward)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if context.current_runs:
            context.current_runs[-1].backward(_original_backward, tensors, grad_tensors, *args, **kwargs)
        elif context.open_runtimes:
            _backward_outside(tensors, grad_tensors, *args, **kwargs)
        else:
            _original_backward(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _backward_outside(*args: Any, **kwargs: Any) -> None:
    """Refuses a backward pass in which only the controller would compute."""
    before = {
        parameter: parameter.grad for runtime in context.open_runtimes for parameter in runtime.copies.parameters()
    }
    for parameter in before:
        parameter.grad = None
    _original_backward(*args, **kwargs)
    touched = [parameter for parameter in before if parameter.grad is not None]
    for parameter, gradient in before.items():
        if parameter.grad is None or touched:
            parameter.grad = gradient
    if touched:
        raise StrategyError(
            f"backward() reached {len(touched)} distributed parameter(s) outside strategy.run, where only one replica "
            f"computes. Put the step into a function and run it on all replicas:\n"
            f"    def step(x, y): ...; loss.backward(); optimizer.step(); return loss\n"
            f"    loss = strategy.run(step, args=(x, y))"
        )
