"""Makes a device of this process of what scopes ask for; falls back where that is allowed.

Owns soft placement: whether it is on, what the nearest device is, and that a program is told once.
"""

import dataclasses
from typing import Protocol

from stratagem._caller import warn_caller
from stratagem.devices.device import LogicalDevice
from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.inventory import this_process
from stratagem.devices.kind_table import CPU
from stratagem.errors import DeviceNotFoundError, DeviceTypeError, PlacementWarning

LOCAL_TASK = "/job:localhost/replica:0/task:0"
_SETTING = "sg.config.set_soft_device_placement(True)"


class Devices(Protocol):
    """Devices to choose from: those of this process, or the ones of them that a session has."""

    def logical(self, kind: str | None = None) -> list[LogicalDevice]: ...
    def resolve(self, device: DeviceSpec, /) -> LogicalDevice: ...


@dataclasses.dataclass
class _Settings:
    soft: bool = False


_settings = _Settings()
_told: set[str] = set()


def set_soft(enabled: bool) -> None:
    """Whether what cannot run where it was placed may run elsewhere."""
    if type(enabled) is not bool:
        raise DeviceTypeError(f"soft device placement is True or False, got {enabled!r}")
    _settings.soft = enabled


def is_soft() -> bool:
    """Whether soft placement is on."""
    return _settings.soft


def full_name(device: LogicalDevice) -> str:
    """The name of a device of this process in TensorFlow's longest form."""
    return f"{LOCAL_TASK}{device.name}"


def resolve(
    spec: DeviceSpec, operation: str, *, soft: bool | None = None, inventory: Devices | None = None
) -> LogicalDevice | None:
    """The device of this process that a spec names; the first of its kind where it names no index.

    Args:
        spec: What the scopes ask for (`scopes.spec_for`).
        operation: The name of the operation, for messages.
        soft: Whether a missing device falls back to the nearest; by default as configured.
        inventory: Where to look; by default this process' own.
    Returns:
        The device; `None` if the spec names neither kind nor index, and so leaves the choice open.
    Raises:
        DeviceNotFoundError: There is no such device, or it is another task's.
    """
    inventory = inventory or this_process()
    if spec.job not in (None, "localhost") or spec.replica or spec.task:
        raise DeviceNotFoundError(
            f"{operation} was placed on {str(spec)!r}, a device of another task; in this process operations run on "
            f"devices of {LOCAL_TASK}. Run it in a session on that cluster, or name a device of this process"
        )
    if spec.device_type is None and spec.device_index is None:
        return None
    try:
        return inventory.resolve(spec)
    except DeviceNotFoundError as error:
        if not (_settings.soft if soft is None else soft):
            raise DeviceNotFoundError(
                f"{operation} was placed on {str(spec)!r}, but {error}. Name one that exists, or call {_SETTING} "
                f"to fall back to the nearest"
            ) from error
        nearest = _nearest(spec, inventory)
        tell_once(f"{str(spec)!r} does not exist; what is placed there runs on {nearest.name} (soft placement)")
        return nearest


def host(inventory: Devices) -> LogicalDevice:
    """The device that tensors are on which nobody has placed."""
    return inventory.logical(CPU)[0]


def refusal_of_kernel(operation: str, device: LogicalDevice) -> str:
    """Why an operation cannot run on a device that has no kernel for it."""
    return (
        f"{operation} was placed on {device.name}, which has no kernel for it. Place it on '/cpu:0', or call "
        f"{_SETTING} to let such operations run there by themselves"
    )


def tell_once(message: str) -> None:
    """Warns the user's line, the first time."""
    if message not in _told:
        _told.add(message)
        warn_caller(message, PlacementWarning)


def _nearest(spec: DeviceSpec, inventory: Devices) -> LogicalDevice:
    """Of the same kind, the one with the closest index; else the CPU's first."""
    known = inventory.logical(spec.device_type) if spec.device_type else []
    return min(known, key=lambda each: abs(each.index - (spec.device_index or 0)), default=host(inventory))
