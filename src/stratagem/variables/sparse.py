"""Sparse gradients: each replica has the rows that it used, and the sum has the rows of all."""

from collections.abc import Callable

import torch

from stratagem import _torch
from stratagem.collectives import collective as dense
from stratagem.collectives.collective import Collective


def all_reduce(
    collective: Collective, gradient: torch.Tensor | None, travels_as: Callable[[torch.dtype], torch.dtype]
) -> torch.Tensor:
    """The sum of the sparse gradients of all replicas, some of which may have none.

    Args:
        collective: How they exchange tensors.
        gradient: This replica's; `None` if it has none.
        travels_as: The type as which values of a type travel.
    """
    parts = collective.all_gather(torch.tensor(_form(gradient), dtype=torch.int64))
    forms = [tuple(part.tolist()) for part in parts if part.numel()]
    shape, num_axes, kind = forms[0][2:], forms[0][1], _DTYPES[forms[0][0]]
    if gradient is None or not gradient.is_sparse:
        nothing = torch.empty((num_axes, 0), dtype=torch.int64), torch.empty((0, *shape[num_axes:]), dtype=kind)
        gradient = _sparse(*nothing, shape)
    own = gradient.detach().coalesce()
    indices = collective.all_gather(own.indices().contiguous())
    values = collective.all_gather(own.values().to(travels_as(kind)).contiguous())
    return _sparse(torch.cat(indices, dim=1), torch.cat(values).to(kind), shape).coalesce()


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether all numbers of a gradient are, sparse or not."""
    return dense.is_finite(_torch.tensors.sparse_values(gradient) if gradient.is_sparse else gradient)


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def _form(gradient: torch.Tensor | None) -> list[int]:
    if gradient is None or not gradient.is_sparse:
        return []
    return [_DTYPES.index(gradient.dtype), gradient.sparse_dim(), *gradient.shape]


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
