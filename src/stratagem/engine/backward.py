"""Wraps torch's backward, so that a pass inside a run belongs to its replica.

Also what clips or unscales gradients: those that a step has set itself are summed before. Outside
of runs a pass that reaches distributed parameters is refused: only one replica would compute it.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from stratagem import _torch
from stratagem.engine import context
from stratagem.errors import StrategyError
from stratagem.objects.tracking import pending_parameters

_original_backward = torch.autograd.backward


class _Home:
    """The thread of the program that made the last strategy: what others differentiate is their own."""

    thread = 0


_home = _Home()


def install() -> None:
    """Wraps torch's backward, once for the process."""
    _home.thread = threading.get_ident()
    if torch.autograd.backward is not _original_backward:
        return

    @functools.wraps(_original_backward)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if context.current_runs and context.state.replicas:  # a thread of the program's own is not in the run
            own = context.current_runs[-1].backward
            _torch.compiling.not_compiled(own, _original_backward, tensors, grad_tensors, *args, **kwargs)
        elif _home.thread == threading.get_ident() and (context.open_runtimes or pending_parameters()):
            _backward_outside(tensors, grad_tensors, *args, **kwargs)
        else:
            _original_backward(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward
    _torch.backward_passes.call_before_clips(_sum_set_gradients)


def _sum_set_gradients(parameters: Sequence[torch.Tensor]) -> None:
    if context.current_runs and context.state.replicas:
        context.current_runs[-1].sum_set_gradients(parameters)


def _backward_outside(*args: Any, **kwargs: Any) -> None:
    """Refuses a backward pass in which only the controller would compute."""
    given = [parameter for runtime in context.open_runtimes for parameter in runtime.copies.parameters()]
    before = {parameter: parameter.grad for parameter in (*given, *pending_parameters())}
    for parameter in before:
        parameter.grad = None
    touched = []
    try:
        _original_backward(*args, **kwargs)
        touched = [parameter for parameter in before if parameter.grad is not None]
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
    if touched:
        raise StrategyError(
            f"backward() reached {len(touched)} distributed parameter(s) outside strategy.run, where only one replica "
            f"computes. Put the step into a function and run it on all replicas:\n"
            f"    def step(x, y): ...; loss.backward(); optimizer.step(); return loss\n"
            f"    loss = strategy.run(step, args=(x, y))"
        )
