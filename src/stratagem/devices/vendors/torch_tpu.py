"""Google's TPUs: `torch.tpu`, which `torch_tpu` puts into torch's private slot, and the group that it registers.

A TPU belongs to one process, torch does not limit its memory, and its runtime orders the work without streams.
"""

from typing import Any, Final

import torch

from stratagem import _torch
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.process_groups import registered

_torch_modules: Final[Any] = torch

TPU_DIST: Final = registered("tpu_dist")


def is_built() -> bool:
    """Whether this program has loaded what lets torch see them."""
    return _torch.private_slot.holder() == "tpu" and hasattr(torch, "tpu")


def accelerator(kind: str) -> TorchAccelerator:
    """Those of this machine; none as long as the program has not loaded their package."""
    module = _torch_modules.tpu if is_built() else None
    return TorchAccelerator(kind, "tpu", module, limit_call=None)
