"""Lets optimizers of torch be recorded: their state exists before, and their counters stay tensors.

An optimizer makes its state in its first step, and most count steps in numbers of Python, which a graph could not
carry from run to run. Both are mended here while a function is traced, and put back afterwards. In a graph that is
recorded line by line they are not: there only optimizers without state can take a step.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stratagem import _torch, _tree
from stratagem._caller import shown_line, users_line
from stratagem.errors import GraphError
from stratagem.graphs.graph_tensor import GraphTensor

# Those whose state begins with zeros.
_STARTABLE: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)


@contextlib.contextmanager
def recordable_optimizers() -> Iterator[None]:
    """Inside the block, steps of optimizers can be recorded."""
    changed: list[dict[str, Any]] = []
    starting: list[torch.optim.Optimizer] = []
    before = torch.compiler.is_compiling()

    def prepare(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in starting:
            return
        for group in optimizer.param_groups:
            if group.get("capturable") is False:
                group["capturable"] = True
                changed.append(group)
        # Otherwise torch takes counters in tensors for a matter of GPUs only.
        _torch.compiling.set_compiling(True)
        starting.append(optimizer)
        with _torch.modes.without_dispatch_modes():
            _start(optimizer)
        starting.remove(optimizer)

    def put_back(*_: Any) -> None:
        if not starting:
            _torch.compiling.set_compiling(before)
            for group in changed:
                group["capturable"] = False
            changed.clear()

    hooks = [register_optimizer_step_pre_hook(prepare), register_optimizer_step_post_hook(put_back)]
    try:
        yield
    finally:
        starting.clear()
        put_back()
        for hook in hooks:
            hook.remove()


@functools.cache
def watch_steps() -> None:
    """From now on, graphs that are recorded line by line know of steps of optimizers, and refuse those with state."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    concerned = [each for each in parameters if isinstance(each.grad, GraphTensor) and not each.grad.recorder.is_trace]
    if not concerned:
        return
    name = type(optimizer).__name__
    if any(_tree.leaves(optimizer.state.get(each, {})) for each in concerned):
        raise GraphError(
            f"{name} keeps state from step to step, and a graph that is recorded line by line would repeat its first "
            f"step in each run. Write the step as a function of a model and record it with sg.trace(step, "
            f"sg.TensorSpec(...)); or write the update with torch.autograd.grad and sg.assign"
        )
    concerned[0].grad.recorder.optimizer_steps.append(f"a step of {name} at {shown_line(*users_line())}")


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer make the state that its first step would make, and nothing else."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    new = [each for each in parameters if each.grad is not None and not optimizer.state.get(each)]
    has_state = any(group.get("momentum") for group in optimizer.param_groups) or type(optimizer) is not torch.optim.SGD
    if not new or not has_state:
        return
    if type(optimizer) not in _STARTABLE or any(group.get("dampening") for group in optimizer.param_groups):
        raise GraphError(
            f"{type(optimizer).__name__} makes its state in its first step, in a way that cannot be foreseen; call the "
            f"function once with ordinary tensors before it is traced"
        )
    gradients = [each.grad for each in parameters]
    values = [each.detach().clone() for each in new]
    try:
        for each in parameters:
            each.grad = torch.zeros_like(each) if any(each is one for one in new) else None
        optimizer.step()
    finally:
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient
        with torch.no_grad():
            for each, value in zip(new, values, strict=True):
                each.copy_(value)
                for kept in optimizer.state[each].values():
                    if isinstance(kept, torch.Tensor):
                        kept.zero_()
