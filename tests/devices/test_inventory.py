import os
from pathlib import Path

import pytest
import torch

from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.device import LogicalDeviceConfiguration, PhysicalDevice
from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.inventory import Inventory
from stratagem.errors import DeviceConfigurationError, DevicesInUseError, DeviceWarning
from tests.fakes import GIB, FakeTorchCuda, fake_host

Part = LogicalDeviceConfiguration


def with_gpus(root: Path, count: int, *, num_nvidia_gpus: int | None = None) -> tuple[Inventory, FakeTorchCuda]:
    """A machine whose torch sees `count` GPUs, through a fake in the place of `torch.cuda`."""
    fake = FakeTorchCuda(count)
    accelerator = TorchAccelerator("GPU", "cuda", fake)
    return Inventory(fake_host(root, num_nvidia_gpus=num_nvidia_gpus), [accelerator]), fake


def names(devices: list) -> list[str]:
    return [device.name for device in devices]


# What exists


def test_machine_has_one_cpu(inventory: Inventory) -> None:
    assert names(inventory.physical("CPU")) == ["/physical_device:CPU:0"]
    assert names(inventory.logical("cpu")) == ["/device:CPU:0"]
    details = inventory.details("cpu:0")
    assert details.num_cores == len(inventory.host.cores())
    assert details.total_memory_bytes == inventory.host.total_memory_bytes()


def test_tpus_may_be_asked_for_and_there_are_none(inventory: Inventory) -> None:
    for listed in (inventory.physical, inventory.logical, inventory.visible):
        assert listed("TPU") == []
    inventory.set_visible([], "tpu")
    with pytest.raises(DeviceConfigurationError, match="CPU:0 is not a TPU"):
        inventory.set_visible("cpu:0", "TPU")


def test_gpus_are_listed_without_waking_their_driver(tmp_path: Path) -> None:
    inventory, fake = with_gpus(tmp_path, 2)
    assert names(inventory.physical()) == ["/physical_device:CPU:0", "/physical_device:GPU:0", "/physical_device:GPU:1"]
    assert names(inventory.logical("GPU")) == ["/device:GPU:0", "/device:GPU:1"]
    assert not fake.initialized
    assert inventory.details("gpu:1").device_name == "Fake A100"
    assert inventory.logical("GPU")[1].torch_device == torch.device("cuda:1")


def test_simulated_gpus_look_like_real_ones(inventory: Inventory) -> None:
    made = inventory.simulate("GPU", 4, memory_limit=512)
    assert made == inventory.physical("GPU")
    assert names(made) == [f"/physical_device:GPU:{index}" for index in range(4)]
    assert names(inventory.logical("GPU")) == [f"/device:GPU:{index}" for index in range(4)]
    assert {device.memory_limit_bytes for device in inventory.logical("GPU")} == {512 * 2**20}
    assert {device.torch_device for device in inventory.logical("GPU")} == {torch.device("cpu")}
    assert all(device.simulated and device.cores for device in inventory.logical("GPU"))
    assert inventory.details("gpu:3").total_memory_bytes == 512 * 2**20


def test_simulated_gpus_come_from_the_environment_too(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4,xpu:2:64")
    assert len(inventory.physical("GPU")) == 4
    assert inventory.details("xpu:1").total_memory_bytes == 64 * 2**20
    inventory.simulate("GPU", 2)
    assert len(inventory.physical("GPU")) == 2, "a call in the program goes before the environment"


def test_simulated_gpus_take_the_place_of_real_ones(tmp_path: Path) -> None:
    inventory, _ = with_gpus(tmp_path, 1)
    inventory.configure("gpu:0", [Part(memory_limit=1024)] * 2)
    inventory.simulate("GPU", 3, memory_limit=64)
    assert [device.simulated for device in inventory.physical("GPU")] == [True] * 3
    assert len(inventory.logical("GPU")) == 3, "the division of the real one is gone with it"


# What is visible


@pytest.mark.parametrize(
    ("text", "behind"),
    [("1", [1]), ("0,1", [0, 1]), ("0,2,3", [0, 2, 3]), ("", []), ("3,0", [3, 0]), ("-1", [])],
)
def test_cuda_visible_devices_renumbers_from_zero(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch, text: str, behind: list[int]
) -> None:
    inventory.simulate("GPU", 4)
    cores = [device.cores for device in inventory.logical("GPU")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert names(inventory.physical("GPU")) == [f"/physical_device:GPU:{index}" for index in range(len(behind))]
    assert names(inventory.logical("GPU")) == [f"/device:GPU:{index}" for index in range(len(behind))]
    assert [device.cores for device in inventory.logical("GPU")] == [cores[index] for index in behind]


def test_cuda_visible_devices_can_be_set_by_the_program_itself(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:8")
    assert len(inventory.physical("GPU")) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert len(inventory.physical("GPU")) == 4


def test_bad_index_in_cuda_visible_devices_warns_once_at_the_users_line(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory.simulate("GPU", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7,1")
    with pytest.warns(DeviceWarning, match="there is no GPU 7 among 2") as caught:
        seen = inventory.physical("GPU")
    assert caught[0].filename == __file__
    assert inventory.physical("GPU") == seen == [PhysicalDevice("GPU", 0, simulated=True)]


def test_bad_index_in_cuda_visible_devices_warns_for_real_gpus_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory, _ = with_gpus(tmp_path, 1, num_nvidia_gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    with pytest.warns(DeviceWarning, match="there is no GPU 7 among 2"):
        inventory.physical("GPU")


def test_uuids_are_left_to_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory, _ = with_gpus(tmp_path, 1, num_nvidia_gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert len(inventory.physical("GPU")) == 1


def test_visible_device_that_the_environment_took_away_is_warned_of(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    inventory.set_visible(["gpu:3", "gpu:0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.warns(DeviceWarning, match="GPU:3 was made visible, but does not exist any more"):
        left = inventory.logical("GPU")
    assert names(left) == ["/device:GPU:0"]
    monkeypatch.delenv("STRATAGEM_SIMULATE")
    with pytest.warns(DeviceWarning, match="GPU:0 was made visible"):
        left = inventory.logical("GPU")
    assert not [device for device in left if device.simulated]


def test_shares_stay_the_same_while_this_process_runs_on_fewer_cores(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as eight_cores:
        eight_cores.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        inventory.simulate("GPU", 4, memory_limit=64)
        before = inventory.logical()
        eight_cores.setattr(os, "sched_getaffinity", lambda _: {2, 3})
        assert inventory.logical() == before
    assert [device.cores for device in before[1:]] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_visible_devices_become_logical_ones_in_the_order_given(inventory: Inventory) -> None:
    gpus = inventory.simulate("GPU", 4)
    inventory.set_visible([gpus[3], gpus[1]], "GPU")
    assert inventory.visible("GPU") == [gpus[3], gpus[1]]
    assert [device.physical for device in inventory.logical("GPU")] == [gpus[3], gpus[1]]
    assert names(inventory.logical("GPU")) == ["/device:GPU:0", "/device:GPU:1"]
    assert inventory.physical("GPU") == gpus


def test_visible_devices_can_be_hidden_by_kind_or_all_at_once(inventory: Inventory) -> None:
    gpus = inventory.simulate("GPU", 2)
    inventory.simulate("XPU", 2)
    inventory.set_visible(gpus[0])
    assert inventory.visible() == [PhysicalDevice("CPU", 0), gpus[0]]
    inventory.set_visible([], "GPU")
    assert names(inventory.logical()) == ["/device:CPU:0"]
    inventory.set_visible(["xpu:1", "/physical_device:GPU:1"])
    assert names(inventory.visible()) == ["/physical_device:CPU:0", "/physical_device:GPU:1", "/physical_device:XPU:1"]


# How it is divided


def test_cpu_is_divided_into_logical_devices(inventory: Inventory) -> None:
    parts = [Part(memory_limit=512), Part(), Part(memory_fraction=0.1)]
    inventory.configure("cpu:0", parts)
    assert names(inventory.logical("CPU")) == ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]
    assert inventory.configuration("cpu:0") == parts
    assert [device.memory_limit_bytes is None for device in inventory.logical("CPU")] == [False, True, False]
    assert all(device.cores and device.num_threads for device in inventory.logical("CPU"))


def test_gpu_is_divided_into_shares_of_its_memory(tmp_path: Path) -> None:
    inventory, _ = with_gpus(tmp_path, 2)
    inventory.configure("cuda:0", [Part(memory_limit=4096), Part()])
    inventory.set_growth("cuda:0", False)
    first, second, third = inventory.logical("GPU")
    assert (first.memory_limit_bytes, second.memory_limit_bytes, third.memory_limit_bytes) == (4 * GIB, 12 * GIB, None)
    assert (first.memory_growth, second.memory_growth, third.memory_growth) == (False, False, True)
    assert [str(device.torch_device) for device in (first, second, third)] == ["cuda:0", "cuda:0", "cuda:1"]


def test_memory_growth_of_a_kind_is_that_of_all_its_devices(inventory: Inventory) -> None:
    inventory.simulate("GPU", 3)
    inventory.set_growth("GPU", False)
    assert [inventory.growth(each) for each in inventory.physical("GPU")] == [False] * 3
    inventory.set_growth("gpu:1", True)
    assert [inventory.growth(each) for each in inventory.physical("GPU")] == [False, True, False]


def test_simulated_gpu_can_be_divided(inventory: Inventory) -> None:
    inventory.simulate("GPU", 2, memory_limit=512)
    inventory.configure("gpu:1", [Part(memory_limit=128), Part()])
    sizes = [device.memory_limit_bytes // 2**20 for device in inventory.logical("GPU")]
    assert sizes == [512, 128, 384]


def test_division_can_be_changed_until_devices_are_in_use(inventory: Inventory) -> None:
    inventory.configure("cpu:0", [Part()] * 4)
    assert len(inventory.logical("CPU")) == 4
    inventory.configure("cpu:0", [Part()] * 2)
    assert len(inventory.logical("CPU")) == 2


def test_limit_and_growth_can_be_combined(inventory: Inventory) -> None:
    inventory.simulate("GPU", 1, memory_limit=512)
    inventory.configure("gpu:0", [Part(memory_limit=256)])
    inventory.set_growth("gpu:0", True)
    (device,) = inventory.logical("GPU")
    assert device.memory_growth
    assert device.memory_limit_bytes == 256 * 2**20


def test_refused_change_leaves_everything_as_it_was(inventory: Inventory) -> None:
    inventory.configure("cpu:0", [Part()] * 2)
    with pytest.raises(ValueError, match="is above its"):
        inventory.configure("cpu:0", [Part(memory_limit=10**9)])
    assert len(inventory.logical("CPU")) == 2


# Finding one by name


@pytest.mark.parametrize(
    "name",
    [
        "gpu:1",
        "cuda:1",
        "/device:GPU:1",
        "/job:localhost/replica:0/task:0/device:GPU:1",
        DeviceSpec(device_type="GPU", device_index=1),
        torch.device("cuda:1"),
    ],
)
def test_device_is_found_under_every_name(inventory: Inventory, name: object) -> None:
    inventory.simulate("GPU", 2)
    assert inventory.resolve(name) == inventory.logical("GPU")[1]  # type: ignore[arg-type]
    assert inventory.resolve(inventory.logical("GPU")[1]) == inventory.logical("GPU")[1]
    assert inventory.resolve("gpu") == inventory.logical("GPU")[0]


def test_selection_takes_the_cpu_where_there_is_nothing_better(tmp_path: Path) -> None:
    inventory = Inventory(fake_host(tmp_path), [])
    inventory.configure("cpu:0", [Part()] * 3)
    assert names(inventory.select()) == ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]


def test_selection_takes_the_best_kind_by_default(inventory: Inventory) -> None:
    inventory.configure("cpu:0", [Part()] * 3)
    inventory.simulate("GPU", 2)
    assert names(inventory.select()) == ["/device:GPU:0", "/device:GPU:1"]
    assert names(inventory.select(["cpu:2", "cpu:0"])) == ["/device:CPU:2", "/device:CPU:0"]


# Being in use


def test_changes_are_refused_while_devices_are_in_use_and_allowed_after(inventory: Inventory) -> None:
    inventory.simulate("GPU", 2)
    with inventory.in_use("MirroredStrategy()"):
        for change in (
            lambda: inventory.configure("cpu:0", [Part()]),
            lambda: inventory.set_visible([], "GPU"),
            lambda: inventory.set_growth("gpu:0", True),
            lambda: inventory.simulate("GPU", 3),
        ):
            with pytest.raises(DevicesInUseError, match=r"in use by MirroredStrategy\(\) at .*test_inventory\.py:\d+"):
                change()
    inventory.simulate("GPU", 3)
