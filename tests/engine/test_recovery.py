"""A mistake of the program is an error, and afterwards the strategy goes on as if nothing had been."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.engine import child_calls
from stratagem.errors import ReplicaError, StrategyError
from stratagem.processes.launcher import ForkServer


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        with made.scope():
            pass
        yield made


class Boom:
    """Cannot be built where it arrives."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("boom",)


def test_value_that_cannot_be_built_in_a_replica_is_told_at_once(strategy: sg.MirroredStrategy) -> None:
    boom = Boom()

    def meet() -> object:
        sg.get_replica_context().all_reduce("sum", torch.ones(1))
        return boom

    with pytest.raises(ValueError, match="invalid literal for int"):
        strategy.run(meet)
    assert strategy.run(lambda: 3).values == (3, 3)


def test_function_whose_arguments_could_not_be_sent_is_sent_again(strategy: sg.MirroredStrategy) -> None:
    def same(value: object) -> object:
        return value

    with pytest.raises(StrategyError, match="generator"):
        strategy.run(same, args=((each for each in "ab"),))
    assert strategy.run(same, args=(1,)).values == (1, 1)


def test_parameters_thawed_before_a_run_that_could_not_be_sent_are_trained_by_the_next(
    strategy: sg.MirroredStrategy,
) -> None:
    with strategy.scope():
        first, second = nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(_: object) -> float:
        optimizer.zero_grad()
        second(first(torch.ones(2))).square().sum().backward()
        optimizer.step()
        return float(second.weight.detach().sum())

    before = strategy.run(step, args=(1,))[0]
    second.requires_grad_(True)
    with pytest.raises(StrategyError, match="generator"):
        strategy.run(step, args=((each for each in "ab"),))
    here, there = strategy.run(step, args=(2,)).values
    assert here == there != before


def test_buffers_written_before_a_run_that_could_not_be_sent_reach_the_replicas(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"], cross_device_ops="to_one") as strategy:
        with strategy.scope():
            norm = nn.BatchNorm1d(1)
        look = lambda _: norm.running_mean.item()  # type: ignore[union-attr]  # noqa: E731
        assert strategy.run(look, args=(1,)).values == (0, 0)
        norm.running_mean.fill_(3)  # type: ignore[union-attr]
        with pytest.raises(StrategyError, match="generator"):
            strategy.run(look, args=((each for each in "ab"),))
        assert strategy.run(look, args=(1,)).values == (3, 3)


def test_optimizer_over_foreign_parameters_is_refused_and_nothing_is_lost(strategy: sg.MirroredStrategy) -> None:
    foreign = nn.Linear(2, 2)
    with strategy.scope():
        good = nn.Linear(2, 2)
        bad = torch.optim.SGD(foreign.parameters(), lr=0.1)
    look = lambda: good.weight.sum().item()  # noqa: E731
    with pytest.raises(StrategyError, match=r"optimizer SGD holds 2 parameter\(s\) that this strategy does not manage"):
        strategy.run(look)
    del bad
    gc.collect()
    assert strategy.run(look).values == (look(), look())


def test_changes_of_older_objects_survive_the_distribution_of_new_ones(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 2)
    look = lambda: model.training  # noqa: E731
    assert strategy.run(look).values == (True, True)
    model.eval()
    with strategy.scope():
        other = nn.Linear(2, 2)
    assert strategy.run(look).values == (False, False)
    assert other.training


def test_weights_that_were_given_other_memory_come_back(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(3, 2)
    look = lambda: model.weight.sum().item()  # noqa: E731
    strategy.run(look)
    model.weight.data = torch.full((2, 3), 2.0)
    assert strategy.run(look).values == (12.0, 12.0)
    model.double()
    with pytest.raises(StrategyError, match=r"'weight' was distributed as torch.float32 .* convert a model before"):
        strategy.run(look)


def test_large_results_that_nobody_asks_for_are_dropped(strategy: sg.MirroredStrategy) -> None:
    def make() -> torch.Tensor:
        return torch.ones(2**20)

    def held() -> int:
        return len(child_calls._results.values)

    kept = strategy.run(make)
    for _ in range(5):
        strategy.run(make)
    gc.collect()
    assert strategy.run(held).values[1] == 1
    assert kept.values[1].sum() == 2**20
    assert strategy.run(held).values[1] == 0


def test_dead_fork_server_is_a_clear_error() -> None:
    server = ForkServer()
    server._process.kill()
    server._process.wait()
    number, pipe = server.order()
    with (
        pipe,
        pytest.raises(ReplicaError, match="the fork server ended with code -9 before it started a replica"),
    ):
        server.started(number)
    server.stop()
