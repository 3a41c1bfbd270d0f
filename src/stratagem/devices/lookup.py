"""Turns what a user wrote into a device of a given list, or into the error that helps.

Pure: the list comes from `inventory`, which also says why a kind of device is missing.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import torch

from stratagem import _env
from stratagem.devices.device import LogicalDevice, PhysicalDevice
from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.kind_table import CPU, GPU
from stratagem.errors import DeviceConfigurationError, DeviceNotFoundError, DeviceTypeError

DeviceLike: TypeAlias = str | DeviceSpec | torch.device | PhysicalDevice | LogicalDevice

_Device = TypeVar("_Device", PhysicalDevice, LogicalDevice)


def local_spec(device: DeviceLike) -> DeviceSpec:
    """The name of a device of this very process; of its kind and index, only the index may be open."""
    if isinstance(device, PhysicalDevice | LogicalDevice):
        return DeviceSpec(device_type=device.device_type, device_index=device.index)
    if isinstance(device, DeviceSpec):
        spec = device
    else:
        spec = DeviceSpec.from_string(str(device) if isinstance(device, torch.device) else device)
    if spec.device_type is None:
        raise DeviceNotFoundError(f"{str(spec)!r} names no kind of device; write one such as 'cpu:0'")
    if spec.job not in (None, "localhost") or spec.replica or spec.task:
        raise DeviceNotFoundError(
            f"{str(spec)!r} is a device of another task; this process has those of /job:localhost/replica:0/task:0"
        )
    return spec


def names_a_kind(device: DeviceLike) -> bool:
    """Whether a name leaves the number out, such as `GPU`."""
    return local_spec(device).device_index is None


def find(device: DeviceLike, spec: DeviceSpec, known: Sequence[_Device], sort: str, why_none: str | None) -> _Device:
    """The one of `known` that `spec` names; without an index, the first.

    Args:
        device: What the user wrote, for the message.
        sort: `physical` or `logical`, whichever `known` are.
        why_none: Why the machine has no device of that kind at all, if it has none.
    """
    for each in known:
        if each.index == (spec.device_index or 0):
            return each
    asked = f"device {device if isinstance(device, str) else str(spec)!r} does not exist"
    if why_none is not None:
        raise DeviceNotFoundError(f"{asked}: this machine has no visible {spec.device_type}. {why_none}")
    names = ", ".join(f"{each.device_type}:{each.index}".lower() for each in known)
    here = (
        f"{len(known)} {sort} {spec.device_type} device(s) ({names})" if known else f"hidden every {spec.device_type}"
    )
    more = ""
    if spec.device_type == CPU and sort == "logical":
        more = "; divide the CPU with set_logical_device_configuration to have more"
    if spec.device_type == GPU and (mask := _env.cuda_visible_devices()) is not None:
        more = f"; {_env.CUDA_VISIBLE_DEVICES}={mask!r} hides those that it does not list"
    if not known and (request := _env.devices()) is not None:
        more = f"; {_env.DEVICES}={request!r} does not name them"
    raise DeviceNotFoundError(f"{asked}: this process has {here}{more}")


def as_list(devices: DeviceLike | Sequence[DeviceLike]) -> list[DeviceLike]:
    """A list of devices, where one may stand for a list of one."""
    if isinstance(devices, DeviceLike):
        return [devices]
    if not isinstance(devices, Sequence):
        raise DeviceTypeError(f"devices must be a list of devices or their names, got {devices!r}")
    return list(devices)


def refuse_twins(devices: Sequence[PhysicalDevice | LogicalDevice]) -> None:
    """Refuses a list that names one device twice."""
    for position, device in enumerate(devices):
        if device in devices[:position]:
            raise DeviceConfigurationError(
                f"device {device.name!r} is listed twice; name each once, or divide it into logical devices"
            )
