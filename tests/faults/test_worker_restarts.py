"""A worker that dies is started again with all others, and the job goes on from the last checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cluster import nursery
from tests.faults import estimator_program

pytestmark = pytest.mark.usefixtures("forked_tasks")


def train(folder: Path, *options: str, end: str | None = None) -> str:
    folder.mkdir()
    command = ["-m", "stratagem", "run", "--workers", "2", *options]
    program = [estimator_program.__file__, str(folder), *([end] if end else [])]
    done = nursery.run([*command, *program], 50, cwd=nursery.ROOT, launches=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / f"model.ckpt-{estimator_program.NUM_STEPS}" / "tensors.safetensors")


def test_a_job_goes_on_from_the_last_checkpoint_to_the_very_same_weights(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert train(undisturbed) == ""
    told = train(disturbed, "--max-restarts", "1", end="die")
    assert (disturbed / "died").exists()
    assert "worker/1 was killed by SIGKILL; starting all tasks again (restart 1 of 1)" in told
    expected = weights(undisturbed)
    for name, value in weights(disturbed).items():
        assert torch.equal(value, expected[name]), name


def test_a_worker_whose_machine_is_taken_away_lets_all_save_the_same_step(tmp_path: Path) -> None:  # F16
    told = train(tmp_path / "job", "--max-restarts", "1", end="terminate")
    assert (tmp_path / "job" / "died").exists()
    assert "ended with code 75; starting all tasks again (restart 1 of 1)" in told
    saved = {path.name for path in (tmp_path / "job" / "model").glob("model.ckpt-*")}
    assert saved == {f"model.ckpt-{step}" for step in (5, estimator_program.DEATH, estimator_program.NUM_STEPS)}
