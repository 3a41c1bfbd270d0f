"""Autocast on strict devices: which operations take the lower precision, and which take float32.

Torch has these rules for each accelerator in C++, and none for its private slot. They are those of CUDA for the
operations that training uses.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from stratagem import _torch
from stratagem.devices.strict.slot import HELD

AUTOCAST_KEY: Final = "AutocastPrivateUse1"

_LOWER: Final = [
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
]

_FULL: Final = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "prod",
    "prod.dim_int",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "upsample_nearest2d",
    "upsample_bilinear2d",
]

_WIDEST: Final = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
    "cat",
    "stack",
    "vdot",
]


def kernels() -> dict[str, Callable[..., Any]]:
    """What autocast does with each operation that it changes."""
    found: dict[str, Callable[..., Any]] = {}
    for names, cast in ((_LOWER, _lower), (_FULL, _full), (_WIDEST, _widest)):
        for name in names:
            operation = _torch.operations.operation_named(f"aten::{name}")
            if operation is not None:
                found[name] = _casting(operation, cast)
    return found


def _casting(operation: Any, cast: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _torch.operations.below_autocast(AUTOCAST_KEY):
            dtype = cast(list(_castable((*args, *kwargs.values()))))
            return operation(*_cast(args, dtype), **{key: _cast(value, dtype) for key, value in kwargs.items()})

    return kernel


def _lower(_: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(HELD.torch_type)


def _full(_: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    wide = any(each.dtype == torch.float32 for each in tensors)
    return torch.float32 if wide or not tensors else tensors[0].dtype


def _castable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dtype != torch.float64 and value.device.type == HELD.torch_type:
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _castable(each)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if any(True for _ in _castable(value)) else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, dtype) for each in value)
    return value
