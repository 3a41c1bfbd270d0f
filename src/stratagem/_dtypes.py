"""The types of tensors that travel between tasks, and their names there: the one table.

All that goes over a network uses it, so that a type either travels everywhere or nowhere. Packed and quantized types
are not in it: their bytes mean nothing without more than a name. What a type is used for is left to others.
"""

from typing import Final

import torch

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
}
CODES: Final = tuple(DTYPES.values())
"""The same in a fixed order, where a number stands for a type."""


def name_of(dtype: torch.dtype) -> str:
    """What a type is called, whether it travels or not."""
    return str(dtype).removeprefix("torch.")


def is_updated_by_optimizers(dtype: torch.dtype) -> bool:
    """Whether torch's optimizers can update such a variable: whole numbers and float8 cannot take a small step."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def why_not_sent(dtype: torch.dtype) -> str:
    """Why a tensor cannot be sent; empty if it can."""
    if name_of(dtype) in DTYPES:
        return ""
    return f"a tensor of type {name_of(dtype)} cannot travel to another task; types that can: {', '.join(DTYPES)}"
