"""Attributes and views of tensors, and operations on lists of them."""

import operator
from collections.abc import Callable
from typing import Any, Final

import torch

_any_torch: Final[Any] = torch  # whose annotations leave some of these out

requires_grad_of: Final[Callable[[Any], bool]] = operator.attrgetter("requires_grad")

gradient_of: Final[Callable[[Any], Any]] = operator.attrgetter("grad")

version_of: Final[Callable[[Any], int]] = operator.attrgetter("_version")
"""How often a tensor was written to, by autograd's count; not of inference tensors, and not through `.data`."""

data_of: Final[Callable[[Any], torch.Tensor]] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
"""`tensor.data`, and how it is set, for the library: `DataReads` does not note it."""

set_data: Final[Callable[[Any, torch.Tensor], None]] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]

numpy_of: Final[Callable[[Any], Any]] = torch._C.TensorBase.numpy
"""`tensor.numpy()`, for the library: likewise."""

base_of: Final[Callable[[Any], torch.Tensor | None]] = operator.attrgetter("_base")
"""The tensor that a view is of; autograd keeps it."""

is_view: Final[Callable[[torch.Tensor], bool]] = torch.Tensor._is_view
"""Whether autograd knows a tensor as a view of another."""

sparse_values: Final[Callable[[torch.Tensor], torch.Tensor]] = _any_torch.Tensor._values
"""The values of a sparse COO tensor, coalesced or not; `values()` refuses the latter."""

wrapper_subclass: Final = _any_torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a form and no memory."""

foreach_copy_: Final = torch._foreach_copy_
"""Writes a list of tensors into another in one call; as its fellows, what torch's optimizers are made of."""

foreach_lerp_: Final = torch._foreach_lerp_

foreach_zero_: Final = torch._foreach_zero_


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is marked as the negative of what lies in its memory."""
    found: torch.Tensor = _any_torch._neg_view(tensor)
    return found
