"""Checkpoints are whole or absent, and give back what was saved."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.errors import StratagemWarning
from stratagem.training import checkpoints
from stratagem.training.checkpoints import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    all_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    require_fit,
    save_checkpoint,
    step_of,
)


def state_of(number: float) -> dict[str, Any]:
    return {"module": {"weight": torch.full((3, 2), number)}, "step": number}


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.8, 0.9))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "mixed": [1, 2.5, "text", None, True, (float("inf"), [])],
        "types": {"half": torch.ones(2, dtype=torch.float16), "bytes": torch.arange(4, dtype=torch.uint8)},
        "none": torch.empty(0, 3),
        "number": torch.tensor(7),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, state))
    assert loaded["mixed"] == state["mixed"]
    assert loaded["none"].shape == (0, 3)
    assert loaded["number"].item() == 7
    assert loaded["types"]["half"].dtype == torch.float16
    assert torch.equal(loaded["types"]["bytes"], torch.arange(4, dtype=torch.uint8))
    assert loaded["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert list(loaded["optimizer"]["state"]) == [0, 1]
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            assert torch.equal(loaded["optimizer"]["state"][index][name], value)


def test_tensors_that_share_memory_come_back(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {"whole": whole, "same": whole, "part": whole[2:4]}))
    assert torch.equal(loaded["whole"], whole)
    assert torch.equal(loaded["same"], whole)
    assert torch.equal(loaded["part"], whole[2:4])


def test_oldest_are_dropped_and_the_newest_is_found(tmp_path: Path) -> None:
    for step in (2, 9, 10, 11):
        save_checkpoint(tmp_path, step, state_of(step), keep_max=3)
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [9, 10, 11]
    newest = latest_checkpoint(tmp_path)
    assert newest == str(tmp_path / "model.ckpt-11")
    assert load_checkpoint(newest)["step"] == 11


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    path = save_checkpoint(tmp_path, 1, state_of(5))
    assert load_checkpoint(path)["step"] == 5
    assert os.listdir(tmp_path) == ["model.ckpt-1"]


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def make_a_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES: list[Callable[[Path], object]] = [cut, flip, Path.unlink, make_a_link, lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("file", [checkpoints.TENSORS, checkpoints.STATE])
@pytest.mark.parametrize("damage", DAMAGES, ids=["cut", "flip", "missing", "link", "empty"])
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], object], file: str
) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    path = Path(save_checkpoint(tmp_path, 2, state_of(2)))
    damage(path / file)
    with pytest.raises(CheckpointCorruptError, match=r"model\.ckpt-2"):
        load_checkpoint(path)
    with pytest.warns(StratagemWarning, match=r"model\.ckpt-2.*is damaged.*taking the checkpoint before it"):
        assert latest_checkpoint(tmp_path) == str(tmp_path / "model.ckpt-1")


def test_tensors_of_another_run_are_noticed(tmp_path: Path) -> None:
    one = Path(save_checkpoint(tmp_path / "one", 1, state_of(1)))
    other = Path(save_checkpoint(tmp_path / "other", 1, state_of(2)))
    (one / checkpoints.TENSORS).write_bytes((other / checkpoints.TENSORS).read_bytes())
    with pytest.raises(CheckpointCorruptError, match="checksum"):
        load_checkpoint(one)


def test_header_that_asks_for_too_much_memory_is_refused(tmp_path: Path) -> None:
    path = Path(save_checkpoint(tmp_path, 1, state_of(1)))
    hostile = (2**60).to_bytes(8, "little") + b"{}"
    (path / checkpoints.TENSORS).write_bytes(hostile)
    # Whoever can write tensors can write checksums too.
    header, text, _ = (path / checkpoints.STATE).read_text().split("\n", 2)
    sums = json.loads(header)["sums"]
    sums["tensors_sha256"] = checkpoints._digest(path / checkpoints.TENSORS)
    (path / checkpoints.STATE).write_text(json.dumps({"sums": sums}) + "\n" + text + "\n")
    with pytest.raises(CheckpointCorruptError):
        load_checkpoint(path)


PROGRAM = """
import sys, torch
from stratagem.training.checkpoints import save_checkpoint
save_checkpoint(sys.argv[1], 1, {"weight": torch.full((1_000_000,), 1.0)})
print("ready", flush=True)
for step in range(2, 10_000):
    save_checkpoint(sys.argv[1], step, {"weight": torch.full((1_000_000,), float(step))}, keep_max=2)
"""


@pytest.mark.slow
def test_killed_while_saving_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.013 * attempt)
        process.kill()
        process.wait()
        process.stdout.close()
        newest = latest_checkpoint(folder)  # a warning would be an error
        assert newest is not None
        weight = load_checkpoint(newest)["weight"]
        assert torch.equal(weight, torch.full((1_000_000,), float(step_of(newest))))
        save_checkpoint(folder, 20_000, state_of(1))
        assert all(name.startswith("model.ckpt-") for name in os.listdir(folder))


def test_failure_while_writing_changes_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # Python ignores the signal that goes with it
    try:
        with pytest.raises(CheckpointError, match=r"model\.ckpt-2' could not be written"):
            save_checkpoint(tmp_path, 2, {"weight": torch.ones(100_000)}, keep_max=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["model.ckpt-1"]
    assert load_checkpoint(tmp_path / "model.ckpt-1")["step"] == 1


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got function .* as state/scheduler/fn"):
        save_checkpoint(tmp_path, 1, {"scheduler": {"fn": state_of}})
    with pytest.raises(CheckpointError, match="dense tensors"):
        save_checkpoint(tmp_path, 1, {"weight": torch.eye(2).to_sparse()})
    assert os.listdir(tmp_path) == []


def test_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "model.ckpt-3")
    with pytest.raises(CheckpointError, match=r"named model\.ckpt-STEP, got 'weights'"):
        step_of("weights")
    assert latest_checkpoint(tmp_path / "none") is None


def test_difference_between_models_is_named() -> None:
    saved = {"fc1.weight": torch.ones(8, 4), "old.bias": torch.ones(1)}
    wanted = {"fc1.weight": torch.ones(16, 4), "fc3.weight": torch.ones(2)}
    with pytest.raises(CheckpointMismatchError) as caught:
        require_fit("ckpt", saved, wanted)
    text = str(caught.value)
    assert "missing 'fc3.weight'" in text
    assert "extra 'old.bias'" in text
    assert "'fc1.weight' is (8, 4), the model has (16, 4)" in text
