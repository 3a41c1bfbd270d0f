"""Placement on real GPUs."""

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import PlacementWarning
from tests.placement.conftest import where

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]


def test_operations_run_on_the_gpu_and_gradients_come_back() -> None:
    weight = torch.ones(3, requires_grad=True)
    with sg.device("/gpu:0"):
        loss = (weight * torch.arange(3.0)).sum()
    assert loss.is_cuda
    assert where(loss) == "GPU:0"
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 2]
    assert weight.grad.is_cpu


def test_halves_of_a_model_train_as_one() -> None:
    model = sg.place(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), {"1": "/gpu:0", "2": "/gpu:0"})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.eye(4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert [parameter.device.type for parameter in model.parameters()] == ["cpu"] * 2 + ["cuda"] * 4


def test_share_of_a_gpu_is_a_device_of_its_own() -> None:
    half = sg.config.LogicalDeviceConfiguration(memory_limit=64)
    sg.config.set_logical_device_configuration("gpu:0", [half, half])
    with sg.device("/gpu:1"):
        x = torch.ones(2)
        with pytest.raises(sg.OutOfMemoryError, match="on /device:GPU:1"):
            torch.ones(80, 2**18)
    assert x.is_cuda
    assert where(x + 1) == "GPU:1"


def test_kernel_that_gpus_lack_runs_on_the_host() -> None:
    sg.config.set_soft_device_placement(True)
    try:
        with sg.device("/gpu:0"), pytest.warns(PlacementWarning, match="no kernel for Histogram"):
            counts = torch.histogram(torch.tensor([0.0, 1.0, 1.0]), 2).hist
    finally:
        sg.config.set_soft_device_placement(False)
    assert counts.is_cpu
    assert counts.tolist() == [1, 2]
