"""Lets each replica apply a Keras optimizer to its own part of the variables only, where they share memory.

As for torch's optimizers (`strategies.updates`): optimizers that treat every element alike are split. For
the time of the update each variable and what the optimizer keeps for it are the replica's part alone.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch

from stratagem.strategies import context
from stratagem.training.keras_wire import tensor_of

_ELEMENTWISE = frozenset({"SGD", "Adam", "AdamW", "Nadam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Lion", "Ftrl"})


def take_over(optimizer: Any, *, checks_gradients: bool = False) -> None:
    """Puts the replica's own update in the place of the optimizer's, once.

    Args:
        optimizer: A Keras optimizer.
        checks_gradients: Whether somebody else sees to gradients that are not finite.
    """
    if optimizer is None or "_backend_update_step" in optimizer.__dict__:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        take_over(optimizer.inner_optimizer, checks_gradients=True)
        return
    update = functools.partial(_update, optimizer, optimizer._backend_update_step, checks_gradients)
    optimizer.__dict__["_backend_update_step"] = update


def _update(
    optimizer: Any,
    original: Callable[..., None],
    checks_gradients: bool,
    gradients: Sequence[torch.Tensor],
    variables: Sequence[Any],
    learning_rate: Any,
) -> None:
    run = context.current_runs[-1] if context.current_runs else None
    if run is None:
        original(gradients, variables, learning_rate)
    elif not (_is_elementwise(optimizer) and run.copies.own_part(tensor_of(variables[0]))):
        if checks_gradients or run.may_update(map(tensor_of, variables)):
            original(gradients, variables, learning_rate)
    else:
        with run.split_update(map(tensor_of, variables), checked=checks_gradients) as may_update:
            if may_update:
                with _parts(optimizer, gradients, variables, run.copies) as (own_gradients, own_variables):
                    if own_variables:
                        original(own_gradients, own_variables, learning_rate)


def _is_elementwise(optimizer: Any) -> bool:
    return type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("keras.")


@contextlib.contextmanager
def _parts(
    optimizer: Any, gradients: Sequence[torch.Tensor], variables: Sequence[Any], copies: Any
) -> Iterator[tuple[list[torch.Tensor], list[Any]]]:
    """The gradients and variables of this replica's part, of which each is a flat vector meanwhile."""
    whole: list[tuple[Any, torch.Tensor, Any]] = []
    own_gradients, own_variables = [], []
    kept = _kept_by_variable(optimizer)
    try:
        for gradient, variable in zip(gradients, variables, strict=True):
            first, last = copies.own_part(tensor_of(variable))
            if first == last:
                continue
            for each in (variable, *kept.get(id(variable), ())):
                whole.append((each, each._value, each._shape))
                each._value = copies.shared_part(each._value, first, last)
                each._shape = (last - first,)
            own_gradients.append(gradient.contiguous().view(-1)[first:last])
            own_variables.append(variable)
        yield own_gradients, own_variables
    finally:
        for each, value, shape in whole:
            each._value, each._shape = value, shape


def _kept_by_variable(optimizer: Any) -> dict[int, list[Any]]:
    """What an optimizer keeps for each variable: it has lists as long as that of the variables."""
    variables = optimizer._trainable_variables
    kept: dict[int, list[Any]] = {id(variable): [] for variable in variables}
    seen = {id(variable) for variable in variables}
    for value in optimizer.__dict__.values():
        if isinstance(value, list) and len(value) == len(variables):
            for variable, each in zip(variables, value, strict=True):
                if isinstance(each, keras.Variable) and id(each) not in seen and each.shape == variable.shape:
                    kept[id(variable)].append(each)
                    seen.add(id(each))
    return kept
