"""What optimizers hold, and what schedulers put on them."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim import optimizer as _optimizers

OPTIMIZER_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The dicts in which an optimizer holds the hooks of its `step`."""

OPTIMIZER_METHODS: Final = ("step", "state_dict", "load_state_dict", "zero_grad")
"""Methods that somebody may replace on one optimizer."""

OPTIMIZER_MARKS: Final = ("_opt_called",)
"""What schedulers put on it."""


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Those of all optimizers and of `register_step_pre_hook`, which torch calls in its wrapper around `step`."""
    own: dict[int, Callable[..., Any]] = optimizer._optimizer_step_pre_hooks
    return [*_optimizers._global_optimizer_pre_hooks.values(), *own.values()]


def step_post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Those of `register_step_post_hook` and of all optimizers, likewise."""
    own: dict[int, Callable[..., Any]] = optimizer._optimizer_step_post_hooks
    return [*own.values(), *_optimizers._global_optimizer_post_hooks.values()]


def mark_stepped(optimizer: Any) -> None:
    """Tells schedulers that the optimizer has made a step, else they warn; since torch 2.4."""
    optimizer._opt_called = True


def mark_wrapped(step: Any) -> None:
    """Keeps schedulers from putting a wrapper of theirs around a `step`; since torch 2.4."""
    step._wrapped_by_lr_sched = True


def step_of_adagrad(bare: Callable[..., Any]) -> Callable[..., Any]:
    """A step of Adagrad that makes the state of tensors that have none; since torch 2.12 it does so itself."""
    if torch.__version__ >= "2.12":
        return bare

    def step(optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        first = optimizer.defaults["initial_accumulator_value"]
        for group in optimizer.param_groups:
            dtype = _optimizers._get_scalar_dtype(is_fused=group["fused"])  # type: ignore[no-untyped-call]
            for each in group["params"]:
                if each.grad is not None and not (state := optimizer.state[each]):
                    state["step"] = torch.zeros((), dtype=dtype, device=each.device if group["fused"] else "cpu")
                    state["sum"] = torch.full_like(each, complex(first, first) if each.is_complex() else first)
        return bare(optimizer, *args)

    return step
