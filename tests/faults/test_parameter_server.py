"""Workers that die, stop or crash while they push: nothing is half done, nothing is done twice, the rest go on."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ReplicaDiedError

PATIENCE_S = 30.0
NUM_STEPS = 12


@pytest.fixture
def strategy(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(num_workers=2, num_ps=2) as made:
        yield made


def took(path: str) -> bool:
    """Whether this process is one that takes a file of this name away, or of a longer one."""
    for found in Path(path).parent.glob(f"{Path(path).name}*"):
        try:
            found.unlink()
        except FileNotFoundError:
            continue
        return True
    return False


class Dying(torch.optim.Optimizer):
    """Subtracts the gradient; where a file says so, it is hit by a signal when it has done one parameter."""

    def __init__(self, params: Any, path: str, number: int) -> None:
        super().__init__(params, {"lr": 1.0, "path": path, "number": number})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if place == 1 and took(group["path"]):
                    os.kill(os.getpid(), group["number"])
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["total"] = state.get("total", torch.zeros_like(parameter)) + parameter.grad
                    parameter.sub_(parameter.grad)


def make_model(strategy: sg.ParameterServerStrategy, path: Path, number: int) -> tuple[nn.Module, Dying]:
    with strategy.scope():
        model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model, Dying(model.parameters(), str(path), number)


def step(model: nn.Module, optimizer: Dying, then: str = "") -> int:
    optimizer.zero_grad()
    sum(each.sum() for each in model.parameters()).backward()
    optimizer.step()
    if then and took(then):
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def assert_each_step_counted_once(model: nn.Module, optimizer: Dying, num_steps: int = NUM_STEPS) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, torch.full_like(value, -num_steps)), name
    for state in optimizer.state_dict()["state"].values():
        assert torch.equal(state["total"], torch.full_like(state["total"], num_steps))


@pytest.mark.parametrize(
    ("number", "num_victims"),
    [(signal.SIGKILL, 2), (signal.SIGTERM, 1), (signal.SIGSTOP, 1)],
    ids=["all killed", "terminated", "stopped"],
)
def test_push_that_is_cut_short_is_undone_and_made_by_another(
    strategy: sg.ParameterServerStrategy, tmp_path: Path, number: int, num_victims: int
) -> None:  # F13, F15, F16
    model, optimizer = make_model(strategy, tmp_path / "die", number)
    for _ in range(2):
        strategy.run(step, args=(model, optimizer)).wait()
    for victim in range(num_victims):
        (tmp_path / f"die-{victim}").touch()
    results = [strategy.run(step, args=(model, optimizer)) for _ in range(NUM_STEPS - 2)]
    for each in results:
        each.wait()
    assert not list(tmp_path.iterdir())
    assert_each_step_counted_once(model, optimizer)


def test_step_whose_worker_dies_after_its_push_is_not_pushed_twice(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    model, optimizer = make_model(strategy, tmp_path / "never", signal.SIGKILL)
    dropped = make_model(strategy, tmp_path / "never", signal.SIGKILL)
    strategy.run(step, args=dropped).wait()
    (tmp_path / "then").touch()
    results = [strategy.run(step, args=(model, optimizer, str(tmp_path / "then"))) for _ in range(2)]
    del dropped  # the new worker is told to drop what it never had
    gc.collect()
    for each in results:
        each.wait()
    assert not (tmp_path / "then").exists()
    for _ in range(NUM_STEPS - 2):
        strategy.run(step, args=(model, optimizer))
    assert_each_step_counted_once(model, optimizer)


def test_statistics_of_a_step_whose_worker_dies_count_once_with_backup_workers(four_cpus: None, tmp_path: Path) -> None:
    with sg.ParameterServerStrategy(3, consistency=sg.Synchronous(backup_workers=1)) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
            model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model.seen += len(x)
            model(x).mean().backward()
            optimizer.step()
            if took(str(tmp_path / "die")):
                os.kill(os.getpid(), signal.SIGKILL)

        for number in range(1, 4):
            if number == 2:
                (tmp_path / "die").touch()
            (batch,) = strategy.distribute(torch.ones(6, 1), global_batch_size=6)
            strategy.run(train, args=(batch,))
            assert model.state_dict()["seen"].item() == 6 * number
        assert not (tmp_path / "die").exists()


def test_new_worker_has_everything_and_idle_ones_may_die(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> tuple[int, bool, float]:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        return os.getpid(), model.training, optimizer.param_groups[0]["lr"]

    def run() -> set[Any]:
        results = [strategy.run(train, args=(torch.randn(4, 2),)) for _ in range(6)]
        return {strategy.local_results(each)[0] for each in results}

    before = run()
    model.eval()
    optimizer.param_groups[0]["lr"] = 0.01
    for pid, _, _ in before:
        os.kill(pid, signal.SIGKILL)
    after = run()
    assert not {pid for pid, _, _ in before} & {pid for pid, _, _ in after}
    assert {(training, lr) for _, training, lr in after} == {(False, 0.01)}
    assert optimizer.state_dict()["state"][0]["step"].item() == 12


def test_crash_loop_ends(four_cpus: None) -> None:
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with sg.ParameterServerStrategy(num_workers=2, max_restarts=5) as strategy:
        result = strategy.run(crash)
        with pytest.raises(ReplicaDiedError, match=r"given to 3 workers and each was lost: worker . .*SIGKILL"):
            result.wait()
        assert strategy.local_results(strategy.run(int)) == (0,)
        strategy.run(crash)
        with pytest.raises(ReplicaDiedError, match="gave up after 5 restarts in 600 s: worker"):
            wait_for_the_end(strategy)


def wait_for_the_end(strategy: sg.ParameterServerStrategy) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        strategy.run(time.sleep, args=(0.01,)).wait()


def test_workers_join_and_leave_while_others_train(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    model, optimizer = make_model(strategy, tmp_path / "never", signal.SIGKILL)

    def slow_step() -> int:
        time.sleep(0.02)
        return step(model, optimizer)

    pids: list[set[int]] = []
    num_steps, deadline = 0, time.monotonic() + PATIENCE_S
    for num_workers in (2, 3, 1):
        strategy.resize(num_workers)
        pids.append(set())
        while len(pids[-1]) < num_workers and time.monotonic() < deadline:
            results = [strategy.run(slow_step) for _ in range(NUM_STEPS)]
            pids[-1] |= {strategy.local_results(each)[0] for each in results}
            num_steps += NUM_STEPS
    assert [len(each) for each in pids] == [2, 3, 1]
    assert pids[0] < pids[1] > pids[2]
    assert_each_step_counted_once(model, optimizer, num_steps)


PROGRAM = """
import os, time, torch, stratagem as sg
strategy = sg.ParameterServerStrategy(num_workers=2)
def wait(seconds):
    time.sleep(seconds)
    return os.getpid()
pids = {strategy.local_results(each)[0] for each in [strategy.run(wait, args=(0.05,)) for _ in range(4)]}
for _ in range(2):
    strategy.run(wait, args=(600.0,))
print(*pids, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_main_program_is_killed() -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    with program:
        pids = [int(each) for each in program.stdout.readline().split()]  # type: ignore[union-attr]
        assert len(pids) == 2
        program.kill()
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False
