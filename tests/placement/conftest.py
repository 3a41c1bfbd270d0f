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
    assert not scopes.state.open
    assert _len_torch_function_stack() == 0
    inventory.simulate("GPU", 1)  # the configuration is free again


def where(tensor: torch.Tensor) -> str:
    """The short name of the device that a tensor is on."""
    return sg.device_of(tensor).name.removeprefix("/device:")


def two_products(*devices: str) -> tuple[sg.Graph, torch.Tensor]:
    """The program of the notes: the same product on two devices, summed on the CPU; its graph, and the sum."""
    with sg.Graph() as graph:
        products = []
        for device in devices:
            with sg.device(device):
                a = sg.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
                b = sg.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
                products.append(torch.matmul(a, b))
        with sg.device("/cpu:0"):
            total = sg.add_n(products)
    return graph, total
