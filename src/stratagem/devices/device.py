"""Defines the values that describe devices: physical, logical, and how one is divided.

All are frozen and only describe; what exists and what is configured is `inventory`'s.
"""

import dataclasses
import numbers

import torch

from stratagem.errors import DeviceConfigurationError

MIB = 2**20


def mib(num_bytes: int) -> str:
    """A size as people read it: `512 MiB`, `23.5 GiB`."""
    value, unit = (num_bytes / 2**30, "GiB") if num_bytes >= 2**30 else (num_bytes / MIB, "MiB")
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


@dataclasses.dataclass(frozen=True, repr=False)
class PhysicalDevice:
    """A piece of hardware, or a simulated one.

    Example:
        >>> PhysicalDevice("GPU", 0)
        PhysicalDevice(name='/physical_device:GPU:0', device_type='GPU')
    """

    device_type: str
    index: int
    simulated: bool = False

    @property
    def name(self) -> str:
        return f"/physical_device:{self.device_type}:{self.index}"

    def __repr__(self) -> str:
        simulated = ", simulated=True" if self.simulated else ""
        return f"PhysicalDevice(name={self.name!r}, device_type={self.device_type!r}{simulated})"


@dataclasses.dataclass(frozen=True)
class DeviceDetails:
    """What is known of a physical device; `None` where the hardware does not tell.

    Args:
        device_name: The model, as its maker calls it.
        total_memory_bytes: All of its memory; 0 where torch does not tell.
        num_cores: Cores of a CPU that this process may use, multiprocessors of a GPU.
        compute_capability: Of an NVIDIA GPU, as (major, minor).
    """

    device_name: str
    total_memory_bytes: int
    num_cores: int | None = None
    compute_capability: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One share of a physical device.

    Shares of a CPU are shares of its cores, with a memory limit if one is given. Shares of a GPU
    are shares of its memory; those without a limit divide what the others leave.

    Args:
        memory_limit: The memory limit, in MiB.
        memory_fraction: The memory limit as a part of the device's memory, in place of MiB.
        num_cores: The number of cores, for a CPU; by default the cores are divided evenly.
    Raises:
        DeviceConfigurationError: A value is not positive, or both kinds of limit are given.
    Example:
        >>> LogicalDeviceConfiguration(memory_limit=512)
        LogicalDeviceConfiguration(memory_limit=512)
    """

    memory_limit: float | None = None
    memory_fraction: float | None = None
    num_cores: int | None = None

    def __post_init__(self) -> None:
        check_memory_limit(self.memory_limit)
        fraction = self.memory_fraction
        if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
            raise DeviceConfigurationError(f"memory_fraction must be above 0 and at most 1, got {fraction!r}")
        if self.memory_limit is not None and fraction is not None:
            raise DeviceConfigurationError(
                f"give memory_limit={self.memory_limit!r} or memory_fraction={fraction!r}, not both"
            )
        if self.num_cores is not None and not (isinstance(self.num_cores, numbers.Integral) and self.num_cores > 0):
            raise DeviceConfigurationError(f"num_cores must be a whole number from 1 up, got {self.num_cores!r}")

    def limit_bytes(self, total_memory_bytes: int) -> int | None:
        """The limit on a device with so much memory."""
        if self.memory_fraction is not None:
            return int(self.memory_fraction * total_memory_bytes)
        return None if self.memory_limit is None else int(self.memory_limit * MIB)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
        return f"LogicalDeviceConfiguration({given})"


@dataclasses.dataclass(frozen=True, repr=False)
class LogicalDevice:
    """A named share of a physical device: what programs address.

    Args:
        device_type: Its kind, such as `CPU` or `GPU`.
        index: Its number among the logical devices of that kind.
        physical: The device that it is a share of.
        torch_device: Where its tensors are, for torch.
        cores: The CPU cores that it computes on; none for a real GPU.
        num_threads: How many threads compute on them.
        memory_limit_bytes: How much memory it may use; `None` means all that there is.
        memory_growth: Whether memory is taken when needed, or all of the limit at the start.
        is_limit_given: Whether a program has set the limit; a simulated device has one in any case.
    Example:
        >>> import stratagem as sg
        >>> sg.config.list_logical_devices("CPU")[0].name
        '/device:CPU:0'
    """

    device_type: str
    index: int
    physical: PhysicalDevice
    torch_device: torch.device
    cores: tuple[int, ...] = ()
    num_threads: int | None = None
    memory_limit_bytes: int | None = None
    memory_growth: bool = True
    is_limit_given: bool = False

    @property
    def name(self) -> str:
        return f"/device:{self.device_type}:{self.index}"

    @property
    def simulated(self) -> bool:
        return self.physical.simulated

    def __repr__(self) -> str:
        cores = f", cores={self.cores}" if self.cores else ""
        limit = "" if self.memory_limit_bytes is None else f", memory_limit='{mib(self.memory_limit_bytes)}'"
        simulated = ", simulated=True" if self.simulated else ""
        return f"LogicalDevice(name={self.name!r}, device_type={self.device_type!r}{cores}{limit}{simulated})"


def check_memory_limit(memory_limit: float | None) -> None:
    """Refuses a limit in MiB that cannot be one."""
    if memory_limit is not None and not (_is_number(memory_limit) and 1 <= memory_limit < 2**40):
        raise DeviceConfigurationError(f"memory_limit must be a number of MiB from 1 up, got {memory_limit!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
