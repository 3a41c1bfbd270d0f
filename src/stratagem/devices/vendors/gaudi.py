"""Intel's Gaudi: `torch.hpu`, HCCL.

`habana_frameworks` brings both.
"""

from typing import Any, Final

import torch

from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.process_groups import registered

_torch_modules: Final[Any] = torch

HCCL: Final = registered("hccl")


def is_built() -> bool:
    """Whether this program has loaded what lets torch see them."""
    return hasattr(torch, "hpu")


def accelerator(kind: str) -> TorchAccelerator:
    """Those of this machine; none as long as the program has not loaded their package."""
    module = _torch_modules.hpu if is_built() else None
    return TorchAccelerator(kind, "hpu", module, limit_call=None)
