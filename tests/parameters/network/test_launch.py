"""`stratagem run --ps`: workers are replaced alone, servers come back together, and a crash loop ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "train_program.py"

pytestmark = pytest.mark.timeout(120)


def launch(folder: Path, mode: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stratagem", "run", "--workers", "2", *options, "-v", PROGRAM, folder, mode]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110, check=False)


def starts(folder: Path) -> dict[str, int]:
    return {each.name: len(each.read_text().split()) for each in folder.iterdir() if each.is_file()}


def test_killed_worker_is_replaced_and_killed_server_brings_all_back(tmp_path: Path) -> None:  # F13, F14, F15
    done = launch(tmp_path, "once", "--ps", "2", "--max-restarts", "3")
    assert done.returncode == 0, done.stderr
    assert "worker/1 was killed by SIGKILL; starting worker/1 again (restart 1 of 3)" in done.stderr
    # Then both at once: whichever is seen first, all come back.
    (number,) = re.findall(r"starting all tasks again \(restart (\d) of 3\)", done.stderr)
    assert f"succeeded after {number} restart(s)" in done.stderr
    found = starts(tmp_path)
    assert 3 <= found.pop("worker-1") <= int(number) + 1  # it may have been ended before it could say so
    assert found == {"worker-0": 2, "ps-0": 2, "ps-1": 2}
    (saved,) = [int(each.name.rpartition("-")[2]) for each in (tmp_path / "checkpoints").iterdir()]
    assert saved > 0
    resumed = set(re.findall(r"(worker/\d) goes on after (\d+)", done.stdout))
    assert resumed == {("worker/0", str(saved)), ("worker/1", str(saved))}
    assert done.stdout.count("ends at True") == 2


def test_worker_that_always_dies_ends_the_run(tmp_path: Path) -> None:  # F15
    done = launch(tmp_path, "loop", "--ps", "1", "--max-restarts", "2")
    assert done.returncode == 128 + 9
    assert "gave up after 2 restart(s)" in done.stderr
    assert done.stderr.count("worker/1 was killed by SIGKILL") >= 3
    assert starts(tmp_path)["worker-1"] == 3
    assert starts(tmp_path)["ps-0"] == 1


def test_worker_that_ends_without_closing_its_strategy_has_left(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import torch
import stratagem as sg

strategy = sg.ParameterServerStrategy(consistency=sg.Synchronous())
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

for _ in range(3 + 2 * strategy.input_pipeline[1]):
    strategy.run(step)
print(f"{strategy.task} ends at version {strategy.version}")
""")
    command = [sys.executable, "-m", "stratagem", "run", "--workers", "2", "--ps", "1", "--show", "worker/0,worker/1"]
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "worker/0 ends at version 3" in done.stdout
    assert "worker/1 ends at version 5" in done.stdout
