"""Runs the example for clusters as a user would: alone, and with two workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "cluster.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_two_workers_print_once_and_learn_what_one_learns(tmp_path: Path) -> None:
    own = ["--epochs", "2", "--save"]
    alone = run(sys.executable, str(EXAMPLE), *own, str(tmp_path / "alone.pt"))
    together = run(
        *(sys.executable, "-m", "stratagem", "run", "--workers", "2", "--devices", "cpu:1"),
        *(str(EXAMPLE), *own, str(tmp_path / "together.pt")),
    )
    assert alone[0] == "1 replicas"
    assert together[0] == "2 replicas"
    assert together[1:] == alone[1:]
    assert len(alone) == 3
    one, other = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("alone", "together"))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-5)
