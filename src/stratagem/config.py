"""Lists, chooses, divides and limits the devices of this process: `sg.config`.

The functions have TensorFlow's names and meanings. Each speaks to the inventory of this process
(`devices.inventory`); nothing is kept here. A configuration can be changed until devices are in use.
"""

from collections.abc import Sequence
from typing import Any

from stratagem import _tensorflow_names
from stratagem.devices import serving
from stratagem.devices.device import (
    DeviceDetails,
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
)
from stratagem.devices.inventory import this_process
from stratagem.devices.lookup import DeviceLike
from stratagem.placement import log, residence, resolution

__all__ = [
    "LogicalDeviceConfiguration",
    "VirtualDeviceConfiguration",
    "get_device_details",
    "get_log_device_placement",
    "get_logical_device_configuration",
    "get_memory_growth",
    "get_memory_info",
    "get_soft_device_placement",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "reset_memory_stats",
    "set_log_device_placement",
    "set_logical_device_configuration",
    "set_memory_growth",
    "set_soft_device_placement",
    "set_visible_devices",
    "simulate_devices",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    return _tensorflow_names.of_module("config", name, __all__)


VirtualDeviceConfiguration = LogicalDeviceConfiguration
"""TensorFlow's older name for the same."""


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns every device of this machine that this process may use. It takes no memory on any of them.

    Args:
        device_type: Only this kind: `CPU`, `GPU` (CUDA or ROCm), `TPU`, `XPU`, `HPU`, `MPS`, or that of a backend
            which a package has given torch, by torch's name for it.
    Example:
        >>> list_physical_devices("CPU")
        [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return this_process().physical(device_type)


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Returns the devices that programs address: the shares of all visible physical devices.

    Example:
        >>> [device.name for device in list_logical_devices("CPU")]
        ['/device:CPU:0']
    """
    return this_process().logical(device_type)


def get_device_details(device: DeviceLike) -> DeviceDetails:
    """Returns the model, memory, cores and compute capability of a physical device."""
    return this_process().details(device)


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the visible physical devices: those that become logical devices."""
    return this_process().visible(device_type)


def set_visible_devices(devices: DeviceLike | Sequence[DeviceLike], device_type: str | None = None) -> None:
    """Hides all devices but these. The visible ones are numbered from 0 in this order.

    Args:
        devices: Physical devices or their names; an empty list hides a whole kind.
        device_type: Changes only this kind. Without it, accelerators of every kind are hidden
            unless they are listed. The CPU always stays.
    Raises:
        DeviceConfigurationError: A device is listed twice, is of another kind, or none is listed.
        DevicesInUseError: A strategy or a session uses devices already.
    """
    this_process().set_visible(devices, device_type)


def set_logical_device_configuration(device: DeviceLike, logical_devices: Sequence[LogicalDeviceConfiguration]) -> None:
    """Divides a physical device into logical devices. It replaces an earlier division.

    Args:
        device: A physical device or its name.
        logical_devices: One entry for each share.
    Raises:
        DeviceConfigurationError: The shares ask for more than the device has.
        DevicesInUseError: A strategy or a session uses devices already, and the division is another one.
    Example:
        >>> half = LogicalDeviceConfiguration(memory_limit=512)
        >>> set_logical_device_configuration("cpu:0", [half, half])
        >>> [device.name for device in list_logical_devices("CPU")]
        ['/device:CPU:0', '/device:CPU:1']
    """
    this_process().configure(device, logical_devices)


def get_logical_device_configuration(device: DeviceLike) -> list[LogicalDeviceConfiguration] | None:
    """Returns the shares into which a physical device is divided; `None` if it is not divided."""
    return this_process().configuration(device)


def set_memory_growth(device: DeviceLike, enable: bool) -> None:
    """Takes a GPU's memory when it is needed (the default), or all of it at the start.

    With a limit, memory grows up to the limit. Without growth, a process takes the memory of a real GPU
    when it begins to serve it; the memory of a simulated GPU must be free at that moment, but is not taken.

    Args:
        device: The GPU; a kind without a number, `GPU`, means all of its devices.
        enable: Whether memory is taken when it is needed.
    """
    this_process().set_growth(device, enable)


def get_memory_growth(device: DeviceLike) -> bool:
    """Returns whether a GPU's memory is taken when it is needed."""
    return this_process().growth(device)


def get_memory_info(device: DeviceLike) -> dict[str, int]:
    """Returns how many bytes this process holds on a logical device: `current`, and the largest number so far, `peak`.

    On a real GPU it counts the tensors on all of its shares together. On a share of the CPU or a simulated GPU it
    counts the memory that the process took since it began to serve the device, or the tensors that `sg.device`
    placed there; without either it is 0.

    Example:
        >>> sorted(get_memory_info("cpu:0"))
        ['current', 'peak']
    """
    placed = residence.memory_info(this_process().resolve(device))
    return serving.memory_info(device, this_process()) if placed is None else placed


def reset_memory_stats(device: DeviceLike) -> None:
    """Resets the peak of `get_memory_info` to what is held now."""
    residence.reset_peak(this_process().resolve(device))
    serving.reset_memory_stats(device, this_process())


def set_soft_device_placement(enabled: bool) -> None:
    """Switches soft placement on or off: an operation runs elsewhere if its device does not exist or has no kernel.

    It is off by default, as in a session of TensorFlow: such an operation is an error that says which devices exist.
    When it is on, each fallback to the nearest device gives one warning.
    """
    resolution.set_soft(enabled)


def get_soft_device_placement() -> bool:
    """Returns whether soft placement is on."""
    return resolution.is_soft()


def set_log_device_placement(enabled: bool) -> None:
    """Prints a line such as `MatMul_1: /job:localhost/replica:0/task:0/device:GPU:2` for each operation, or stops that.

    It concerns the operations of the thread that calls it. `sg.log_placement` gives the same as data.
    """
    log.set_printing(enabled)


def get_log_device_placement() -> bool:
    """Returns whether a line is printed for each operation."""
    return log.is_printing()


def simulate_devices(
    device_type: str, count: int, memory_limit: float | None = None, *, strict: bool = False
) -> list[PhysicalDevice]:
    """Makes devices for a machine without any: shares of the CPU that behave like real devices.

    They replace all devices of that kind, so that a program finds the same devices on
    every machine. `STRATAGEM_SIMULATE=gpu:4` does the same from outside, `gpu:4:strict` makes strict ones.

    Strict devices are real devices to torch: a tensor is on `gpu:0` and not on `cpu`, an operation on tensors of two
    devices is an error, and a program must copy tensors itself. They find what a GPU would refuse, but they are slow
    (docs/accelerators.md). A process that once had strict devices keeps torch's only private slot for them.

    Args:
        device_type: The kind to simulate, such as `GPU`.
        count: The number of devices.
        memory_limit: The memory of each device, in MiB; by default an even share of the machine's memory.
        strict: Whether they are real devices to torch; GPUs and TPUs can be strict, one kind in a process.
    Raises:
        DeviceConfigurationError: Together they have more memory than the machine, this kind cannot be
            strict, or another backend has torch's private slot.
        DevicesInUseError: A strategy or a session uses devices already.
    Example:
        >>> simulate_devices("GPU", 2, memory_limit=256)[1]
        PhysicalDevice(name='/physical_device:GPU:1', device_type='GPU', simulated=True)
    """
    return this_process().simulate(device_type, count, memory_limit, strict=strict)
