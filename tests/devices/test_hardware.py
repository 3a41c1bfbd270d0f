"""What only a real GPU can show. The same code runs elsewhere against `tests.fakes`."""

import pytest
import torch

import stratagem as sg

pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

MIB = 2**20
Part = sg.config.LogicalDeviceConfiguration


def test_listing_takes_no_memory() -> None:
    assert sg.config.list_physical_devices("GPU")
    assert sg.config.get_device_details("gpu:0").total_memory_bytes > 0
    assert torch.cuda.memory_reserved(0) == 0


def test_gpu_goes_out_of_memory_at_its_limit_and_lives_on() -> None:
    sg.config.set_logical_device_configuration("gpu:0", [Part(memory_limit=512), Part(memory_limit=512)])
    with (
        pytest.raises(sg.OutOfMemoryError, match="/device:GPU:1: asked for 600 MiB"),
        sg.devices.serve("gpu:1") as device,
    ):
        torch.empty(600 * MIB, dtype=torch.uint8, device=device.torch_device)
    with sg.devices.serve("gpu:1") as device:
        held = torch.empty(100 * MIB, dtype=torch.uint8, device=device.torch_device)
        assert sg.config.get_memory_info("gpu:1")["current"] >= held.numel()


def test_gpu_without_growth_takes_its_limit_at_the_start() -> None:
    sg.config.set_logical_device_configuration("gpu:0", [Part(memory_limit=256)])
    sg.config.set_memory_growth("gpu:0", False)
    with sg.devices.serve("gpu:0"):
        assert torch.cuda.memory_reserved(0) >= 250 * MIB
