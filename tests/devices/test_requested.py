import pytest

from stratagem.devices.device import LogicalDeviceConfiguration
from stratagem.devices.inventory import Inventory
from stratagem.devices.requested import parse
from stratagem.errors import (
    DeviceConfigurationError,
    DeviceNotFoundError,
    EnvironmentVariableError,
)


def names(inventory: Inventory) -> list[str]:
    return [device.name.removeprefix("/device:") for device in inventory.logical()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu:3", ["CPU:0", "CPU:1", "CPU:2"]),
        ("gpu:2", ["CPU:0", "GPU:0", "GPU:1"]),
        ("cuda:all", ["CPU:0", "GPU:0", "GPU:1", "GPU:2", "GPU:3"]),
        ("gpu:1, cpu:2", ["CPU:0", "CPU:1", "GPU:0"]),
        ("", ["CPU:0", "GPU:0", "GPU:1", "GPU:2", "GPU:3"]),
    ],
)
def test_program_sees_the_devices_that_were_asked_for(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    monkeypatch.setenv("STRATAGEM_DEVICES", text)
    assert names(inventory) == expected


def test_devices_that_were_asked_for_are_the_default_of_strategies(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    monkeypatch.setenv("STRATAGEM_DEVICES", "cpu:2")
    assert [device.name for device in inventory.select()] == ["/device:CPU:0", "/device:CPU:1"]


def test_gpus_are_counted_after_the_mask(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("STRATAGEM_DEVICES", "gpu:3")
    with pytest.raises(DeviceNotFoundError, match=r"'gpu:3' asks for 3 GPUs, this machine has 2 \(gpu:0, gpu:1\)"):
        inventory.logical()


@pytest.mark.parametrize("text", ["gpu:1", "gpu:all"])
def test_request_for_gpus_says_why_there_are_none(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("STRATAGEM_DEVICES", text)
    if inventory.physical("GPU"):
        pytest.skip("this machine has GPUs")
    with pytest.raises(DeviceNotFoundError, match=r"this machine has none.*STRATAGEM_SIMULATE=gpu:2"):
        inventory.logical()


@pytest.mark.parametrize(
    "text", ["cpu", "cpu:", "cpu:0", "cpu:-1", "cpu:all", "gpu:some", "4", "cpu:2,cpu:3", "npu:1", ","]
)
def test_malformed_request_names_the_variable_and_the_form(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("STRATAGEM_DEVICES", text)
    with pytest.raises(
        EnvironmentVariableError, match=f"STRATAGEM_DEVICES='{text}': .*Example: STRATAGEM_DEVICES=cpu:4"
    ):
        inventory.logical()
    with pytest.raises(DeviceConfigurationError):
        parse(text)


def test_program_that_divides_the_cpu_otherwise_is_told_of_the_contradiction(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_DEVICES", "cpu:4")
    with pytest.raises(
        DeviceConfigurationError, match=r"2 share\(s\) contradicts STRATAGEM_DEVICES='cpu:4'.*asks for 4"
    ):
        inventory.configure("cpu:0", [LogicalDeviceConfiguration()] * 2)
    inventory.configure("cpu:0", [LogicalDeviceConfiguration(memory_limit=64)] * 4)
    assert {device.memory_limit_bytes for device in inventory.logical()} == {64 * 2**20}


def test_program_that_chooses_other_devices_is_told_of_the_contradiction(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    monkeypatch.setenv("STRATAGEM_DEVICES", "gpu:2")
    with pytest.raises(DeviceConfigurationError, match=r"set_visible_devices.. contradicts STRATAGEM_DEVICES='gpu:2'"):
        inventory.set_visible([], "GPU")
    inventory.set_visible(["gpu:0", "gpu:1"], "GPU")
    monkeypatch.setenv("STRATAGEM_DEVICES", "cpu:2")
    with pytest.raises(DeviceConfigurationError, match=r"simulate_devices.'GPU', 2. contradicts .* leaves no GPU"):
        inventory.simulate("GPU", 2)


def test_device_that_was_not_asked_for_is_missed_with_the_reason(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    monkeypatch.setenv("STRATAGEM_DEVICES", "cpu:2")
    with pytest.raises(DeviceNotFoundError, match="STRATAGEM_DEVICES='cpu:2' does not name them"):
        inventory.resolve("gpu:0")
