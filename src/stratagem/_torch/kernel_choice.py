"""By which kernels torch computes, and how exactly, in the whole process."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch

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
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set one of the others, which torch does not say in the words of this one
        of_all = None
    return of_all, *[_any_torch._C._get_fp32_precision_getter(*each) for each in _PRODUCTS]


def set_precision_of_products(those: tuple[str | None, ...]) -> None:
    """What `precision_of_products` gave."""
    of_all, *others = those
    if of_all is not None:
        torch.set_float32_matmul_precision(of_all)
    for each, precision in zip(_PRODUCTS, others, strict=True):
        if _any_torch._C._get_fp32_precision_getter(*each) != precision:
            _any_torch._C._set_fp32_precision_setter(*each, precision)


_KERNELS: Final = (  # how each choice is read and made
    *[
        (getattr(_any_torch._C, f"_get_{name}"), getattr(_any_torch._C, f"_set_{name}"))
        for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled")
    ],
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


def choice_of_kernels() -> tuple[bool, ...]:
    """By `torch.backends.cudnn.benchmark`, `torch.backends.cuda.enable_flash_sdp` and the like."""
    return tuple([read() for read, _ in _KERNELS])


def set_choice_of_kernels(choice: tuple[bool, ...]) -> None:
    """What `choice_of_kernels` gave."""
    for (_, choose), chosen in zip(_KERNELS, choice, strict=True):
        choose(chosen)
