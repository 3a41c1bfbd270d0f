"""What happens to operations whose device is missing or cannot compute them."""

import pytest
import torch

import stratagem as sg
from stratagem.errors import DeviceNotFoundError, DeviceTypeError, PlacementError, PlacementWarning
from tests.placement.conftest import where

pytestmark = pytest.mark.usefixtures("gpus")


def test_missing_device_is_an_error_of_the_first_operation() -> None:
    x = torch.ones(2, 2)
    with (
        sg.device("/gpu:7"),
        pytest.raises(DeviceNotFoundError, match=r"^MatMul was placed on '/device:GPU:7'") as caught,
    ):
        torch.matmul(x, x)
    message = str(caught.value)
    assert "4 logical GPU device(s) (gpu:0, gpu:1, gpu:2, gpu:3)" in message
    assert "set_soft_device_placement(True)" in message


def test_missing_kind_says_why_there_is_none() -> None:
    with sg.device("/xpu:0"), pytest.raises(DeviceNotFoundError, match="no visible XPU") as caught:
        torch.ones(2)
    assert ".. " not in str(caught.value)


def test_missing_kind_says_how_to_simulate_it() -> None:
    with (
        sg.device("/tpu:0"),
        pytest.raises(DeviceNotFoundError, match=r"STRATAGEM_SIMULATE=tpu:2\. Name one that exists"),
    ):
        torch.ones(2)


def test_missing_kernel_is_an_error_that_says_what_to_do() -> None:
    with sg.device("/gpu:1"):
        x = torch.arange(4.0)
        with pytest.raises(PlacementError, match=r"Histogram was placed on /device:GPU:1, which has no kernel"):
            torch.histogram(x, 2)


def test_soft_placement_takes_the_nearest_device_and_says_so_once() -> None:
    sg.config.set_soft_device_placement(True)
    assert sg.config.get_soft_device_placement()

    @sg.device("/gpu:7")
    def twice() -> list[torch.Tensor]:
        return [torch.ones(2), torch.ones(2)]

    with pytest.warns(PlacementWarning, match=r"'/device:GPU:7' does not exist; .* on /device:GPU:3") as told:
        made = [*twice(), *twice()]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert {where(each) for each in made} == {"GPU:3"}
    with pytest.warns(PlacementWarning, match="runs on /device:CPU:0"), sg.device("/xpu:0"), sg.log_placement() as log:
        assert where(torch.ones(2)) == "CPU:0"
    (record,) = log
    assert (record.requested, record.device, record.why) == ("/device:XPU:0", "/device:CPU:0", "no such device")


def test_soft_placement_runs_on_the_host_what_a_device_has_no_kernel_for() -> None:
    sg.config.set_soft_device_placement(True)
    with sg.device("/gpu:1"):
        x = torch.tensor([0.0, 1.0, 1.0])
        with pytest.warns(PlacementWarning, match="no kernel for Histogram; it runs on /device:CPU:0"):
            counts, _ = torch.histogram(x, 2)
        torch.histogram(x, 2)
        assert where(counts) == "CPU:0"
        assert where(counts * 2) == "GPU:1"
    assert counts.tolist() == [1, 2]


def test_kernel_that_torch_misses_falls_back_too() -> None:
    tries = []

    def picky(x: torch.Tensor) -> torch.Tensor:
        tries.append(where(x))
        if where(x) != "CPU:0":
            raise NotImplementedError("Could not run 'aten::picky' with arguments from the 'CUDA' backend")
        return x + 1

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.overrides.handle_torch_function(picky, (x,), x)
        return result

    sg.config.set_soft_device_placement(True)
    with sg.device("/gpu:1"), pytest.warns(PlacementWarning, match="no kernel for Picky"):
        result = call(torch.ones(2))
    assert where(result) == "CPU:0"
    assert result.tolist() == [2, 2]
    assert tries == ["GPU:1", "CPU:0"]


def test_soft_placement_lets_in_place_changes_stay_with_their_tensor() -> None:
    sg.config.set_soft_device_placement(True)
    x = torch.ones(2)
    with sg.device("/gpu:1"), pytest.warns(PlacementWarning, match="'add_' changes a tensor in place"):
        x += 1
    assert where(x) == "CPU:0"


def test_device_of_another_task_is_refused_even_softly() -> None:
    sg.config.set_soft_device_placement(True)
    with sg.device("/job:worker/task:1/gpu:0"), pytest.raises(DeviceNotFoundError, match="device of another task"):
        torch.ones(2)
    with sg.device("/job:localhost/replica:0/task:0"):
        assert where(torch.ones(2)) == "CPU:0"


def test_setting_refuses_what_is_not_true_or_false() -> None:
    with pytest.raises(DeviceTypeError, match="True or False, got 1"):
        sg.config.set_soft_device_placement(1)  # type: ignore[arg-type]
    with pytest.raises(DeviceTypeError, match="True or False, got 'yes'"):
        sg.config.set_log_device_placement("yes")  # type: ignore[arg-type]
