"""Rates scale by the rules; a warm-up gives its rates, hands over, and is the same in every replica."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stratagem as sg
from stratagem.errors import StrategyError
from stratagem.training.learning_rates import WarmUp, scale_learning_rate

AFTER: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler | None]] = {
    "nothing": lambda optimizer: None,
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (2 + step)),
    "factors": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.5),
    "constant at first": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10, cycle_momentum=False),
}


def make_optimizer(rate: Any = 0.4) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)


def rates(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        assert [float(each) for each in scheduler.get_last_lr()] == found[-1:]
        optimizer.step()
        scheduler.step()
    return found


def test_linear_and_square_root_rule() -> None:
    assert scale_learning_rate(0.1, base_batch=32, global_batch=128) == pytest.approx(0.4)
    assert scale_learning_rate(0.1, base_batch=32, global_batch=128, rule="sqrt") == pytest.approx(0.2)
    assert scale_learning_rate(0.1, base_batch=128, global_batch=32) == pytest.approx(0.025)
    assert scale_learning_rate(0.1, base_batch=7, global_batch=7, rule="sqrt") == 0.1


@pytest.mark.parametrize("rate", [0.4, torch.tensor(0.4)], ids=["number", "tensor"])
def test_warm_up_is_a_straight_line_and_then_stays(rate: Any) -> None:
    optimizer = make_optimizer(rate)
    assert rates(optimizer, WarmUp(optimizer, 4), 7) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    optimizer = make_optimizer(rate)
    assert rates(optimizer, WarmUp(optimizer, 3, start=0.1), 5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize("name", AFTER)
def test_warm_up_ends_where_the_next_scheduler_begins_and_goes_on_as_it_would(name: str) -> None:
    alone = make_optimizer()
    expected = rates(alone, AFTER[name](alone) or lr_scheduler.ConstantLR(alone, 1.0), 5)
    optimizer = make_optimizer()
    scheduler = WarmUp(optimizer, 2, after=AFTER[name](optimizer))
    found = rates(optimizer, scheduler, 7)
    assert scheduler.last_epoch == 7
    assert found == pytest.approx([0.0, expected[0] / 2, *expected])
    assert found[2:] == expected


def test_groups_arrive_at_their_own_rates() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [torch.zeros(1)], "lr": 0.2}, {"params": [torch.zeros(1)], "lr": 1.0}], lr=1.0
    )
    scheduler = WarmUp(optimizer, 2, start=0.2)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.2, 0.6])
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.2, 1.0]


@pytest.mark.parametrize("num_before", [1, 3, 5])
@pytest.mark.parametrize("name", AFTER)
def test_state_goes_on_where_it_was_saved(name: str, num_before: int) -> None:
    optimizer = make_optimizer()
    scheduler = WarmUp(optimizer, 3, after=AFTER[name](optimizer))
    rates(optimizer, scheduler, num_before)
    states = copy.deepcopy([optimizer.state_dict(), scheduler.state_dict()])
    resumed_optimizer = make_optimizer()
    resumed = WarmUp(resumed_optimizer, 3, after=AFTER[name](resumed_optimizer))
    resumed_optimizer.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    assert states[1]["after"] == (None if name == "nothing" else scheduler.after.state_dict())  # type: ignore[union-attr]
    assert rates(resumed_optimizer, resumed, 4) == rates(optimizer, scheduler, 4)


def test_state_of_another_kind_of_warm_up() -> None:
    optimizer = make_optimizer()
    alone = WarmUp(optimizer, 2)
    followed = WarmUp(optimizer, 2, after=lr_scheduler.ExponentialLR(optimizer, 0.5))
    with pytest.raises(StrategyError, match="the state has one of a scheduler for after"):
        alone.load_state_dict(followed.state_dict())
    with pytest.raises(StrategyError, match="the state has none of a scheduler for after"):
        followed.load_state_dict(alone.state_dict())


# In a strategy


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        made.run(int)
        yield made


@pytest.mark.parametrize("where", ["between", "inside"])
@pytest.mark.parametrize("name", AFTER)
def test_warm_up_equals_one_device(strategy: sg.MirroredStrategy, name: str, where: str) -> None:
    def course(strategy: sg.Strategy) -> tuple[list[tuple[float, ...]], list[float], torch.Tensor]:
        torch.manual_seed(1)
        with strategy.scope():
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
            scheduler = WarmUp(optimizer, 3, start=0.01, after=AFTER[name](optimizer))

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            if where == "inside":
                scheduler.step()
            return rate

        used = []
        for _ in range(6):
            used.append(tuple(strategy.local_results(strategy.run(step, args=(torch.ones(2, 3),)))))
            if where == "between":
                scheduler.step()
        return used, scheduler.get_last_lr(), model.weight.detach().clone()

    used, last, weight = course(strategy)
    expected, expected_last, expected_weight = course(sg.OneDeviceStrategy())
    assert used == [each * 2 for each in expected]
    assert len(set(used)) > 2
    assert last == expected_last
    torch.testing.assert_close(weight, expected_weight)


def test_state_loaded_between_runs_reaches_the_replicas(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        scheduler = WarmUp(optimizer, 2, after=lr_scheduler.ExponentialLR(optimizer, 0.5))

    def step() -> float:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        return rate

    def go_on() -> list[tuple[float, ...]]:
        return [strategy.run(step).values for _ in range(3)]

    go_on()
    states = copy.deepcopy([optimizer.state_dict(), scheduler.state_dict()])
    expected = go_on()
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    assert go_on() == expected == [(0.2, 0.2), (0.1, 0.1), (0.05, 0.05)]


# Bad input


WRONG_SCALES: dict[str, tuple[dict[str, Any], str]] = {
    "base": ({"base": 0.0}, "base is a learning rate above 0, got 0.0"),
    "base of another type": ({"base": "0.1"}, "base is a learning rate above 0, got '0.1'"),
    "infinite base": ({"base": float("inf")}, "got inf"),
    "base batch": ({"base_batch": 0}, "base_batch is a number of examples from 1 up, got 0"),
    "global batch": ({"global_batch": 2.5}, "global_batch is a number of examples from 1 up, got 2.5"),
    "rule": ({"rule": "square"}, "rule is one of 'linear', 'sqrt', got 'square'"),
}


@pytest.mark.parametrize("name", WRONG_SCALES)
def test_scale_out_of_range(name: str) -> None:
    wrong, message = WRONG_SCALES[name]
    with pytest.raises(StrategyError, match=message):
        scale_learning_rate(**{"base": 0.1, "base_batch": 8, "global_batch": 16, **wrong})


@pytest.mark.parametrize("num_steps", [0, -1, 2.0, True, None], ids=repr)
def test_number_of_steps_out_of_range(num_steps: Any) -> None:
    with pytest.raises(StrategyError, match=f"num_steps is a whole number from 1 up, got {num_steps!r}"):
        WarmUp(make_optimizer(), num_steps)


@pytest.mark.parametrize("start", [-0.1, 0.5, float("nan"), "0"], ids=repr)
def test_start_out_of_range(start: Any) -> None:
    with pytest.raises(StrategyError, match=f"start is a rate from 0 to that of the optimizer, 0.4, got {start!r}"):
        WarmUp(make_optimizer(), 3, start=start)


def test_optimizer_and_scheduler_of_the_wrong_kind() -> None:
    optimizer = make_optimizer()
    with pytest.raises(StrategyError, match="takes an optimizer, got list"):
        WarmUp([optimizer], 3)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="got ReduceLROnPlateau; step that one yourself"):
        WarmUp(optimizer, 3, after=lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(StrategyError, match="got type"):
        WarmUp(optimizer, 3, after=lr_scheduler.ExponentialLR)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="ExponentialLR was made for another one"):
        WarmUp(optimizer, 3, after=lr_scheduler.ExponentialLR(make_optimizer(), 0.5))
