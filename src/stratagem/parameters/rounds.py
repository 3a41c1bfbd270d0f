"""The one update that a step of several workers makes: the mean of their gradients over all examples."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from stratagem.errors import ParameterError
from stratagem.parameters.protocol import Rows

Key = TypeVar("Key")
Gradient = TypeVar("Gradient", bound=torch.Tensor | Rows)


def mean_of(given: Sequence[tuple[Mapping[Key, Gradient], int]]) -> dict[Key, Gradient]:
    """The mean gradient of each variable; one that only some used has none from the others.

    Args:
        given: The gradients of each worker and how many examples it had, in the order of workers and not of arrival:
            two runs must agree.
    Raises:
        ParameterError: Of one variable came a whole gradient and rows.
    """
    total = sum(weight for _, weight in given) or 1
    names = dict.fromkeys(name for gradients, _ in given for name in gradients)
    return {
        name: _sum([(gradients[name], weight / total) for gradients, weight in given if name in gradients])
        for name in names
    }


def _sum(parts: Sequence[tuple[Any, float]]) -> Any:
    first: torch.Tensor | Rows = parts[0][0]
    rows = [(value, weight) for value, weight in parts if isinstance(value, Rows)]
    if rows and len(rows) < len(parts):
        raise ParameterError("a dense gradient and a sparse one (rows) came for the same variable")
    if not isinstance(first, Rows):
        total = first * parts[0][1]
        for value, weight in parts[1:]:
            total.add_(value, alpha=weight)
        return total
    indices, places = torch.unique(torch.cat([value.indices for value, _ in rows]), return_inverse=True)
    summed = first.values.new_zeros((len(indices), *first.values.shape[1:]))
    summed.index_add_(0, places, torch.cat([value.values * weight for value, weight in rows]))
    return Rows(indices, summed)
