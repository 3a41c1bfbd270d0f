"""What hardware there is and how it is divided."""

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
