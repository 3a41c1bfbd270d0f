"""Workers that die, stop or crash while they push: nothing is half done, nothing is done twice, the rest go on."""

import gc
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.engine.queued.step import QueuedStep
from stratagem.errors import ReplicaDiedError
from stratagem.parameters.local.locks import Locks
from tests.cluster import nursery

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


def give(strategy: sg.ParameterServerStrategy, worker: int, function: Any, *args: Any) -> QueuedStep:
    """Gives a step to one of the workers."""
    workers = strategy.workers
    workers.prepare()
    made = workers.new_step(function, args, {}, worker=worker)
    workers.enter(made)
    return made


def wait_for(path: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


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


def test_push_that_is_cut_short_may_stay_half_done_and_is_not_made_again(four_cpus: None, tmp_path: Path) -> None:
    with sg.ParameterServerStrategy(num_workers=2, torn_pushes=True) as strategy:
        model, optimizer = make_model(strategy, tmp_path / "die", signal.SIGKILL)
        for _ in range(2):
            strategy.run(step, args=(model, optimizer)).wait()
        (tmp_path / "die").touch()
        results = [strategy.run(step, args=(model, optimizer)) for _ in range(NUM_STEPS - 2)]
        for each in results:
            each.wait()
        assert not list(tmp_path.iterdir())
        first, *others = (value.unique().tolist() for value in model.state_dict().values())
    assert first == [-NUM_STEPS]  # what the worker had done before it was killed
    assert others == [[1.0 - NUM_STEPS]] * len(others)  # what it had not, nobody has


@pytest.mark.parametrize("is_killed", [False, True], ids=["main program writes", "other worker is killed"])
def test_worker_that_is_stopped_in_a_push_does_not_stop_the_main_program(
    strategy: sg.ParameterServerStrategy, tmp_path: Path, is_killed: bool
) -> None:
    model, optimizer = make_model(strategy, tmp_path / "stop", signal.SIGSTOP)
    for worker in (0, 1):
        strategy.workers.wait_for(give(strategy, worker, step, model, optimizer))
    (tmp_path / "stop").touch()
    stopped, other = strategy.workers.scheduler.workers
    cut_short = give(strategy, 0, step, model, optimizer)
    deadline = time.monotonic() + PATIENCE_S
    while not stopped.process.is_stopped:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if is_killed:
        os.kill(other.process.pid, signal.SIGKILL)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(-2.0)  # what it was before
    results = [strategy.run(step, args=(model, optimizer)) for _ in range(2)]
    for each in results:
        each.wait()
    strategy.workers.wait_for(cut_short)
    causes = strategy.workers.scheduler.group.losses.causes
    assert len([cause for cause in causes if "was stopped for" in cause]) == 1
    assert_each_step_counted_once(model, optimizer, 5)


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


class FatalCargo:
    """Something whose receiver is killed if a file says so."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__ |= state
        if took(self.path):
            os.kill(os.getpid(), signal.SIGKILL)


def test_pushes_of_an_earlier_life_count_once_when_the_next_ends_before_the_step(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    strategy.resize(1)
    model, optimizer = make_model(strategy, tmp_path / "never", signal.SIGKILL)
    cargo = FatalCargo(str(tmp_path / "second"))

    def two_pushes(_: FatalCargo, first: str, second: str) -> None:
        step(model, optimizer)
        if took(first):
            Path(second).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer)

    (tmp_path / "first").touch()
    strategy.run(two_pushes, args=(cargo, str(tmp_path / "first"), cargo.path)).wait()
    assert not list(tmp_path.iterdir())
    assert len(strategy.workers.scheduler.group.losses.causes) == 2
    assert_each_step_counted_once(model, optimizer, 2)


def test_push_whose_worker_dies_before_it_is_counted_is_seen_by_all(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    model, optimizer = make_model(strategy, tmp_path / "never", signal.SIGKILL)
    num_shards = strategy.workers.begin().variables.memory.num_shards  # also the number of the lock of the count

    def die_before_it_is_counted(path: str) -> None:
        is_last = took(path)

        def held(locks: Locks, number: int, **options: Any) -> Any:
            if is_last and number == num_shards:
                os.kill(os.getpid(), signal.SIGKILL)
            return of_locks(locks, number, **options)

        of_locks, Locks.held = Locks.held, held  # type: ignore[method-assign]
        try:
            step(model, optimizer)
        finally:
            Locks.held = of_locks  # type: ignore[method-assign]

    def look() -> float:
        return next(model.parameters())[0, 0].item()

    strategy.workers.wait_for(give(strategy, 0, step, model, optimizer))
    assert strategy.workers.wait_for(give(strategy, 1, look)) == -1.0
    (tmp_path / "die").touch()
    strategy.workers.wait_for(give(strategy, 0, die_before_it_is_counted, str(tmp_path / "die")))
    assert not (tmp_path / "die").exists()
    assert strategy.workers.wait_for(give(strategy, 1, look)) == -2.0
    assert_each_step_counted_once(model, optimizer, 2)


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


def test_worker_that_dies_while_it_leaves_is_not_replaced(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    def die_once(path: str) -> int:
        time.sleep(0.3)
        if took(path):
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    (tmp_path / "die").touch()
    step = give(strategy, 1, die_once, str(tmp_path / "die"))
    step.worker = None  # whoever is left may have it then
    strategy.resize(1)
    (worker,) = strategy.workers.scheduler.workers
    assert not (tmp_path / "die").exists()
    assert strategy.workers.wait_for(step) == worker.process.pid


def test_worker_that_leaves_gets_no_more_steps(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    for _ in range(2):  # the one that stays has no room
        give(strategy, 0, wait_for, str(tmp_path / "stay"))
    coordinator = sg.ClusterCoordinator(strategy)
    values = [coordinator.schedule(wait_for, args=(str(tmp_path / "go"),)) for _ in range(12)]
    (tmp_path / "go").touch()
    strategy.resize(1)
    assert sum(each.is_done for each in values) <= 2  # those that it had
    (tmp_path / "stay").touch()
    coordinator.join()


def test_workers_can_leave_before_they_have_begun(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    strategy.resize(1)
    strategy.run(lambda: model.weight.shape).wait()
    assert list(strategy.workers.scheduler.group.members) == [0]


def test_workers_that_had_nothing_to_do_are_not_stalled(strategy: sg.ParameterServerStrategy) -> None:
    def let_time_pass() -> None:
        for worker in strategy.workers.scheduler.workers:
            worker.last_message_s -= 3600.0

    def make_data() -> range:
        time.sleep(0.3)  # long enough to be looked after
        return range(3)

    with strategy.scope():
        model = nn.Linear(1, 1)
    let_time_pass()
    first = strategy.local_results(strategy.run(lambda x: model(x).shape, args=(torch.ones(2, 1),)))
    assert first == (torch.Size([2, 1]),)
    pids = [worker.process.pid for worker in strategy.workers.scheduler.workers]
    let_time_pass()
    sg.ClusterCoordinator(strategy).create_per_worker_dataset(make_data)
    assert [worker.process.pid for worker in strategy.workers.scheduler.workers] == pids
    assert not strategy.workers.scheduler.group.losses.causes


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


def test_nothing_is_left_when_the_main_program_is_killed(forked_tasks: None) -> None:
    program = nursery.Program(["-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    with program:
        pids = [int(each) for each in program.stdout.readline().split()]  # type: ignore[union-attr]
        assert len(pids) == 2
        program.kill()
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


FAILING_PROGRAM = """
import os, sys, time, torch, stratagem as sg
strategy = sg.ParameterServerStrategy(num_workers=1)
with strategy.scope():
    model = torch.nn.Linear(1, 1)
strategy.run(lambda: model.weight.shape).wait()
if fork := os.fork():
    os.waitpid(fork, 0)
    print(strategy.local_results(strategy.run(lambda: "still here"))[0])
    strategy.run(time.sleep, args=(600.0,))
raise ValueError("bad row 812")
"""


def test_program_that_fails_does_not_wait_for_its_steps(forked_tasks: None) -> None:
    ended = nursery.run(["-c", FAILING_PROGRAM], 50.0)
    assert ended.returncode == 1
    assert ended.stdout == "still here\n"  # its fork, which failed as well, took nothing from it
    assert ended.stderr.count("ValueError: bad row 812") == 2
    assert ended.stderr.count("Traceback") == 2


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False
