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
    if not name.startswith("__") and (found := _tensorflow_names.find(f"config.{name}")) is not None:
        return found
    raise _tensorflow_names.unknown("module 'stratagem.config'", name, __all__)


VirtualDeviceConfiguration = LogicalDeviceConfiguration
"""TensorFlow's older name for the same."""


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Every device of this machine that this process may use, without taking memory on any.

    Args:
        device_type: Only this kind: `CPU`, `GPU` (CUDA or ROCm), `TPU`, `XPU`, `HPU`, `MPS`, or that of a backend
            which a package has given torch, by torch's name for it.
    Example:
        >>> list_physical_devices("CPU")
        [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return this_process().physical(device_type)


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices that programs address: all visible ones, as they are divided now.

    Example:
        >>> [device.name for device in list_logical_devices("CPU")]
        ['/device:CPU:0']
    """
    return this_process().logical(device_type)


def get_device_details(device: DeviceLike) -> DeviceDetails:
    """The model, memory, cores and compute capability of a physical device."""
    return this_process().details(device)


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The physical devices that are divided into logical ones."""
    return this_process().visible(device_type)


def set_visible_devices(devices: DeviceLike | Sequence[DeviceLike], device_type: str | None = None) -> None:
    """Hides every device but these; those left are numbered from 0 in the order given.

    Args:
        devices: Physical devices or their names; an empty list hides a whole kind.
        device_type: Change only this kind. Without it, accelerators of every kind are hidden
            unless they are listed. The CPU always stays.
    Raises:
        DeviceConfigurationError: A device is listed twice, is of another kind, or none is listed.
        DevicesInUseError: Devices are in use.
    """
    this_process().set_visible(devices, device_type)


def set_logical_device_configuration(device: DeviceLike, logical_devices: Sequence[LogicalDeviceConfiguration]) -> None:
    """Divides a physical device into logical ones, in place of any earlier division.

    Args:
        device: A physical device or its name.
        logical_devices: One entry for each share.
    Raises:
        DeviceConfigurationError: The shares ask for more than the device has.
        DevicesInUseError: Devices are in use.
    Example:
        >>> half = LogicalDeviceConfiguration(memory_limit=512)
        >>> set_logical_device_configuration("cpu:0", [half, half])
        >>> [device.name for device in list_logical_devices("CPU")]
        ['/device:CPU:0', '/device:CPU:1']
    """
    this_process().configure(device, logical_devices)


def get_logical_device_configuration(device: DeviceLike) -> list[LogicalDeviceConfiguration] | None:
    """How a physical device is divided; `None` if it is not."""
    return this_process().configuration(device)


def set_memory_growth(device: DeviceLike, enable: bool) -> None:
    """Whether a GPU's memory is taken when needed (the default here), or all of it at the start.

    Can be combined with a limit: then growth goes up to the limit. Without growth, a real GPU's
    memory is taken when a process begins to serve it; a simulated one's must then be free, but is
    not taken.
    """
    this_process().set_growth(device, enable)


def get_memory_growth(device: DeviceLike) -> bool:
    """Whether a GPU's memory is taken when needed."""
    return this_process().growth(device)


def get_memory_info(device: DeviceLike) -> dict[str, int]:
    """What this process holds on a logical device, in bytes: `current`, and the most as `peak`.

    On a real GPU that is what tensors take on all of its shares together; on a share of the CPU
    or a simulated GPU, what the process took since it began to serve it, or the tensors that scopes
    (`sg.device`) have placed there, and nothing without either.

    Example:
        >>> sorted(get_memory_info("cpu:0"))
        ['current', 'peak']
    """
    placed = residence.memory_info(this_process().resolve(device))
    return serving.memory_info(device, this_process()) if placed is None else placed


def reset_memory_stats(device: DeviceLike) -> None:
    """Lets the peak of `get_memory_info` start again from what is held now."""
    residence.reset_peak(this_process().resolve(device))
    serving.reset_memory_stats(device, this_process())


def set_soft_device_placement(enabled: bool) -> None:
    """Whether an operation whose device does not exist, or has no kernel for it, runs on the nearest that does.

    Off unless switched on, as in a session of TensorFlow: then the first such operation is an error that says what
    exists. When on, a program is told once of each fallback.
    """
    resolution.set_soft(enabled)


def get_soft_device_placement() -> bool:
    """Whether soft placement is on."""
    return resolution.is_soft()


def set_log_device_placement(enabled: bool) -> None:
    """Whether a line such as `MatMul_1: /job:localhost/replica:0/task:0/device:GPU:2` is printed for each operation.

    Of operations of the thread that calls this; for the same as data see `sg.log_placement`.
    """
    log.set_printing(enabled)


def get_log_device_placement() -> bool:
    """Whether operations are printed."""
    return log.is_printing()


def simulate_devices(
    device_type: str, count: int, memory_limit: float | None = None, *, strict: bool = False
) -> list[PhysicalDevice]:
    """Makes devices for a machine without any: shares of the CPU that behave like real ones.

    They take the place of all devices of that kind, so that a program meets the same ones on
    every machine. `STRATAGEM_SIMULATE=gpu:4` does the same from outside, `gpu:4:strict` for strict ones.

    Strict devices are devices of torch's own: a tensor is on `gpu:0` and not on `cpu`, two devices
    do not mix, a copy has to be asked for. They find what a GPU would refuse, slowly
    (docs/accelerators.md). A process that has had them keeps torch's one private slot taken.

    Args:
        device_type: The kind to simulate, such as `GPU`.
        count: How many.
        memory_limit: The memory of each, in MiB; by default an even share of the machine's.
        strict: Whether they are devices of torch's own; GPUs and TPUs can be, one kind in a process.
    Raises:
        DeviceConfigurationError: Together they have more memory than the machine; strict devices of
            this kind there are none, or another backend has torch's private slot.
        DevicesInUseError: Devices are in use.
    Example:
        >>> simulate_devices("GPU", 2, memory_limit=256)[1]
        PhysicalDevice(name='/physical_device:GPU:1', device_type='GPU', simulated=True)
    """
    return this_process().simulate(device_type, count, memory_limit, strict=strict)
