"""Devices count what is on them, and refuse what does not fit."""

import gc

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices.device import MIB, LogicalDeviceConfiguration
from stratagem.devices.inventory import Inventory
from tests.placement.conftest import where

pytestmark = pytest.mark.usefixtures("gpus")


def used() -> int:
    return sg.config.get_memory_info("/gpu:1")["current"]


def test_device_counts_what_is_on_it_until_it_is_gone() -> None:
    with sg.device("/gpu:1"):
        x = torch.zeros(4, 1024, 1024 // 4)  # 4 MiB
        half = x[:2]
        assert used() == 4 * MIB  # a view takes nothing
        y = x + 1
    assert used() == 8 * MIB
    del x
    assert used() == 8 * MIB  # the view keeps it
    del half, y
    assert sg.config.get_memory_info("/gpu:1") == {"current": 0, "peak": 8 * MIB}


def test_what_autograd_keeps_counts_until_the_backward_pass() -> None:
    weight = torch.ones(1024, 1024, requires_grad=True)
    with sg.device("/gpu:1"):
        loss = (weight * 2).exp().sum()  # the result of exp is kept for its gradient
    assert used() >= 4 * MIB
    loss.backward()
    assert used() < MIB
    assert sg.config.get_memory_info("/gpu:1")["peak"] >= 8 * MIB
    sg.config.reset_memory_stats("/gpu:1")
    assert sg.config.get_memory_info("/gpu:1")["peak"] < MIB


def test_gradients_count_where_their_parameters_are() -> None:
    layer = sg.place(nn.Linear(1024, 1024, bias=False), "/gpu:1")
    layer(torch.ones(1, 1024)).sum().backward()
    assert used() == 8 * MIB
    layer.zero_grad()
    assert used() == 4 * MIB
    torch.autograd.backward([layer(torch.ones(1, 1024)).sum()])
    assert used() == 8 * MIB


def test_going_over_the_limit_names_tensor_size_limit_and_residents() -> None:
    model = nn.ModuleDict({"encoder": sg.place(nn.Linear(1024, 4096), "/gpu:1")})  # 16 MiB
    with sg.device("/gpu:1"):
        data = torch.ones(32, MIB // 4)  # 32 MiB
        with pytest.raises(sg.OutOfMemoryError) as caught:
            data * 2
    message = str(caught.value)
    for part in (
        "out of memory on /device:GPU:1: Mul needs a float32 tensor of shape (32, 262144), 32 MiB",
        "with 48 MiB in use; its limit is 64 MiB",
        "Largest on it: Ones, a float32 tensor of shape (32, 262144), 32 MiB; parameter 'encoder.weight'",
        "larger memory_limit",
    ):
        assert part in message
    error = caught.value
    assert (error.device, error.limit_bytes, error.requested_bytes) == ("/device:GPU:1", 64 * MIB, 32 * MIB)
    assert isinstance(error, torch.OutOfMemoryError)
    del caught, error
    gc.collect()
    with sg.device("/gpu:1"):
        assert where(data[:1] * 2) == "GPU:1"  # what fits still works
    assert where(model["encoder"].weight) == "GPU:1"


def test_copy_and_module_that_do_not_fit_are_refused() -> None:
    data = torch.ones(80, MIB // 4)
    with sg.device("/gpu:1"), pytest.raises(sg.OutOfMemoryError, match=r"Sum needs .* 80 MiB, with 0 MiB in use"):
        data.sum()
    with pytest.raises(sg.OutOfMemoryError, match=r"Place needs .* Largest on it: nothing"):
        sg.place(nn.Linear(5000, 5000), "/gpu:1")


def test_share_of_the_cpu_has_its_limit(inventory: Inventory) -> None:
    inventory.configure("cpu:0", [LogicalDeviceConfiguration(), LogicalDeviceConfiguration(memory_limit=8)])
    with sg.device("/cpu:1"), pytest.raises(sg.OutOfMemoryError, match="on /device:CPU:1: Zeros needs"):
        torch.zeros(9, MIB // 4)
    with sg.device("/cpu:0"):
        assert where(torch.zeros(9, MIB // 4)) == "CPU:0"


def test_limited_host_counts_what_is_made_in_scopes(inventory: Inventory) -> None:
    inventory.configure("cpu:0", [LogicalDeviceConfiguration(memory_limit=8)])
    before = torch.zeros(9, MIB // 4)
    with sg.device("/cpu:0"):
        x = before[:4] + 1
        assert sg.config.get_memory_info("/cpu:0")["current"] == 4 * MIB
        with pytest.raises(sg.OutOfMemoryError, match="on /device:CPU:0: Mul needs"):
            before * 2
    assert where(before) == where(x) == "CPU:0"
