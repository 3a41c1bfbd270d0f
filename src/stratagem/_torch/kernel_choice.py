"""By which kernels torch computes, and how exactly, in the whole process."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.backends.mha

_any_torch: Final[Any] = torch  # whose annotations leave some of these out

if torch.__version__.startswith("2.9."):  # which warns, once, of the setting that it has itself by default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """A block in which torch does not take operations of oneDNN; `torch.backends.mkldnn.flags` sets more than that."""
    before = _any_torch._C._get_mkldnn_enabled()
    _any_torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _any_torch._C._set_mkldnn_enabled(before)


_PRODUCTS: Final = [(backend, each) for backend in ("cuda", "mkldnn") for each in ("matmul", "conv", "rnn")]


def precision_of_products() -> tuple[str | None, ...]:
    """By `torch.set_float32_matmul_precision`, and by each `fp32_precision` of `torch.backends`."""
    own = tuple([_any_torch._C._get_fp32_precision_getter(*each) for each in _PRODUCTS])
    return _word_for(own), *own


@functools.lru_cache(maxsize=4)
def _word_for(_: tuple[str, ...]) -> str | None:
    """The word of `torch.set_float32_matmul_precision`, asked for when one of the others has changed."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set one of the others, which torch does not say in the words of this one
        return None


def set_precision_of_products(those: tuple[str | None, ...]) -> None:
    """What `precision_of_products` gave."""
    of_all, *others = those
    if of_all is not None:
        torch.set_float32_matmul_precision(of_all)
    for each, precision in zip(_PRODUCTS, others, strict=True):
        if _any_torch._C._get_fp32_precision_getter(*each) != precision:
            _any_torch._C._set_fp32_precision_setter(*each, precision)


def _set(function: Callable[..., object], value: Any) -> None:
    function(*value) if isinstance(value, tuple) else function(value)


def _choices(*names: str) -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How each of some choices is read and made, of those that this torch has."""
    for name in names:
        if (read := getattr(_any_torch._C, f"_get_{name}", None)) is not None:
            yield read, functools.partial(_set, getattr(_any_torch._C, f"_set_{name}"))


_KERNELS: Final = (
    *_choices(
        *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled", "mkldnn_deterministic"),
        *("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
        *("cublas_allow_fp16_accumulation", "math_sdp_allow_fp16_bf16_reduction"),
        *("deterministic_fill_uninitialized_memory", "qengine"),
    ),
    (_any_torch._C._check_sparse_tensor_invariants, _any_torch._C._set_check_sparse_tensor_invariants),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


def choice_of_kernels() -> tuple[Any, ...]:
    """By `torch.backends.cudnn.benchmark`, `torch.backends.cuda.enable_flash_sdp` and the like."""
    return tuple([read() for read, _ in _KERNELS])


def set_choice_of_kernels(choice: tuple[Any, ...]) -> None:
    """What `choice_of_kernels` gave."""
    for (read, choose), chosen in zip(_KERNELS, choice, strict=True):
        if read() != chosen:
            choose(chosen)
