"""Sorts torch's functions by what they mean for placement: which make tensors, change them, view them, or only look.

Pure: from a function to its `FunctionKind`, remembered. What is done about each kind is `eager`'s.
"""

import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stratagem.devices import kind_table


class FunctionKind(enum.Enum):
    """What a function does, as far as devices are concerned."""

    BLOCK = enum.auto()
    """Begins or ends a block that torch's profiler names, such as the step of an optimizer."""
    LOOK = enum.auto()
    """Reads or sets something about a tensor; computes nothing on its device."""
    READ_GRADIENT = enum.auto()
    """`tensor.grad`: with the tensor, wherever backward has run."""
    MAKE = enum.auto()
    """Makes a tensor of numbers; takes `device=`."""
    MAKE_ON_HOST = enum.auto()
    """Makes a tensor of memory that the host has."""
    MAKE_LIKE = enum.auto()
    """Makes a tensor in the form of another one."""
    COMPUTE = enum.auto()
    """Makes new tensors of others."""
    VIEW = enum.auto()
    """Shows the same memory in another form."""
    CHANGE = enum.auto()
    """Changes its first tensor in place."""
    OVERWRITE = enum.auto()
    """`copy_`: copies between any two devices by itself."""
    EACH = enum.auto()
    """Works on the tensors of lists one by one."""
    CAST = enum.auto()
    """`to`: another type, another device or both."""
    TO_HOST = enum.auto()
    """`cpu`: a copy in the memory of the host."""
    TO_ACCELERATOR = enum.auto()
    """`cuda` and its like: a copy on a device that torch names."""
    BACKWARD = enum.auto()
    GRADIENTS = enum.auto()
    """`torch.autograd.grad`: each result is with its tensor."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOOKS = _words("""
    __array__ __bool__ __complex__ __dlpack__ __dlpack_device__ __float__ __format__ __hash__ __index__ __int__
    __len__ __long__ __nonzero__ __reduce_ex__ __repr__ __setstate__ __set__ __delete__ _is_view _nnz _dimI _dimV
    _clear_non_serializable_cached_data _has_compatible_shallow_copy_type _parse_to _set_grad_enabled
    const_data_ptr data_ptr dense_dim dim dim_order element_size get_device item ndimension nelement numel numpy
    pin_memory qscheme record_stream register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
    set_ share_memory_ size sparse_dim storage storage_offset storage_type stride sym_float sym_int sym_ite sym_max
    sym_min sym_not sym_sum tolist untyped_storage autocast module_load
    as_strided_ detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_
""")
_VIEWS = _words("""
    __deepcopy__ __getitem__ adjoint alias as_strided broadcast_tensors broadcast_to chunk conj detach diagonal dsplit
    expand expand_as flatten hsplit imag meshgrid moveaxis movedim narrow permute ravel real reshape reshape_as select
    split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view
    view_as view_as_complex view_as_real vsplit
""")
_MAKERS = _words("""
    arange bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye fftfreq full
    hamming_window hann_window kaiser_window linspace logspace normal nested_tensor ones rand randint randn randperm
    range rfftfreq scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
    sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices vander zeros
""")
_HOST_MAKERS = frozenset(("as_tensor", "asarray", "from_numpy", "from_file", "frombuffer", "from_dlpack"))
_KNOWN: dict[Any, FunctionKind] = {
    torch.Tensor.grad.__get__: FunctionKind.READ_GRADIENT,  # type: ignore[union-attr]
    torch.autograd.grad: FunctionKind.GRADIENTS,
    inspect.unwrap(torch.Tensor.to): FunctionKind.CAST,  # strict devices put a function of theirs around it
    torch.Tensor.cpu: FunctionKind.TO_HOST,
    torch.Tensor.copy_: FunctionKind.OVERWRITE,
    torch.nn.functional.unfold: FunctionKind.COMPUTE,  # another one than Tensor.unfold
}


def kind_of(function: Callable[..., Any]) -> FunctionKind:
    """The kind of one of torch's functions."""
    kind = _KNOWN.get(function)
    if kind is None:
        kind = _KNOWN[function] = _sort(function)
    return kind


def changed_quietly(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    """The running statistics that a normalization changes among its arguments, without torch's counting it."""
    where = _STATISTICS.get(function)
    if where is None:
        return ()
    return (*args[where], kwargs.get("running_mean"), kwargs.get("running_var"))


_STATISTICS: dict[Any, slice] = {
    torch.nn.functional.batch_norm: slice(1, 3),
    torch.nn.functional.instance_norm: slice(1, 3),
    torch.batch_norm: slice(3, 5),
    torch.instance_norm: slice(3, 5),
}


def _sort(function: Callable[..., Any]) -> FunctionKind:
    name = getattr(function, "__name__", "")
    if name.startswith("_record_function"):
        return FunctionKind.BLOCK
    if name == "backward":
        return FunctionKind.BACKWARD  # as strategies wrap it, whichever came first
    if isinstance(function, type) or name == "__get__" or name in _LOOKS or name.startswith(("is_", "sym_")):
        return FunctionKind.LOOK
    if name.startswith(("_foreach_", "_fused_")):
        return FunctionKind.EACH
    if name in kind_table.tensor_methods() and getattr(torch.Tensor, name, None) == function:
        return FunctionKind.TO_ACCELERATOR
    if name in _VIEWS:
        return FunctionKind.VIEW
    if name in _HOST_MAKERS:
        return FunctionKind.MAKE_ON_HOST
    if name in _MAKERS:
        return FunctionKind.MAKE
    if name.endswith("_like") or name.startswith("new_"):
        return FunctionKind.MAKE_LIKE
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or _is_in_place_operator(name):
        return FunctionKind.CHANGE
    return FunctionKind.COMPUTE


def _is_in_place_operator(name: str) -> bool:
    return name.startswith("__i") and name.endswith("__") and f"__{name[3:]}" in dir(torch.Tensor)
