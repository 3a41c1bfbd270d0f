"""Checkpoints are whole or absent, and give back what was saved."""

import json
import os
import pickle
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import _tree
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriteError,
    StratagemWarning,
)
from stratagem.training import checkpoints
from stratagem.training.checkpoints import (
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


def test_keys_that_join_to_the_same_path_stay_apart(tmp_path: Path) -> None:
    state = {"a/b": 1, "a": {"b": 2, "b'": 3}, "c": {1: 4, "1": 5}, "d": [6], "d/0": 7, "\ud800": 8, r"\ud800": 9}
    tensors = _tree.map(lambda number: torch.full((2,), float(number)), state)
    restored = load_checkpoint(save_checkpoint(tmp_path, 1, tensors))
    assert _tree.map(lambda tensor: int(tensor[0]), restored) == state


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
    with pytest.raises(CheckpointCorruptError, match=r"sha256 is not the one in state\.json"):
        load_checkpoint(one)


def test_damage_is_described_with_the_sizes(tmp_path: Path) -> None:
    path = Path(save_checkpoint(tmp_path, 1, state_of(1)))
    size = (path / checkpoints.TENSORS).stat().st_size
    cut(path / checkpoints.TENSORS)
    with pytest.raises(CheckpointCorruptError, match=rf"\(size {size - 1}, expected {size}\)"):
        load_checkpoint(path)


def test_new_checkpoint_is_kept_though_a_damaged_one_has_a_later_step(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, state_of(step))
    cut(tmp_path / "model.ckpt-6" / checkpoints.TENSORS)
    save_checkpoint(tmp_path, 5, state_of(5), keep_max=1)
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [5]


def with_header(header: Any, num_bytes: int = 24) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def entry(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "length": (2**60).to_bytes(8, "little") + b"{}",
    "object": pickle.dumps({"weight": torch.ones(2)}),
    "shape": with_header({"weight": entry(0, 24, 2**40)}),
    "overflow": with_header({"weight": entry(0, 24, 2**62, 4)}),
    "overlap": with_header({"weight": entry(0, 24, 6), "other": entry(0, 24, 6)}),
    "outside": with_header({"weight": entry(0, 2**40, 2**38)}),
    "negative": with_header({"weight": entry(-8, 16, 6)}),
    "text": with_header("weight"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    path = Path(save_checkpoint(tmp_path, 1, state_of(1)))
    with pytest.raises(CheckpointCorruptError):
        load_spoilt(path, HOSTILE[kind])


def load_spoilt(path: Path, tensors: bytes) -> Any:
    (path / checkpoints.TENSORS).write_bytes(tensors)
    # Whoever can write tensors can write checksums too.
    header, text, _ = (path / checkpoints.STATE).read_text().split("\n", 2)
    sums = json.loads(header)["sums"]
    sums["tensors_sha256"] = checkpoints._digest(path / checkpoints.TENSORS)
    (path / checkpoints.STATE).write_text(json.dumps({"sums": sums}) + "\n" + text + "\n")
    return load_checkpoint(path)


def test_header_with_more_tensors_than_the_state_is_not_read(tmp_path: Path) -> None:
    path = Path(save_checkpoint(tmp_path, 1, state_of(1)))
    header = {f"tensor {number}": entry(4 * number, 4 * number + 4) for number in range(5000)}
    with pytest.raises(CheckpointCorruptError, match=r"its header says \d+ bytes, and the tensors of state.json need"):
        load_spoilt(path, with_header(header, 20_000))


PROGRAM = """
import sys, torch
from stratagem.training.checkpoints import save_checkpoint
save_checkpoint(sys.argv[1], 1, {"weight": torch.full((1_000_000,), 1.0)})
print("ready", flush=True)
for step in range(2, 10_000):
    save_checkpoint(sys.argv[1], step, {"weight": torch.full((1_000_000,), float(step))}, keep_max=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, *(pytest.param(each, marks=pytest.mark.soak) for each in (0.031, 0.062))])
def test_killed_while_saving_leaves_whole_checkpoints_only(tmp_path: Path, pause_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(pause_s)
    process.kill()
    process.wait()
    process.stdout.close()
    newest = latest_checkpoint(tmp_path)  # a warning would be an error
    assert newest is not None
    weight = load_checkpoint(newest)["weight"]
    assert torch.equal(weight, torch.full((1_000_000,), float(step_of(newest))))
    save_checkpoint(tmp_path, 20_000, state_of(1))
    assert all(name.startswith("model.ckpt-") for name in os.listdir(tmp_path))


KILLED_AT_EACH_POINT = """
import itertools, os, shutil, signal, sys, tempfile, torch
from pathlib import Path
from stratagem.training import checkpoints

folder, state = Path(sys.argv[1]), {"weight": torch.ones(5000)}
checkpoints.save_checkpoint(folder, 1, state)
checkpoints.save_checkpoint(folder, 2, state)

def save_and_die(number):
    points = itertools.count()
    def point():
        if next(points) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    def watched(function):
        def call(*args, **kwargs):
            point()
            result = function(*args, **kwargs)
            point()
            return result
        return call
    places = [(os, "fsync"), (os, "rename"), (shutil, "rmtree"), (tempfile, "mkdtemp"), (checkpoints, "save_file")]
    for owner, name in (*places, (checkpoints, "_swap")):
        setattr(owner, name, watched(getattr(owner, name)))
    # The same step again, and then the oldest is dropped.
    checkpoints.save_checkpoint(folder, 2, {"weight": torch.full((5000,), 2.0)})
    checkpoints.save_checkpoint(folder, 3, {"weight": torch.full((5000,), 3.0)}, keep_max=2)

for number in itertools.count():
    child = os.fork()
    if not child:
        save_and_die(number)
        os._exit(0)
    if os.WIFEXITED(os.waitpid(child, 0)[1]):
        break
    path = checkpoints.latest_checkpoint(folder)
    weight = checkpoints.load_checkpoint(path)["weight"]
    allowed = {2: (1.0, 2.0), 3: (3.0,)}[checkpoints.step_of(path)]
    assert len(weight) == 5000 and any(bool((weight == value).all()) for value in allowed), (number, path)
    shutil.rmtree(folder / "model.ckpt-3", ignore_errors=True)
    checkpoints.save_checkpoint(folder, 1, state)
    checkpoints.save_checkpoint(folder, 2, state)
    assert sorted(os.listdir(folder)) == ["model.ckpt-1", "model.ckpt-2"], os.listdir(folder)
print(number)
"""


@pytest.mark.slow
def test_killed_at_any_point_of_saving_leaves_the_old_or_the_new_one_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", KILLED_AT_EACH_POINT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "it was killed at so many points"


def test_folder_that_another_program_is_writing_is_left_alone(tmp_path: Path) -> None:
    abandoned = tmp_path / f"{checkpoints._UNFINISHED}model.ckpt-7-x"
    abandoned.mkdir()
    with checkpoints.whole_folder(tmp_path / "exported") as draft:
        (draft / "weights").write_text("half")
        save_checkpoint(tmp_path, 1, state_of(1))
        (draft / "more").write_text("whole")
    assert sorted(os.listdir(tmp_path)) == ["exported", "model.ckpt-1"]
    assert sorted(os.listdir(tmp_path / "exported")) == ["more", "weights"]


FULL_DISK = """
import os, sys, torch
from stratagem.errors import CheckpointWriteError
from stratagem.training.checkpoints import latest_checkpoint, save_checkpoint
first = save_checkpoint(sys.argv[1], 1, {"weight": torch.ones(50_000)})
try:
    save_checkpoint(sys.argv[1], 2, {"weight": torch.ones(1_000_000)}, keep_max=1)
except CheckpointWriteError as error:
    print(error)
assert os.listdir(sys.argv[1]) == ["model.ckpt-1"] and latest_checkpoint(sys.argv[1]) == first
"""


@pytest.mark.slow
def test_full_disk_is_named_with_what_is_needed_and_the_one_before_stays(tmp_path: Path) -> None:
    program = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    mount = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} || exit 77; exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    if done.returncode in (1, 77) and "Error" not in done.stderr:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"No space left on device.*\(need 3\.8 MiB, free 0\.\d MiB\)", done.stdout), done.stdout


def test_failure_while_writing_changes_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # Python ignores the signal that goes with it
    try:
        with pytest.raises(CheckpointWriteError, match=r"model\.ckpt-2' could not be written"):
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
    with pytest.raises(CheckpointError, match=r"at most 16 MiB besides its tensors, got 1\d\.\d MiB"):
        save_checkpoint(tmp_path, 1, {"losses": [0.1234567890123456] * 900_000})
    assert os.listdir(tmp_path) == []


def test_states_that_are_none(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for state, message in (
        ({"deep": deep}, "nested too deep for a checkpoint"),
        ([1], "a dict of states by their names, got list"),
        ({"big": 10**5000}, "an int in a checkpoint has at most 10000 bits, state/big has more"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(tmp_path, 1, state)  # type: ignore[arg-type]
    assert all_checkpoints(tmp_path) == []


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
