"""The mean gradient of towers: for programs that place copies of a model on devices by hand."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stratagem.errors import StrategyError


def average_gradients(
    tower_grads: Iterable[Iterable[tuple[torch.Tensor | None, torch.Tensor]]],
) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
    """Returns the mean gradient of each variable that several towers share, as in TensorFlow's multi-tower examples.

    A strategy does this by itself; this function is for programs that place towers on devices by hand.

    Args:
        tower_grads: For each tower a list of pairs of gradient and variable, in the same order.
    Returns:
        A pair of mean gradient and variable for each variable; the gradient is on the device of the first tower. It is
        `None` if no tower has one.
    Raises:
        StrategyError: Towers have different variables, or a gradient that others do not have.
    Example:
        >>> weight = torch.zeros(2)
        >>> average_gradients([[(torch.ones(2), weight)], [(torch.full((2,), 3.0), weight)]])
        [(tensor([2., 2.]), tensor([0., 0.]))]
    """
    try:
        towers = [list(tower) for tower in tower_grads]
    except TypeError:
        raise StrategyError(
            f"average_gradients takes a list of towers, each a list of pairs of gradient and variable, got "
            f"{type(tower_grads).__name__} {tower_grads!r}"
        ) from None
    if not towers:
        raise StrategyError("average_gradients needs the gradients of one tower or more, got an empty list")
    for number, tower in enumerate(towers):
        if wrong := [each for each in tower if not isinstance(each, tuple | list) or len(each) != 2]:
            kind = type(wrong[0]).__name__
            raise StrategyError(f"a tower has pairs of gradient and variable, tower {number} has a {kind}")
        if len(tower) != len(towers[0]):
            lengths = f"tower 0 has {len(towers[0])} and tower {number} has {len(tower)}"
            raise StrategyError(f"towers have the same variables, but {lengths}")
    return [_mean_gradient(index, pairs) for index, pairs in enumerate(zip(*towers, strict=True))]


def _mean_gradient(index: int, pairs: Sequence[tuple[Any, torch.Tensor]]) -> tuple[torch.Tensor | None, torch.Tensor]:
    variable, gradients = pairs[0][1], [gradient for gradient, _ in pairs]
    what = f"variable {index} of shape {tuple(variable.shape)}"
    for number, (gradient, other) in enumerate(pairs):
        if other is not variable:
            raise StrategyError(
                f"towers share their variables, but {what} of tower 0 is another one in tower {number}, of shape "
                f"{tuple(other.shape)}; give all towers the same variables in the same order"
            )
        if (gradient is None) != (gradients[0] is None):
            having = [each for each, (found, _) in enumerate(pairs) if found is not None]
            raise StrategyError(
                f"{what} has a gradient in tower(s) {', '.join(map(str, having))} of {len(pairs)} only; let every "
                f"tower use it, or give zeros where it is not used"
            )
        if gradient is not None and gradient.shape != variable.shape:
            raise StrategyError(f"the gradient of {what} has shape {tuple(gradient.shape)} in tower {number}")
    if gradients[0] is None:
        return None, variable
    here = [gradient.to(gradients[0].device) for gradient in gradients]
    return functools.reduce(torch.add, here) / len(here), variable
