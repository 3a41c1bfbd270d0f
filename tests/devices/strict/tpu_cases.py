"""Strict devices that stand for TPUs: the same devices by another name; see `in_a_program`."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import stratagem as sg
from stratagem.devices import kind_table

STRATEGIES: list[sg.Strategy] = []
_open = contextlib.ExitStack()


def prepare() -> None:
    sg.config.simulate_devices("TPU", 4, memory_limit=64, strict=True)
    torch.set_num_threads(1)
    STRATEGIES.append(_open.enter_context(sg.MirroredStrategy(["tpu:0", "tpu:1"])))


def finish() -> None:
    _open.close()


def case_tensor_is_on_a_tpu_and_mixes_with_nothing_else() -> None:
    anything: Any = torch
    tensor = torch.ones(2).to("tpu:3")
    assert (tensor.device, tensor.is_tpu, anything.tpu.device_count()) == (torch.device("tpu", 3), True, 4)
    assert str(torch.ones(2).tpu(1).device) == "tpu:1"
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    for call in (lambda: tensor + torch.ones(2), lambda: tensor + torch.ones(2, device="tpu:0")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            call()
    with pytest.raises(RuntimeError, match="tpu:7 does not exist, there are 4 strict TPUs"):
        torch.ones(2, device="tpu:7")
    with pytest.raises(sg.OutOfMemoryError, match=r"on /device:TPU:1: .*limit of 64 MiB"):
        torch.empty(2**25, device="tpu:1")


def case_devices_are_listed_and_are_the_best_here() -> None:
    listed = sg.config.list_logical_devices("TPU")
    assert [str(each.torch_device) for each in listed] == ["tpu:0", "tpu:1", "tpu:2", "tpu:3"]
    assert sg.config.get_device_details("tpu:0").device_name == "simulated TPU (strict)"
    assert [each.device_type for each in sg.devices.this_process().select()] == ["TPU"] * 4
    assert sg.config.list_physical_devices("GPU") == []


def case_mixed_precision_has_the_name_of_the_type() -> None:
    with torch.autocast("tpu", dtype=torch.bfloat16):
        assert nn.Linear(2, 2, device="tpu:0")(torch.ones(1, 2, device="tpu:0")).dtype == torch.bfloat16
    assert "tpu" in kind_table.autocast_types()


def case_strategy_equals_one_device() -> None:
    def step(x: torch.Tensor) -> str:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return str(x.device)

    batch = torch.arange(21.0).view(7, 3) / 10
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        step(batch)
    expected = model.weight.detach().clone()
    (strategy,) = STRATEGIES
    with strategy.scope():
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for each in strategy.distribute([(batch,)] * 3):
        assert strategy.local_results(strategy.run(step, args=each)) == ("tpu:0", "tpu:1")
    torch.testing.assert_close(model.weight.detach().cpu(), expected)


def case_torch_distributed_has_a_backend_for_them() -> None:
    assert torch.distributed.get_default_backend_for_device("tpu") == "strict"


def case_second_kind_of_strict_devices_is_refused() -> None:
    before = sg.config.list_logical_devices()
    _open.close()
    with pytest.raises(
        sg.errors.DeviceConfigurationError, match="this process has strict TPUs and cannot have strict GPUs"
    ):
        sg.config.simulate_devices("GPU", 2, strict=True)
    assert sg.config.list_logical_devices() == before
    sg.config.simulate_devices("GPU", 2)
    assert {str(each.torch_device) for each in sg.config.list_logical_devices("GPU")} == {"cpu"}
