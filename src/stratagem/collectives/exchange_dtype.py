"""The type as which gradients travel between replicas: the one place where it is decided (`exchange_dtype=`).

Only float32 travels as another type. What is as narrow already stays as it is, and so does what somebody has made
wider on purpose (float64), or what has no narrow type (complex numbers, whole numbers).
"""

from typing import Any, Final

import torch

from stratagem.errors import StrategyError

BF16: Final = "bf16"


def read_exchange_dtype(value: Any) -> torch.dtype | None:
    """What a strategy was given as its `exchange_dtype`.

    Raises:
        StrategyError: It is none.
    """
    if value is None or value is torch.bfloat16:
        return value
    if isinstance(value, str) and value in (BF16, "bfloat16"):
        return torch.bfloat16
    if value is torch.float16 or (isinstance(value, str) and value in ("fp16", "float16", "half")):
        raise StrategyError(
            f"exchange_dtype is 'bf16' (torch.bfloat16) or None, got {value!r}: in float16 gradients below 6e-8 become "
            f"zero and those above 65504 infinite; use 'bf16', which has the range of float32"
        )
    raise StrategyError(
        f"exchange_dtype is 'bf16' (torch.bfloat16), or None if gradients travel in their own type, got {value!r}"
    )


def travels_as(dtype: torch.dtype, exchange_dtype: torch.dtype | None) -> torch.dtype:
    """The type as which gradients of a type travel."""
    return exchange_dtype if exchange_dtype is not None and dtype is torch.float32 else dtype
