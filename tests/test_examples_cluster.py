"""Runs the example for clusters as a user would: alone, and with two workers."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.cluster import nursery

EXAMPLE = Path(__file__).parents[1] / "examples" / "cluster.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def lines_of(done: "subprocess.CompletedProcess[str]") -> list[str]:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_two_workers_print_once_and_learn_what_one_learns(tmp_path: Path, forked_tasks: None) -> None:
    own = ["--epochs", "2", "--save"]
    alone = lines_of(nursery.run([EXAMPLE, *own, tmp_path / "alone.pt"], 110))
    command = ["-m", "stratagem", "run", "--workers", "2", "--devices", "cpu:1", EXAMPLE]
    together = lines_of(nursery.run([*command, *own, tmp_path / "together.pt"], 110, launches=True))
    assert alone[0] == "1 replicas"
    assert together[0] == "2 replicas"
    assert together[1:] == alone[1:]
    assert len(alone) == 3
    one, other = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("alone", "together"))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-5)
