"""`stratagem run --ps`: workers are replaced alone, servers come back together, and a crash loop ends."""

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stratagem import _env
from stratagem.cluster import token as tokens
from tests.cluster import nursery
from tests.cluster.tasks import free_ports

PROGRAM = Path(__file__).parent / "train_program.py"

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked_tasks")]


def launch(folder: Path, mode: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "stratagem", "run", "--workers", "2", *options, "-v", PROGRAM, folder, mode]
    return nursery.run(command, 110, launches=True)


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


ENDS_WITHOUT_CLOSING = """
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
"""


def test_worker_that_ends_without_closing_its_strategy_has_left(tmp_path: Path) -> None:
    tokens.create(tmp_path / "secrets" / "token")
    first, second, third = (f"127.0.0.1:{port}" for port in free_ports(3))
    cluster = {"worker": [first, second], "ps": [third]}
    with contextlib.ExitStack() as stack:
        started = []
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1)):
            place = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            own = {_env.TF_CONFIG: place, _env.TOKEN_FILE: str(tmp_path / "secrets" / "token")}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            program = nursery.Program(["-c", ENDS_WITHOUT_CLOSING], env={**os.environ, **own}, **pipes)
            started.append(stack.enter_context(program))
            stack.callback(program.kill)
        _, *workers = started
        for program, version in zip(workers, (3, 5), strict=True):
            out, err = program.communicate(timeout=100)
            assert (program.returncode, err) == (0, "")
            assert out.endswith(f" ends at version {version}\n")
