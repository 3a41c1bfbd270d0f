"""What is special about some operations of torch when they are recorded: names, in-place forms, memory without values.

Tables and look-ups only; `recorder` acts on them.
"""

import functools
from collections.abc import Iterator
from typing import Any, Final

import torch

from stratagem import _torch, _tree
from stratagem.placement.names import type_of

_aten: Final = torch.ops.aten

SAME: Final = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
NEEDS_VALUES: Final = {
    _aten._local_scalar_dense.default: "a Python number or an `if`",
    _aten.equal.default: "torch.equal",
    _aten.is_nonzero.default: "an `if`",
}
BATCH_NORM: Final = {_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default}
DEFINITE: Final = {  # memory as it happens to be is no value of a graph
    _aten.empty_like.default: _aten.zeros_like.default,
    _aten.new_empty.default: _aten.new_zeros.default,
}
FUNCTIONAL: Final = {  # where the names differ by more than the underscore
    _aten.bernoulli_.float: _aten.bernoulli.p,
    _aten.normal_.default: _aten.normal_functional.default,
}
TYPES: Final = {
    "native_batch_norm": "FusedBatchNorm",
    "_native_batch_norm_legit_functional": "FusedBatchNorm",
    "native_batch_norm_backward": "FusedBatchNormGrad",
    "convolution": "Conv",
    "convolution_backward": "ConvBackprop",
    "select": "StridedSlice",
    "slice": "StridedSlice",
    "t": "Transpose",
    "permute": "Transpose",
    "_to_copy": "Cast",
    "_unsafe_view": "Reshape",
    "copy": "Identity",
}


def type_name(function: Any) -> str:
    """What an operation computes, in TensorFlow's words."""
    name = _torch.operations.schema_of(function).name.partition("::")[2]
    return TYPES.get(name) or type_of(name)


def put_back(function: Any, args: tuple[Any, ...], whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is after a part of it was changed.

    Args:
        function: What has made the part.
        args: Its arguments after the tensor.
        whole: The tensor.
        part: The new part.

    Returns:
        The new tensor; None if that cannot be said of this function.
    """
    match _torch.operations.schema_of(function).name.partition("::")[2]:
        case "t":
            return part.t()
        case "transpose":
            return part.transpose(*args)
        case "permute":
            order = [each % part.dim() for each in args[0]]
            return part.permute([order.index(each) for each in range(part.dim())])
        case "view" | "_unsafe_view" | "unsqueeze" | "squeeze":
            return part.reshape(whole.shape)
        case "select":
            return torch.select_scatter(whole, part, *args)
        case "slice":
            return torch.slice_scatter(whole, part, *args)
    return None


def defaults_after(function: Any, num_given: int) -> list[Any]:
    """What an operation takes for the arguments without names that a call leaves out."""
    arguments = _torch.operations.schema_of(function).arguments
    return [each.default_value for each in arguments[num_given:] if not each.kwarg_only]


def written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call writes into."""
    for index, argument in enumerate(_torch.operations.schema_of(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (each for each in _tree.leaves(given) if isinstance(each, torch.Tensor))


@functools.cache
def functional(function: Any) -> Any:
    """The operation that computes what an in-place one writes into its first argument; None if there is none."""
    schema = _torch.operations.schema_of(function)
    written = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    namespace, _, name = schema.name.partition("::")
    if function in FUNCTIONAL:
        return FUNCTIONAL[function]
    if namespace != "aten" or not name.endswith("_") or written != [True] + [False] * (len(written) - 1):
        return None
    return getattr(getattr(_aten, name.removesuffix("_"), None), _torch.operations.overload_of(function), None)
