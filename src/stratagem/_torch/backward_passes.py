"""Backward passes, and what the program does with gradients after them."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

_any_torch: Final[Any] = torch  # whose annotations leave some of these out


def _shown_to_modes(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.autograd.backward` as a function that a `TorchFunctionMode` sees; since torch 2.11 it is one."""

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        asked = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        if torch.overrides.has_torch_function(asked):
            torch.overrides.handle_torch_function(backward, asked, tensors, *args, **kwargs)
        else:
            original(tensors, *args, **kwargs)

    return backward


# Here, so that it is what strategies wrap, whichever of them or of placement comes first.
if torch.__version__ < "2.11":
    _any_torch.autograd.backward = _shown_to_modes(torch.autograd.backward)

current_autograd_node: Final[Callable[[], Any]] = _any_torch._C._current_autograd_node
"""The node whose backward this thread runs; `None` outside a backward pass."""

next_sequence_number: Final[Callable[[], int]] = _any_torch.autograd._get_sequence_nr
"""The number that autograd's next node gets in this thread."""


def sequence_number(node: Any) -> int:
    """The number that a node of autograd got when it was made."""
    return int(node._sequence_nr())


def call_before_clips(function: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Lets a function be called with what `clip_grad_norm_` and its fellows are about to use, however imported.

    These are parameters; for `get_total_norm` they are gradients. `GradScaler` comes there before it unscales, too.
    """
    found: Any = importlib.import_module("torch.nn.utils.clip_grad")
    for each in (found.clip_grad_norm_, found.clip_grad_value_, found._get_total_norm):
        cell = each.__closure__[each.__code__.co_freevars.index("func")]  # of the wrapper around it, since torch 2.6
        cell.cell_contents = _with_list_first(function, cell.cell_contents)
    scaler_kind: Any = torch.amp.GradScaler
    original = scaler_kind._unscale_grads_

    @functools.wraps(original)
    def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        function([each for group in optimizer.param_groups for each in group["params"]])
        return original(scaler, optimizer, *args, **kwargs)

    scaler_kind._unscale_grads_ = unscale


def _with_list_first(function: Callable[[list[torch.Tensor]], None], original: Any) -> Any:
    """Calls a function with the tensors that another is given first, before that."""
    name = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.pop(name)
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        function(tensors)
        return original((each for each in tensors) if isinstance(given, Iterator) else given, *args[1:], **kwargs)

    return wrapped


def is_in_backward_pass() -> bool:
    """Whether this thread computes a part of a backward pass, its hooks and what is recomputed included."""
    return int(torch._C._current_graph_task_id()) != -1
