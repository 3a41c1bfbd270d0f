"""Runs the examples of parameter servers in a cluster as a user would, and checks what they show."""

import re
from pathlib import Path

import pytest

from tests.cluster import nursery

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.usefixtures("forked_tasks")


def launched(name: str, folder: Path, *options: str) -> str:
    """What all tasks of a cluster have printed."""
    command = ["-m", "stratagem", "run", "--workers", "2", "--ps", "1", "--evaluator", "-v"]
    done = nursery.run([*command, EXAMPLES / name, folder, *options], 110, launches=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_workers_train_servers_serve_and_the_evaluator_tests_every_checkpoint(tmp_path: Path) -> None:
    shown = launched("parameter_server_cluster.py", tmp_path, "--epochs", "6")
    lines = re.findall(r"\[worker/0\] epoch +\d+: loss \S+, (\d+) of 264 pushes", shown)
    pushes = [int(number) for number in lines]
    assert len(pushes) == 6
    assert pushes == sorted(pushes)
    tested = re.findall(r"\[evaluator/0\] checkpoint (\d+): test accuracy (\S+)%", shown)
    assert {int(step) for step, _ in tested} <= set(pushes)
    assert int(tested[-1][0]) == pushes[-1]
    assert float(tested[-1][1]) > 90
    assert len(re.findall(r"worker/\d: staleness of its pushes \{\d: \{0: ", shown)) == 2


@pytest.mark.timeout(120)
def test_estimator_trains_in_workers_and_is_evaluated_in_the_evaluator(tmp_path: Path) -> None:
    shown = launched("parameter_server_estimator.py", tmp_path, "--steps", "80")
    assert sorted(re.findall(r"\[(worker/\d)\] worker/\d: \d+ pushes of all workers", shown)) == [
        "worker/0",
        "worker/1",
    ]
    ((who, step, accuracy),) = re.findall(r"\[(\S+)\] step (\d+): test accuracy (\S+)%", shown)
    assert (who, step) == ("evaluator/0", "80")
    assert float(accuracy) > 70
    assert {each.name for each in tmp_path.glob("model.ckpt-*")} == {"model.ckpt-40", "model.ckpt-80"}
