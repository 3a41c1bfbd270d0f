"""Gradients that a step sets itself, weights of losses, replicas that do not take part."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from stratagem.errors import CollectiveError, StratagemWarning, StrategyError

ROWS = torch.tensor([[1.0], [2.0], [4.0], [9.0]])


@pytest.fixture(scope="module")
def summing(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], gradients="sum") as made:
        made.run(int)  # its replicas are there before the first test
        yield made


def _one_weight(strategy: sg.Strategy) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(1))
        return weight, torch.optim.SGD([weight], lr=1.0)


def _run(strategy: sg.Strategy, step: Any, rows: torch.Tensor = ROWS) -> Any:
    return strategy.run(step, args=(next(iter(strategy.distribute([rows]))),))


def test_set_gradients_are_added_up_where_the_program_scales_its_losses(summing: sg.MirroredStrategy) -> None:
    weight, optimizer = _one_weight(summing)

    def step(x: torch.Tensor) -> None:
        (weight.grad,) = torch.autograd.grad((weight * x).sum() / 4, weight)
        optimizer.step()

    _run(summing, step)
    assert weight.item() == -4.0


def test_gradients_that_all_replicas_set_alike_are_taken_as_they_are(summing: sg.MirroredStrategy) -> None:
    weight, optimizer = _one_weight(summing)

    def step(x: torch.Tensor) -> None:
        ((weight * x).sum() / 4).backward()
        weight.grad = weight.grad / 2
        optimizer.step()

    _run(summing, step)
    assert weight.item() == -2.0


def test_set_gradient_is_summed_in_the_tensor_that_the_program_has(strategy: sg.MirroredStrategy) -> None:
    weight, _ = _one_weight(strategy)

    def step(x: torch.Tensor) -> torch.Tensor:
        (own,) = torch.autograd.grad((weight * x).mean(), weight)
        weight.grad = own
        norm = nn.utils.clip_grad_norm_([weight], 2.0)
        assert weight.grad is own
        return torch.stack([norm, own[0]])

    for norm, gradient in _run(strategy, step).values:
        assert norm == 4.0
        assert gradient == pytest.approx(2.0, abs=1e-5)


def test_what_no_sync_left_must_not_be_replaced(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        weight, optimizer = _one_weight(strategy)

        def step(x: torch.Tensor) -> None:
            with sg.get_strategy().no_sync():
                (weight * x).mean().backward()
            weight.grad = weight.grad / 2
            optimizer.step()

        with pytest.raises(StrategyError, match=r"that a pass inside no_sync\(\) has left was replaced.* in place"):
            _run(strategy, step)


@pytest.mark.parametrize("way", ["shared_memory", "torch"])
def test_what_no_sync_left_must_not_be_changed_between_runs(way: str, four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=way) as strategy:
        weight, optimizer = _one_weight(strategy)

        def step(x: torch.Tensor) -> None:
            (weight * x).mean().backward()

        def step_from_none(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            step(x)

        def set_anew(x: torch.Tensor) -> None:
            (weight.grad,) = torch.autograd.grad((weight * x).mean(), weight)

        def fail(x: torch.Tensor) -> None:
            raise ValueError("not here")

        def change() -> None:
            weight.grad.mul_(0.5)

        def fail_once() -> None:
            with pytest.raises(ValueError, match="not here"):
                _run(strategy, fail)

        for spoil in (change, fail_once):
            for good_step in (step_from_none, set_anew):
                optimizer.zero_grad()
                with strategy.no_sync():
                    _run(strategy, step)
                spoil()
                _run(strategy, lambda x: x.sum())  # does not use it
                for _ in range(2):
                    with pytest.raises(StrategyError, match=r"changed outside strategy.run.*it with zero_grad\(\)"):
                        _run(strategy, step)
                _run(strategy, good_step)
                assert weight.grad.item() == 4.0
        change()  # a sum
        _run(strategy, step)
        assert weight.grad.item() == 6.0


def test_gradient_made_anew_in_the_same_memory_reaches_all(strategy: sg.MirroredStrategy) -> None:
    weight, _ = _one_weight(strategy)
    memory = np.full(1, 2.0, np.float32)
    for value in (2.0, 7.0):
        memory.fill(value)
        weight.grad = torch.from_numpy(memory)
        assert [each.item() for each in strategy.run(lambda: 2 * weight.grad).values] == [2 * value] * 2
        weight.grad = None


def test_pass_with_a_graph_needs_all_replicas(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        weight, _ = _one_weight(strategy)

        def step(x: torch.Tensor) -> None:
            replica = sg.get_replica_context()
            if replica.replica_id_in_sync_group:
                replica.no_contribution()
            else:
                (weight * x).mean().backward(create_graph=True)

        with (
            pytest.warns(UserWarning, match="Using backward"),
            pytest.raises(CollectiveError, match=r"replica 0 is in backward\(create_graph=True\), which every replica"),
        ):
            _run(strategy, step)


def test_replicas_ask_each_other_alike_after_a_call_that_failed_in_one(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        weight, optimizer = _one_weight(strategy)

        def set_in_one(x: torch.Tensor, fail: bool = False) -> None:
            is_first = sg.get_replica_context().replica_id_in_sync_group == 0
            if fail and is_first:
                raise ValueError("not here")
            weight.grad = None if is_first else torch.ones(1)
            optimizer.step()

        def train(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).mean().backward()
            optimizer.step()

        with pytest.raises(ValueError, match="not here"):
            _run(strategy, lambda x: set_in_one(x, fail=True))
        for step in (train, train, set_in_one):
            _run(strategy, step)
        assert weight.item() == -8.5


def test_weights_are_parts_of_what_all_give(strategy: sg.MirroredStrategy) -> None:
    weight, _ = _one_weight(strategy)

    def step(x: torch.Tensor) -> None:
        context = sg.get_replica_context()
        with context.weight(3 if context.replica_id_in_sync_group else 1):
            (weight * x).mean().backward()
        (weight * x).mean().backward()

    _run(strategy, step)
    assert weight.grad.item() == pytest.approx((1.5 * 1 + 6.5 * 3) / 4 + 4.0)


def test_weights_that_are_no_numbers_of_tokens_are_refused(strategy: sg.MirroredStrategy) -> None:
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(StrategyError, match="a weight is a number of rows or tokens, 0 or more, got"):
            strategy.run(lambda wrong=wrong: sg.get_replica_context().weight(wrong))


def test_one_device_knows_the_same_calls() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    weight, _ = _one_weight(strategy)

    def step(x: torch.Tensor) -> torch.Tensor:
        context = sg.get_replica_context()
        with context.weight(7):
            (weight * context.all_gather(x * weight.exp())).mean().backward()
        context.no_contribution()
        return context.all_reduce("max", weight * x)

    assert strategy.run(step, args=(ROWS,)).requires_grad
    assert weight.grad.item() == 4.0
    with pytest.raises(StrategyError, match="a weight is a number"):
        strategy.run(lambda: sg.get_replica_context().weight(-1))


def test_tokens_that_are_left_out_get_one_hint(four_cpus: None) -> None:
    targets = torch.tensor([0, -100, 1, 1])

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        (2 * functional.cross_entropy(model(x), y)).backward()

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 2)
        batch = next(iter(strategy.distribute([(ROWS, targets)])))
        with pytest.warns(StratagemWarning, match=r"leaves out targets.*weight\(\(targets != ignore_index\)"):
            strategy.run(step, args=batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StratagemWarning)
            strategy.run(step, args=batch)
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, warnings.catch_warnings():
        warnings.simplefilter("error", StratagemWarning)
        with strategy.scope():
            model = nn.Linear(1, 2)
        strategy.run(step, args=next(iter(strategy.distribute([(ROWS, targets.abs() % 2)]))))


@pytest.mark.parametrize("way", ["shared_memory", "torch"])
def test_replica_that_leaves_is_told_where_others_wait(way: str, four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=way) as strategy:
        weight, _ = _one_weight(strategy)

        def step(x: torch.Tensor) -> None:
            if sg.get_replica_context().replica_id_in_sync_group == 0:
                (weight * x).mean().backward()

        with pytest.raises(CollectiveError, match=r"backward\(\) at .*test_gradients\.py:\d+.*; every replica"):
            _run(strategy, step)


def test_update_that_one_replica_skips_names_both_lines(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        weight, optimizer = _one_weight(strategy)

        def step(x: torch.Tensor) -> None:
            for _ in range(2):
                (weight * x).mean().backward()
                if sg.get_replica_context().replica_id_in_sync_group == 0:
                    optimizer.step()

        with pytest.raises(
            CollectiveError,
            match=r"replica 0 is in optimizer\.step\(\) at .*:\d+ while replica 1 is in backward\(\) at .*:\d+; every",
        ):
            _run(strategy, step)


def test_hooks_of_the_main_program_come_and_go(strategy: sg.MirroredStrategy) -> None:
    weight, _ = _one_weight(strategy)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (weight * x).mean().backward()
        return weight.grad

    handle = weight.register_hook(lambda gradient: gradient.clamp(max=3.0))
    assert [each.item() for each in _run(strategy, step).values] == [3.0, 3.0]
    after = weight.register_post_accumulate_grad_hook(lambda each: each.grad.neg_())
    assert [each.item() for each in _run(strategy, step).values] == [-3.0, -3.0]
    handle.remove()
    assert [each.item() for each in _run(strategy, step).values] == [-4.0, -4.0]
    after.remove()
    assert [each.item() for each in _run(strategy, step).values] == [4.0, 4.0]
