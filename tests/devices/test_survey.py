import json
from pathlib import Path

import pytest
import torch

from stratagem.devices import kind_table
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.inventory import Inventory
from stratagem.devices.survey import survey
from stratagem.devices.vendors import cuda
from tests.fakes import FakeTorchCuda, fake_host


def with_gpus(root: Path, count: int, num_nvidia_gpus: int | None) -> Inventory:
    gpus = TorchAccelerator("GPU", "cuda", FakeTorchCuda(count), describe=cuda.described)
    return Inventory(fake_host(root, num_nvidia_gpus=num_nvidia_gpus), [gpus])


def test_survey_reports_every_device_with_its_details(tmp_path: Path) -> None:
    report = survey(with_gpus(tmp_path, 2, 2)).as_dict()
    assert [each["name"] for each in report["physical_devices"]] == [
        "/physical_device:CPU:0",
        "/physical_device:GPU:0",
        "/physical_device:GPU:1",
    ]
    assert report["physical_devices"][1]["device_name"] == "Fake A100"
    assert report["physical_devices"][1]["compute_capability"] == (8, 0)
    assert report["physical_devices"][0]["memory_used_bytes"] == 7 * 2**30
    assert [each["torch_device"] for each in report["logical_devices"]] == ["cpu", "cuda:0", "cuda:1"]
    assert report["notes"] == []
    assert json.loads(json.dumps(report))["torch"] == torch.__version__


def test_survey_shows_what_is_simulated_and_hidden(inventory: Inventory) -> None:
    inventory.simulate("GPU", 2, memory_limit=64)
    inventory.set_visible(["gpu:1"])
    found = survey(inventory)
    assert [each.visible for each in found.physical if each.device.simulated] == [False, True]
    assert [device.name for device in found.logical] == ["/device:CPU:0", "/device:GPU:0"]
    assert "GPU devices are simulated by shares of the CPU" in found.notes


def test_survey_explains_a_cpu_build_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_table, "is_cpu_build", lambda: True)
    (note,) = survey(with_gpus(tmp_path, 0, 2)).notes
    assert "is a CPU build and cannot see accelerators although this machine has 2 NVIDIA GPU(s)" in note
    assert "STRATAGEM_SIMULATE=gpu:2" in note


def test_survey_explains_gpus_that_a_variable_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_table, "is_cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert survey(with_gpus(tmp_path, 1, 4)).notes == ["CUDA_VISIBLE_DEVICES='1' hides 3 of 4 GPU(s)"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (note,) = survey(with_gpus(tmp_path / "none", 0, 4)).notes
    assert "no GPU: CUDA_VISIBLE_DEVICES='' hides 4 of 4 GPU(s)" in note


def test_survey_notes_what_is_wrong_in_the_environment(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:2")
    monkeypatch.setenv("STRATAGEM_SIMULAT", "gpu:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5")
    notes = survey(inventory).notes
    assert any("there is no GPU 5 among 2" in note for note in notes)
    assert any("STRATAGEM_SIMULAT is not a variable" in note and "STRATAGEM_SIMULATE?" in note for note in notes)


def test_survey_says_that_a_variable_hides_simulated_devices(
    inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert survey(inventory).notes == ["GPU devices are simulated, but CUDA_VISIBLE_DEVICES='' hides all of them"]


def test_survey_says_when_torch_was_built_for_gpus_and_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind_table, "is_cpu_build", lambda: False)
    (note,) = survey(with_gpus(tmp_path, 0, None)).notes
    assert f"torch {torch.__version__} finds no GPU" in note
