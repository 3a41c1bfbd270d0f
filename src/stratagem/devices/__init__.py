"""What hardware there is and how it is divided.

- `spec`: device names, every spelling of them
- `device`: the values that describe physical and logical devices
- `host`, `accelerators`: read the machine, ask torch
- `masks`, `simulated`, `division`: `CUDA_VISIBLE_DEVICES`, devices that do not exist, shares
- `inventory`: the configuration of this process; `lookup`: a device by its name
- `serving`, `memory`: cores, threads and memory limits made real
- `absence`, `survey`: why a device is missing, and the report of all
"""

from stratagem.devices.device import (
    DeviceDetails,
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
)
from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.inventory import Inventory, this_process
from stratagem.devices.memory import OutOfMemoryError
from stratagem.devices.serving import serve
from stratagem.devices.survey import survey

__all__ = [
    "DeviceDetails",
    "DeviceSpec",
    "Inventory",
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "OutOfMemoryError",
    "PhysicalDevice",
    "serve",
    "survey",
    "this_process",
]
