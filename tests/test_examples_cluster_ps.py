"""Runs the example of parameter servers in a cluster as a user would, and checks what it shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "parameter_server_cluster.py"


@pytest.mark.timeout(120)
def test_workers_train_servers_serve_and_the_evaluator_tests_every_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stratagem", "run", "--workers", "2", "--ps", "1", "--evaluator", "-v"]
    done = subprocess.run(
        [*command, str(EXAMPLE), str(tmp_path), "--epochs", "6"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"\[worker/0\] epoch +\d+: loss \S+, (\d+) of 264 pushes", done.stdout)
    pushes = [int(number) for number in lines]
    assert len(pushes) == 6
    assert pushes == sorted(pushes)
    tested = re.findall(r"\[evaluator/0\] checkpoint (\d+): test accuracy (\S+)%", done.stdout)
    assert {int(step) for step, _ in tested} <= set(pushes)
    assert int(tested[-1][0]) == pushes[-1]
    assert float(tested[-1][1]) > 90
    assert len(re.findall(r"worker/\d: staleness of its pushes \{\d: \{0: ", done.stdout)) == 2
