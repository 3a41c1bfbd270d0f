"""Cases 1 to 6 of bad input, and their kin, through the functions that a user calls."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.devices import kind_table
from stratagem.devices.inventory import Inventory
from stratagem.errors import (
    DeviceConfigurationError,
    DeviceNotFoundError,
    DevicesInUseError,
    DeviceTypeError,
    EnvironmentVariableError,
    StratagemError,
    UnknownDeviceError,
)
from tests.fakes import fake_host

Part = sg.config.LogicalDeviceConfiguration


def two_gpus() -> None:
    sg.config.simulate_devices("GPU", 2, memory_limit=512)


CASES: list[tuple[str, Callable[[], object], type[StratagemError], list[str]]] = [
    (
        "unknown kind",
        lambda: sg.config.list_physical_devices("gpx"),
        UnknownDeviceError,
        ["'gpx'", "cpu, gpu", "tpu, xpu", "Did you mean 'gpu'?"],
    ),
    (
        "unknown device",
        lambda: sg.config.get_memory_info("gpx:0"),
        UnknownDeviceError,
        ["'gpx:0'", "Known kinds", "Did you mean 'gpu:0'?"],
    ),
    (
        "index out of range",
        lambda: sg.config.get_memory_info("cuda:3"),
        DeviceNotFoundError,
        ["cuda:3", "2 logical GPU device(s) (gpu:0, gpu:1)"],
    ),
    (
        "physical index out of range",
        lambda: sg.config.set_memory_growth("gpu:2", True),
        DeviceNotFoundError,
        ["gpu:2", "2 physical GPU device(s) (gpu:0, gpu:1)"],
    ),
    (
        "cpu index out of range",
        lambda: sg.config.get_memory_info("cpu:1"),
        DeviceNotFoundError,
        ["cpu:1", "1 logical CPU device(s) (cpu:0)", "set_logical_device_configuration"],
    ),
    (
        "device of another task",
        lambda: sg.config.get_memory_info("/job:worker/task:1/cpu:0"),
        DeviceNotFoundError,
        ["'/job:worker/task:1/device:CPU:0'", "another task", "/job:localhost"],
    ),
    (
        "no kind",
        lambda: sg.config.get_memory_info("/job:localhost"),
        DeviceNotFoundError,
        ["'/job:localhost'", "names no kind of device", "'cpu:0'"],
    ),
    (
        "listed twice",
        lambda: sg.config.set_visible_devices(["gpu:0", "cuda:0"]),
        DeviceConfigurationError,
        ["'/physical_device:GPU:0' is listed twice", "logical devices"],
    ),
    (
        "empty list",
        lambda: sg.config.set_visible_devices([]),
        DeviceConfigurationError,
        ["must not be empty", "set_visible_devices([], 'GPU')"],
    ),
    (
        "hidden cpu",
        lambda: sg.config.set_visible_devices([], "CPU"),
        DeviceConfigurationError,
        ["the CPU cannot be hidden"],
    ),
    (
        "device of another kind",
        lambda: sg.config.set_visible_devices(["cpu:0"], "GPU"),
        DeviceConfigurationError,
        ["/physical_device:CPU:0 is not a GPU", "leave the kind out"],
    ),
    ("number for devices", lambda: sg.config.set_visible_devices(2), DeviceTypeError, ["list of devices", "got 2"]),
    ("number for a device", lambda: sg.config.get_memory_info(0), DeviceTypeError, ["such as 'gpu:0'", "got 0"]),
    (
        "limit above the memory",
        lambda: sg.config.set_logical_device_configuration("gpu:0", [Part(memory_limit=65536)]),
        DeviceConfigurationError,
        ["64 GiB", "/physical_device:GPU:0", "above its 512 MiB", "add up to at most"],
    ),
    (
        "limit in bytes",
        lambda: sg.config.set_logical_device_configuration("gpu:0", [Part(memory_limit=2**28)]),
        DeviceConfigurationError,
        ["above its 512 MiB", "memory_limit is in MiB: for 256 MiB write 256"],
    ),
    (
        "number of shares",
        lambda: sg.config.set_logical_device_configuration("gpu:0", 4),
        DeviceTypeError,
        ["got 4", "[LogicalDeviceConfiguration()] * 4"],
    ),
    (
        "sum above the memory",
        lambda: sg.config.set_logical_device_configuration("gpu:0", [Part(memory_limit=300)] * 2),
        DeviceConfigurationError,
        ["add up to 600 MiB, it has 512 MiB", "lower them"],
    ),
    ("limit of nothing", lambda: Part(memory_limit=0), DeviceConfigurationError, ["number of MiB from 1 up", "got 0"]),
    (
        "no shares",
        lambda: sg.config.set_logical_device_configuration("gpu:0", []),
        DeviceConfigurationError,
        ["at least one share", "empty list"],
    ),
    (
        "growth of a cpu",
        lambda: sg.config.set_memory_growth("cpu:0", True),
        DeviceConfigurationError,
        ["a setting of GPUs", "/physical_device:CPU:0"],
    ),
    ("growth is not a truth", lambda: sg.config.set_memory_growth("gpu:0", 1), DeviceTypeError, ["True or False", "1"]),
    (
        "more than the machine",
        lambda: sg.config.simulate_devices("GPU", 2, memory_limit=10**8),
        DeviceConfigurationError,
        ["2 simulated GPUs", "this machine has", "lower memory_limit"],
    ),
    (
        "simulated cpu",
        lambda: sg.config.simulate_devices("CPU", 2),
        DeviceConfigurationError,
        ["divided, not simulated", "set_logical_device_configuration"],
    ),
    (
        "no device simulated",
        lambda: sg.config.simulate_devices("GPU", 0),
        DeviceConfigurationError,
        ["whole number from 1 up", "got 0"],
    ),
    (
        "logical for physical",
        lambda: sg.config.set_memory_growth(sg.config.list_logical_devices("GPU")[0], True),
        DeviceTypeError,
        ["is a logical device", "give '/physical_device:GPU:0'"],
    ),
    (
        "physical for logical",
        lambda: sg.config.get_memory_info(sg.config.list_physical_devices("GPU")[0]),
        DeviceTypeError,
        ["is a physical device"],
    ),
    ("nothing selected", lambda: sg.devices.this_process().select([]), DeviceConfigurationError, ["use all 2 devices"]),
    (
        "one selected twice",
        lambda: sg.devices.this_process().select(["gpu:0", "cuda:0"]),
        DeviceConfigurationError,
        ["'/device:GPU:0' is listed twice"],
    ),
    ("count for a list", lambda: sg.devices.this_process().select(4), DeviceTypeError, ["['cpu:0']", "got 4"]),
    ("text for a list", lambda: sg.devices.this_process().select("gpu:0"), DeviceTypeError, ["['cpu:0']", "'gpu:0'"]),
    ("truth for a list", lambda: sg.devices.this_process().select(True), DeviceTypeError, ["['cpu:0']", "got True"]),
]


@pytest.mark.parametrize(("call", "error", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_gets_a_clear_error_and_changes_nothing(
    call: Callable[[], object], error: type[StratagemError], words: list[str]
) -> None:
    two_gpus()
    before = sg.config.list_logical_devices()
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert sg.config.list_logical_devices() == before


def test_change_after_use_names_the_line_that_put_devices_in_use() -> None:
    with (
        sg.devices.serve("cpu:0"),
        pytest.raises(DevicesInUseError, match=r"in use by serve\('/device:CPU:0'\) at .*test_bad_input\.py:\d+; "),
    ):
        sg.config.set_logical_device_configuration("cpu:0", [Part()])


def test_division_that_a_device_has_may_be_asked_for_again_while_it_is_in_use() -> None:
    sg.config.set_logical_device_configuration("cpu:0", [Part(), Part()])
    with sg.devices.serve("cpu:0"):
        sg.config.set_logical_device_configuration("cpu:0", [Part(), Part()])
        with pytest.raises(DevicesInUseError):
            sg.config.set_logical_device_configuration("cpu:0", [Part()])
    assert len(sg.config.list_logical_devices("CPU")) == 2


def test_malformed_variable_is_an_error_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "four gpus")
    with pytest.raises(EnvironmentVariableError, match="STRATAGEM_SIMULATE='four gpus'"):
        sg.config.list_physical_devices()


def test_missing_gpu_says_that_torch_is_a_cpu_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_table, "is_cpu_build", lambda: True)
    with pytest.raises(DeviceNotFoundError) as caught:
        Inventory(fake_host(tmp_path), []).resolve("cuda:0")
    for words in ("cuda:0", "no visible GPU", f"torch {torch.__version__} is a CPU build", "simulate_devices('GPU'"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("num_nvidia_gpus", "words"), [(None, "='' is set and hides the GPUs"), (8, "='' hides 8 of 8 GPU(s)")]
)
def test_missing_gpu_says_that_the_mask_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_nvidia_gpus: int | None, words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceNotFoundError) as caught:
        Inventory(fake_host(tmp_path, num_nvidia_gpus=num_nvidia_gpus), []).resolve("cuda:0")
    assert f"CUDA_VISIBLE_DEVICES{words}" in str(caught.value)


def test_missing_simulated_gpu_quotes_the_mask_that_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(DeviceNotFoundError, match=r"1 logical GPU device.* \(gpu:0\); CUDA_VISIBLE_DEVICES='1' hides"):
        sg.config.get_memory_info("gpu:1")


def test_hidden_gpu_is_said_to_be_hidden() -> None:
    two_gpus()
    sg.config.set_visible_devices([], "GPU")
    with pytest.raises(DeviceNotFoundError, match="'gpu:0' does not exist: this process has hidden every GPU"):
        sg.config.get_memory_info("gpu:0")


def test_every_error_is_of_one_family_and_of_pythons_own() -> None:
    assert issubclass(sg.OutOfMemoryError, (StratagemError, torch.OutOfMemoryError, MemoryError))
    assert issubclass(DeviceNotFoundError, ValueError)
    assert issubclass(DeviceTypeError, TypeError)
    assert issubclass(DevicesInUseError, RuntimeError)


def test_devices_of_a_strategy_are_not_divided(inventory: Inventory) -> None:
    parts = [sg.config.LogicalDeviceConfiguration()] * 2
    for make in (sg.MirroredStrategy, lambda: sg.ParameterServerStrategy(1)):
        made = make()
        with pytest.raises(DevicesInUseError, match=rf"{type(made).__name__}\(\) at .*test_bad_input.py:\d+"):
            inventory.configure("cpu:0", parts)
        made.close()
    del made
    inventory.configure("cpu:0", parts)
