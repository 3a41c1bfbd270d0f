"""Devices that torch itself tells apart; its `meta` device stands in for a GPU, and computes shapes only."""

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices.device import LogicalDevice, PhysicalDevice
from stratagem.devices.inventory import Inventory
from stratagem.errors import PlacementError
from tests.placement.conftest import where

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.fixture(autouse=True)
def meta_gpu(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU besides the CPU, whose tensors are torch's `meta` tensors."""
    real = Inventory.logical
    gpu = LogicalDevice("GPU", 0, PhysicalDevice("GPU", 0), torch.device("meta"))

    def logical(self: Inventory, kind: str | None = None) -> list[LogicalDevice]:
        return [*([] if kind == "GPU" else real(self, "CPU")), *([] if kind == "CPU" else [gpu])]

    monkeypatch.setattr(Inventory, "logical", logical)


def test_tensors_are_made_and_copied_on_the_torch_device() -> None:
    x = torch.ones(2, 3)
    with sg.device("/gpu:0"):
        made = torch.zeros(3, 2)
        like = torch.ones_like(x)
        product = x @ made
    assert [each.device.type for each in (made, like, product)] == ["meta"] * 3
    assert where(product) == where(product + 1) == "GPU:0"
    with sg.device("/gpu:0"):
        assert torch.zeros(2, device="cpu").is_cpu
        assert torch.as_tensor([1.0]).is_meta


def test_model_and_its_optimizer_work_there() -> None:
    with sg.device("/gpu:0"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with sg.device("/gpu:0"):
        loss = model(torch.ones(5, 3)).sum()
    loss.backward()
    optimizer.step()
    tensors = [*model.state_dict().values(), *(each["exp_avg"] for each in optimizer.state.values())]
    assert {each.device.type for each in tensors} == {"meta"}
    assert {where(parameter.grad) for parameter in model.parameters()} == {"GPU:0"}


def test_inputs_follow_the_parameters_without_a_scope() -> None:
    with sg.device("/gpu:0"):
        model = nn.Linear(3, 4)
    with sg.log_placement() as log:
        assert model(torch.ones(5, 3)).is_meta
    (copy,) = log.records[-1].copies
    assert (copy.source, copy.target, copy.num_bytes) == ("/device:CPU:0", "/device:GPU:0", 60)


def test_kernel_that_torch_does_not_have_there_is_named() -> None:
    with sg.device("/gpu:0"):
        x = torch.ones(4)
        with pytest.raises(
            PlacementError, match=r"Bincount was placed on /device:GPU:0, which has no kernel"
        ) as caught:
            torch.bincount(x.long())
    assert isinstance(caught.value.__cause__, NotImplementedError)
