"""Intel's GPUs: `torch.xpu`, XCCL.

Torch has XCCL in builds with oneCCL.
"""

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from stratagem import _torch
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.device import DeviceDetails
from stratagem.devices.process_groups import GroupBackend

_c10d: Final[Any] = torch.distributed  # whose stubs do not know the groups as they are in this release


def is_built() -> bool:
    """Whether this torch can see such GPUs."""
    return bool(torch.version.xpu)


def accelerator(kind: str) -> TorchAccelerator:
    """Those of this machine."""
    return TorchAccelerator(kind, "xpu", torch.xpu, describe=_described)


def _described(properties: Any) -> DeviceDetails:
    return DeviceDetails(str(properties.name), int(properties.total_memory), int(properties.gpu_subslice_count))


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    group = _c10d.ProcessGroupXCCL
    options = _torch.collective_groups.group_options(group, timeout)
    return group(_c10d.PrefixStore(XCCL.name, store), rank, size, options)


XCCL: Final = GroupBackend("xccl", torch.distributed.is_xccl_available, _connect)
