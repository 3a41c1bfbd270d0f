"""A backend that a vendor might bring: devices of type `acme`, for torch, and a group of torch.distributed for them.

Importing it takes torch's private slot, as packages of vendors do. Its devices compute with the kernels of strict
devices, and stratagem is not told that: it learns of them through torch alone.
"""

import sys
from datetime import timedelta
from typing import Any

import torch.distributed

from stratagem.collectives.strict_group import StrictGroup
from stratagem.devices.strict import backend, device_memory, device_module
from stratagem.devices.strict.slot import HELD

TYPE = "acme"


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    group: Any = torch.distributed.ProcessGroupGloo
    return StrictGroup(group(store, rank, size, timeout), rank, size)


HELD.torch_type = TYPE
device_module.module.cache_clear()
backend.register()
device_memory.set_rooms(2, 2**31)
device_module.module().__name__ = __name__  # where other processes find it
sys.modules[f"torch.{TYPE}"] = device_module.module()
torch.distributed.Backend.register_backend("acmeccl", _group, devices=[TYPE])
