"""Scheduling functions on workers, with the semantics of TensorFlow's coordinator."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import EndOfDataError, NonFiniteGradientError, StepCancelledError, StrategyError
from stratagem.strategies import coordinator as module
from tests.steps import falling_step

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def coordinator(four_cpus: None) -> Iterator[sg.ClusterCoordinator]:
    with sg.ParameterServerStrategy(num_workers=2) as strategy:
        strategy.run(int)
        yield sg.ClusterCoordinator(strategy)


def test_functions_are_run_and_their_values_fetched(coordinator: sg.ClusterCoordinator) -> None:
    values = [coordinator.schedule(lambda x, y=0: x * x + y, args=(number,), kwargs={"y": 1}) for number in range(20)]
    coordinator.join()
    assert coordinator.done()
    assert all(value.is_done for value in values)
    assert coordinator.fetch({"all": values})["all"] == [number * number + 1 for number in range(20)]
    assert values[3].get() == 10
    assert coordinator.schedule(lambda x: x + 1, args=(values[2],)).fetch() == 6


def test_schedule_never_waits(coordinator: sg.ClusterCoordinator, tmp_path: Path) -> None:
    def wait(path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.01)

    values = [coordinator.schedule(wait, args=(str(tmp_path / "go"),)) for _ in range(12)]
    assert not coordinator.done()
    assert not any(value.is_done for value in values)
    (tmp_path / "go").touch()
    coordinator.join()


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept")  # NumPy says so of what torch does
def test_arguments_are_those_of_the_moment_of_schedule(coordinator: sg.ClusterCoordinator, tmp_path: Path) -> None:
    with coordinator.strategy.scope():
        model = nn.Linear(2, 1)

    def add_up(path: str, weight: torch.Tensor, *numbers: Any) -> tuple[float, bool]:
        while not Path(path).exists():
            time.sleep(0.01)
        return float(sum(numbers)), weight is model.weight

    tensor, array = torch.zeros(1), np.zeros(1)
    values = []
    for number in range(8):
        tensor.fill_(number)
        array.fill(10 * number)
        values.append(coordinator.schedule(add_up, args=(str(tmp_path / "go"), model.weight, tensor, array)))
    (tmp_path / "go").touch()
    assert coordinator.fetch(values) == [(11.0 * number, True) for number in range(8)]


def test_what_was_scheduled_is_run_when_the_state_was_taken_meanwhile(coordinator: sg.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        model = nn.Linear(2, 1)
    values = [coordinator.schedule(lambda: time.sleep(0.02) or model.weight.shape) for _ in range(20)]
    model.state_dict()  # waits for what is under way, not for what nobody has been given
    deadline = time.monotonic() + PATIENCE_S
    while not coordinator.done():
        assert time.monotonic() < deadline, f"{sum(each.is_done for each in values)} of 20 are done"
    assert coordinator.fetch(values) == [model.weight.shape] * 20


def test_training_reaches_the_same_weights_whoever_does_the_steps(coordinator: sg.ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        model.weight.zero_()

    step = falling_step(model, optimizer)
    for _ in range(16):
        coordinator.schedule(step)
    coordinator.join()
    assert model.weight.tolist() == [[-8.0, -8.0]]


def test_error_cancels_what_was_not_begun(coordinator: sg.ClusterCoordinator, tmp_path: Path) -> None:
    def fail(path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.01)
        raise ValueError("bad row 812")

    first = coordinator.schedule(fail, args=(str(tmp_path / "go"),))
    rest = [coordinator.schedule(fail, args=(str(tmp_path / "go"),)) for _ in range(10)]
    (tmp_path / "go").touch()
    with pytest.raises(ValueError, match="bad row 812"):
        coordinator.join()
    with pytest.raises(StepCancelledError, match="not run"):
        rest[-1].fetch()
    with pytest.raises(ValueError, match="bad row 812"):
        first.fetch()
    coordinator.join()  # it was told once
    assert coordinator.schedule(int).fetch() == 0


@pytest.mark.parametrize("told", ["schedule", "join", "done"])
def test_error_is_that_of_its_function_in_fetch_and_told_once_by_the_coordinator(
    coordinator: sg.ClusterCoordinator, told: str
) -> None:
    def fail(row: int) -> None:
        raise ValueError(f"bad row {row}")

    value = coordinator.schedule(fail, args=(812,))
    for _ in range(2):
        with pytest.raises(ValueError, match="bad row 812"):
            value.fetch()
    with pytest.raises(ValueError, match="bad row 812"):  # as in TensorFlow, whoever has fetched it
        coordinator.schedule(int) if told == "schedule" else getattr(coordinator, told)()
    coordinator.join()
    assert coordinator.schedule(int).fetch() == 0
    with pytest.raises(ValueError, match="bad row 812"):
        value.fetch()


def test_failure_cancels_what_was_not_begun_before_anybody_looks(
    coordinator: sg.ClusterCoordinator, tmp_path: Path
) -> None:
    def step(path: str, number: int) -> int:
        while not Path(path).exists():
            time.sleep(0.01)
        if number < 4:  # all that workers have
            raise ValueError("bad row 812")
        return number

    values = [coordinator.schedule(step, args=(str(tmp_path / "go"), number)) for number in range(20)]
    (tmp_path / "go").touch()
    with pytest.raises(StepCancelledError, match="not run"):
        values[-1].fetch()
    with pytest.raises(ValueError, match="bad row 812"):
        coordinator.join()
    assert coordinator.schedule(int).fetch() == 0


def test_failure_cancels_also_while_the_program_waits_for_steps_under_way(
    coordinator: sg.ClusterCoordinator, tmp_path: Path
) -> None:
    def fail(path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.01)
        raise ValueError("bad row 812")

    with coordinator.strategy.scope():
        model = nn.Linear(1, 1)
    values = [coordinator.schedule(fail, args=(str(tmp_path / "go"),)) for _ in range(10)]
    (tmp_path / "go").touch()
    model.state_dict()
    coordinator.strategy.workers.settle()
    assert values[-1].is_done
    with pytest.raises(ValueError, match="bad row 812"):
        coordinator.schedule(int)
    coordinator.join()


def test_what_cannot_be_sent_is_an_error_and_nobody_waits_for_it(
    coordinator: sg.ClusterCoordinator, tmp_path: Path
) -> None:
    def wait(path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.01)

    with pytest.raises(StrategyError, match="cannot be sent"):
        coordinator.schedule(int, args=((each for each in "ab"),))
    coordinator.join()
    for _ in range(4):
        coordinator.schedule(wait, args=(str(tmp_path / "go"),))
    value = coordinator.schedule(int, args=((each for each in "ab"),))
    (tmp_path / "go").touch()
    with pytest.raises(StrategyError, match="cannot be sent"):
        value.fetch()
    with pytest.raises(StrategyError, match="cannot be sent"):
        coordinator.join()
    coordinator.join()


def test_gradients_that_are_not_finite_are_judged_as_in_run(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(1, on_nonfinite="raise") as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(factor: float) -> None:
            optimizer.zero_grad()
            (factor * model.weight.sum()).backward()
            optimizer.step()

        coordinator = sg.ClusterCoordinator(strategy)
        coordinator.schedule(step, args=(float("nan"),)).fetch()
        with pytest.raises(NonFiniteGradientError, match="first in 'weight'"):
            coordinator.join()
        coordinator.schedule(step, args=(1.0,))
        coordinator.join()  # it was told once


def test_end_of_data_is_told_as_what_it_is(coordinator: sg.ClusterCoordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(tuple))
    value = coordinator.schedule(next, args=(iterator,))
    with pytest.raises(
        StopIteration, match=r"worker \d has no more data in this pass, after 0 batches; iter\(dataset\)"
    ):
        coordinator.fetch([value])
    with pytest.raises(EndOfDataError, match="worker"):
        coordinator.join()
    assert coordinator.fetch(coordinator.schedule(lambda batches: [*batches], args=(iterator,))) == []
    assert coordinator.fetch(coordinator.schedule(next, args=(iterator, "end"))) == "end"
    result = coordinator.strategy.run(lambda: next(iter(())))
    with pytest.raises(StopIteration):
        coordinator.strategy.local_results([result])[0]


def test_each_worker_has_its_own_data(coordinator: sg.ClusterCoordinator) -> None:
    def make_data(place: sg.InputContext) -> list[tuple[int, int]]:
        return [(place.input_pipeline_id, number) for number in range(100)]

    iterator = iter(coordinator.create_per_worker_dataset(make_data))

    def take(iterator: Iterator[tuple[int, int]]) -> tuple[int, int]:
        time.sleep(0.02)
        return next(iterator)

    values = [coordinator.schedule(take, args=(iterator,)) for _ in range(8)]
    found = sorted(coordinator.fetch(values))
    for worker in (0, 1):
        own = [number for place, number in found if place == worker]
        assert own
        assert own == list(range(len(own)))
    with pytest.raises(StrategyError, match="give it to schedule"):
        next(iterator)


def test_iterators_of_one_dataset_are_apart_and_forgotten_with_the_last_reference(four_cpus: None) -> None:
    def open_passes() -> int:
        return len(module._passes)

    with sg.ParameterServerStrategy(1) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(lambda: range(1, 5))
        iterators = [iter(data), iter(data)]
        values = [coordinator.schedule(next, args=(iterators[number % 2],)) for number in range(6)]
        assert coordinator.fetch(values) == [1, 1, 2, 2, 3, 3]
        iterators.clear()
        coordinator.schedule(next, args=(iter(data),))
        assert coordinator.schedule(open_passes).fetch() == 1


def test_error_in_a_dataset_function_is_raised_and_the_strategy_goes_on(coordinator: sg.ClusterCoordinator) -> None:
    lines, given = (each for each in "ab"), list(coordinator.strategy.workers.given)
    with pytest.raises(ZeroDivisionError):
        coordinator.create_per_worker_dataset(lambda: 1 / 0)
    with pytest.raises(StrategyError, match="cannot be sent"):
        coordinator.create_per_worker_dataset(lambda: lines)
    assert coordinator.schedule(int).fetch() == 0
    assert coordinator.strategy.workers.given == given


def test_worker_that_comes_later_is_told_how_many_there_are(four_cpus: None, tmp_path: Path) -> None:
    def make_data(place: sg.InputContext) -> list[tuple[int, int]]:
        return [(place.num_input_pipelines, place.input_pipeline_id)] * 4

    def take(folder: str, iterator: Iterator[tuple[int, int]]) -> tuple[int, int]:
        (Path(folder) / str(os.getpid())).touch()
        while len(list(Path(folder).iterdir())) < 2:
            time.sleep(0.01)
        return next(iterator)

    with sg.ParameterServerStrategy(1) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(make_data)
        strategy.resize(2)
        iterator = iter(data)
        values = [coordinator.schedule(take, args=(str(tmp_path), iterator)) for _ in range(4)]
        assert set(coordinator.fetch(values)) == {(1, 0), (2, 1)}


def test_wrong_use_is_refused(coordinator: sg.ClusterCoordinator) -> None:
    with pytest.raises(StrategyError, match="takes a ParameterServerStrategy, got OneDeviceStrategy"):
        sg.ClusterCoordinator(sg.OneDeviceStrategy())  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="all workers are in the same step"):
        sg.ClusterCoordinator(sg.ParameterServerStrategy(2, consistency=sg.Synchronous()))
    with pytest.raises(StrategyError, match="workers share each step"):
        sg.ClusterCoordinator(sg.ParameterServerStrategy(2, consistency=sg.Synchronous(backup_workers=1)))
    with pytest.raises(StrategyError, match="run calls a function"):
        coordinator.schedule("no function")  # type: ignore[arg-type]
