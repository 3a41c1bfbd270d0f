"""What tests of placement get: simulated GPUs, and a check that torch is as before."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import _len_torch_function_stack

import stratagem as sg
from stratagem.devices.inventory import Inventory
from stratagem.placement import resolution, scopes


@pytest.fixture
def gpus(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four simulated GPUs of 64 MiB; afterwards nothing of placement may be left in torch."""
    torch.manual_seed(0)
    monkeypatch.setattr(resolution, "_told", set())
    inventory.simulate("GPU", 4, memory_limit=64)
    yield
    sg.config.set_soft_device_placement(False)
    assert not sg.config.get_log_device_placement()
    gc.collect()
    assert not scopes.state.stack
    assert _len_torch_function_stack() == 0
    inventory.simulate("GPU", 1)  # the configuration is free again


def where(tensor: torch.Tensor) -> str:
    """The short name of the device that a tensor is on."""
    return sg.device_of(tensor).name.removeprefix("/device:")
