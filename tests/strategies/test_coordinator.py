"""Scheduling functions on workers, with the semantics of TensorFlow's coordinator."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import StepCancelledError, StrategyError

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

    def step() -> None:
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()

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


def test_wrong_use_is_refused(coordinator: sg.ClusterCoordinator) -> None:
    with pytest.raises(StrategyError, match="takes a ParameterServerStrategy, got OneDeviceStrategy"):
        sg.ClusterCoordinator(sg.OneDeviceStrategy())  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="all workers are in the same step"):
        sg.ClusterCoordinator(sg.ParameterServerStrategy(2, consistency=sg.Synchronous()))
    with pytest.raises(StrategyError, match="run calls a function"):
        coordinator.schedule("no function")  # type: ignore[arg-type]
