"""Divides physical devices into shares: cores of a CPU, memory of a GPU.

Pure arithmetic with the rules that a division must keep. Knows no hardware and keeps nothing.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from stratagem.devices.device import MIB, DeviceDetails, LogicalDeviceConfiguration, PhysicalDevice, mib
from stratagem.devices.kind_table import CPU
from stratagem.errors import DeviceConfigurationError, DeviceTypeError


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a physical device that becomes one logical device."""

    cores: tuple[int, ...]
    memory_limit_bytes: int | None
    is_limit_given: bool = False


def divide(
    device: PhysicalDevice,
    details: DeviceDetails,
    cores: tuple[int, ...],
    parts: Sequence[LogicalDeviceConfiguration] | None,
) -> list[Share]:
    """The shares of `device`, one for each of `parts`, or one for all of it when it is not divided.

    Args:
        cores: The CPU cores behind the device; none behind a real accelerator.
    Raises:
        DeviceConfigurationError: The shares ask for more than there is, or for nothing.
    """
    parts = [LogicalDeviceConfiguration()] if parts is None else parts
    check_parts(device, parts)
    limits = _memory_limits(device, details.total_memory_bytes, parts)
    if not cores and any(part.num_cores is not None for part in parts):
        raise DeviceConfigurationError(f"num_cores is for shares of a CPU; {device.name} is divided by memory_limit")
    shares = _core_shares(device, cores, parts) if cores else [()] * len(parts)
    given = [part.limit_bytes(details.total_memory_bytes) is not None for part in parts]
    return [Share(*share) for share in zip(shares, limits, given, strict=True)]


def check_parts(device: PhysicalDevice, parts: Sequence[LogicalDeviceConfiguration]) -> None:
    """Refuses what is not a list of at least one share."""
    if isinstance(parts, LogicalDeviceConfiguration) or not isinstance(parts, Sequence) or isinstance(parts, str):
        number = parts if isinstance(parts, int) else 2
        raise DeviceTypeError(
            f"{device.name} is divided by a list, for example [LogicalDeviceConfiguration()] * {number}; "
            f"each share is a LogicalDeviceConfiguration, got {parts!r}"
        )
    for part in parts:
        if not isinstance(part, LogicalDeviceConfiguration):
            raise DeviceTypeError(f"each share of {device.name} is a LogicalDeviceConfiguration, got {part!r}")
    if not parts:
        raise DeviceConfigurationError(
            f"{device.name} must be divided into at least one share, got an empty list; "
            f"to hide a device use set_visible_devices"
        )


def split_cores(cores: tuple[int, ...], num_shares: int) -> list[tuple[int, ...]]:
    """Neighbouring cores, as evenly as they go; more shares than cores take turns on them.

    Example:
        >>> split_cores((0, 1, 2, 3, 4), 2)
        [(0, 1, 2), (3, 4)]
        >>> split_cores((0, 1), 4)
        [(0,), (0,), (1,), (1,)]
    """
    if num_shares >= len(cores):
        return [(cores[share * len(cores) // num_shares],) for share in range(num_shares)]
    size, larger = divmod(len(cores), num_shares)
    starts = [share * size + min(share, larger) for share in range(num_shares + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(starts)]


def _core_shares(
    device: PhysicalDevice, cores: tuple[int, ...], parts: Sequence[LogicalDeviceConfiguration]
) -> list[tuple[int, ...]]:
    asked = [part.num_cores for part in parts if part.num_cores is not None]
    num_open = len(parts) - len(asked)
    if not asked:
        return split_cores(cores, len(parts))
    if sum(asked) > len(cores) or (num_open and sum(asked) == len(cores)):
        rest = f", which leaves none for the {num_open} without num_cores" if num_open else ""
        raise DeviceConfigurationError(
            f"the shares of {device.name} ask for {sum(asked)} of its {len(cores)} cores{rest}; ask for fewer"
        )
    taken = cores[: sum(asked)]
    evenly = iter(split_cores(cores[sum(asked) :], num_open) if num_open else ())
    shares, start = [], 0
    for part in parts:
        if part.num_cores is None:
            shares.append(next(evenly))
        else:
            shares.append(taken[start : start + part.num_cores])
            start += part.num_cores
    return shares


def _memory_limits(
    device: PhysicalDevice, total_bytes: int, parts: Sequence[LogicalDeviceConfiguration]
) -> list[int | None]:
    limits = [part.limit_bytes(total_bytes) for part in parts]
    given = [limit for limit in limits if limit is not None]
    for limit in given:
        if limit > total_bytes:
            hint = f". memory_limit is in MiB: for {mib(limit // MIB)} write {limit // MIB // MIB}"
            raise DeviceConfigurationError(
                f"memory limit {mib(limit)} for {device.name} is above its {mib(total_bytes)}; "
                f"logical limits on one device must add up to at most that"
                f"{hint if MIB <= limit // MIB <= total_bytes else ''}"
            )
    if sum(given) > total_bytes:
        raise DeviceConfigurationError(
            f"memory limits for {device.name} add up to {mib(sum(given))}, it has {mib(total_bytes)}; lower them"
        )
    may_be_unlimited = device.device_type == CPU or (len(parts) == 1 and not device.simulated)
    if len(given) == len(limits) or may_be_unlimited:
        return limits
    rest = (total_bytes - sum(given)) // (len(limits) - len(given))
    if rest == 0:
        raise DeviceConfigurationError(
            f"memory limits for {device.name} take all of its {mib(total_bytes)} and leave nothing "
            f"for the shares without a limit; lower them or give every share a limit"
        )
    return [rest if limit is None else limit for limit in limits]
