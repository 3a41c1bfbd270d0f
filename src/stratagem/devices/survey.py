"""Collects what `stratagem devices` shows, as plain values.

Owns the fields of the report and of its JSON; how it looks on a terminal is `cli`'s.
"""

import dataclasses
import warnings
from typing import Any

import torch

from stratagem import _env
from stratagem.devices import absence
from stratagem.devices.device import DeviceDetails, LogicalDevice, PhysicalDevice
from stratagem.devices.inventory import Inventory, this_process
from stratagem.devices.kind_table import CPU, GPU
from stratagem.errors import DeviceWarning


@dataclasses.dataclass(frozen=True)
class SurveyedDevice:
    """A physical device with all that is known of it."""

    device: PhysicalDevice
    details: DeviceDetails
    visible: bool
    memory_used_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Survey:
    """The devices of a process, and notes for the one who expected others."""

    physical: list[SurveyedDevice]
    logical: list[LogicalDevice]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return {
            "torch": torch.__version__,
            "physical_devices": [_physical_as_dict(each) for each in self.physical],
            "logical_devices": [_logical_as_dict(each) for each in self.logical],
            "notes": self.notes,
        }


def survey(inventory: Inventory | None = None) -> Survey:
    """Looks at every device of this process."""
    inventory = inventory or this_process()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeviceWarning)  # the notes say the same
        visible = inventory.visible()
        physical = [
            SurveyedDevice(device, inventory.details(device), device in visible, _memory_used(device, inventory))
            for device in inventory.physical()
        ]
        return Survey(physical, inventory.logical(), _notes(physical, inventory))


def _memory_used(device: PhysicalDevice, inventory: Inventory) -> int | None:
    if accelerator := inventory.accelerator(device):
        return accelerator.memory_used(device.index)
    return inventory.host.used_memory_bytes() if device.device_type == CPU else None


def _notes(physical: list[SurveyedDevice], inventory: Inventory) -> list[str]:
    complaint = inventory.mask_complaint()
    notes = [complaint] if complaint else []
    simulated = sorted({each.device.device_type for each in physical if each.device.simulated})
    hidden = [kind for kind in inventory.simulated_kinds() if kind not in simulated]
    if hidden:
        mask = _env.cuda_visible_devices()
        notes.append(
            f"{', '.join(hidden)} devices are simulated, but {_env.CUDA_VISIBLE_DEVICES}={mask!r} hides all of them"
        )
    elif simulated:
        strict = ", as devices of torch's own (strict)" if inventory.has_strict_devices() else ""
        notes.append(f"{', '.join(simulated)} devices are simulated by shares of the CPU{strict}")
    elif not any(each.device.device_type != CPU for each in physical):
        notes.append(f"no GPU: {absence.why_none(GPU, inventory.host)}")
    else:
        notes += [note for note in absence.visibility_notes(inventory.host) if note != complaint]
    notes += [
        f"{name} is not a variable that stratagem reads; did you mean {meant}?" for name, meant in _env.misspelt()
    ]
    return notes


def _physical_as_dict(each: SurveyedDevice) -> dict[str, Any]:
    return {
        "name": each.device.name,
        "device_type": each.device.device_type,
        "simulated": each.device.simulated,
        "visible": each.visible,
        "memory_used_bytes": each.memory_used_bytes,
        **dataclasses.asdict(each.details),
    }


def _logical_as_dict(device: LogicalDevice) -> dict[str, Any]:
    return {
        "name": device.name,
        "device_type": device.device_type,
        "physical": device.physical.name,
        "simulated": device.simulated,
        "torch_device": str(device.torch_device),
        "cores": list(device.cores),
        "num_threads": device.num_threads,
        "memory_limit_bytes": device.memory_limit_bytes,
        "memory_growth": device.memory_growth,
    }
