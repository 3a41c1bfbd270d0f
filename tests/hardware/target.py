"""Where the cases of this folder run: on real accelerators of this machine, or on strict devices in their place.

The cases name devices through this module only, so that one body serves both.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

import stratagem as sg
from stratagem.devices import inventory as inventory_module
from stratagem.devices import kind_table
from stratagem.devices.inventory import Inventory

VARIABLE: Final = "STRATAGEM_TESTHARDWARE"
"""Set in programs that run on real accelerators, to their kind."""

ENVIRONMENT: Final = dict(os.environ)
"""As it was before any test changed it: it may say which accelerators the tests may use."""

EXACT: Final = {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Lets CUDA's libraries compute in the full precision, and the same in every run, whatever kernel they choose."""

IS_REAL: Final = VARIABLE in ENVIRONMENT
KIND: Final = ENVIRONMENT.get(VARIABLE, "GPU")

NUM_STRICT: Final = 2
MIB: Final = 2**20
STRICT_MEMORY_MIB: Final = 2048


def kind_here() -> str | None:
    """The best kind of accelerator that this machine really has, if it has one."""
    return next((kind for kind in kind_table.by_preference() if kind != "CPU" and num_real(kind)), None)


def num_real(kind: str | None) -> int:
    """How many real accelerators of a kind this machine has; asking wakes no driver."""
    return 0 if kind is None else len(Inventory().physical(kind))


def start_anew() -> None:
    """Gives this program the devices of one that has just begun."""
    inventory_module._THIS_PROCESS = Inventory()
    if not IS_REAL:
        sg.config.simulate_devices(KIND, NUM_STRICT, memory_limit=STRICT_MEMORY_MIB, strict=True)


def name(index: int) -> str:
    """What users write for a device: `gpu:0`."""
    return f"{KIND.lower()}:{index}"


def torch_device(index: int) -> torch.device:
    """What torch calls it: `cuda:0`, or `gpu:0` of a strict one."""
    row = kind_table.row_of(KIND)
    return torch.device(row.torch_type if IS_REAL else str(row.strict_type), index)


def torch_module() -> Any:
    """`torch.cuda`, or what has its place."""
    return torch.get_device_module(torch_device(0))


def needs(num_devices: int = 1, *, real: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Leaves a case out where there are fewer devices, or where devices are strict and only real ones can show it."""

    def decorate(case: Callable[[], None]) -> Callable[[], None]:
        def checked() -> None:
            start_anew()
            found = len(sg.config.list_physical_devices(KIND))
            if real and not IS_REAL:
                pytest.skip("only a real accelerator can show this")
            if found < num_devices:
                pytest.skip(f"needs {num_devices} {KIND}s, this machine has {found}")
            case()

        checked.__name__ = case.__name__
        return checked

    return decorate
