"""What a program drops goes, with the processes behind it; what it keeps is plain torch from then on."""

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import StrategyError
from tests.faults.watching import is_gone

pytestmark = pytest.mark.usefixtures("four_cpus")


def build(scope: Any, kind: Any = torch.optim.Adam) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], int]]:
    with scope:
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)

    def step() -> int:
        optimizer.zero_grad()
        model(torch.ones(3)).square().sum().backward()
        optimizer.step()
        return os.getpid()

    return model, optimizer, step


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Only what nothing refers to goes inside the block, and at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["shared_memory", "to_one"])
def test_dropped_strategy_ends_its_children_and_leaves_plain_objects(way: str) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=way)
    model, optimizer, step = build(strategy.scope())
    pid = strategy.run(step)[1]
    before = [each.detach().clone() for each in model.parameters()]
    with no_collection():
        del strategy
        assert is_gone(pid)
    assert all(map(torch.equal, model.parameters(), before))
    step()
    assert optimizer.state_dict()["state"][0]["step"] == 2
    assert not torch.equal(model.weight, before[0])
    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 4)  # none in use


class Trainer:
    """Holds all that it needs, as many programs do."""

    def __init__(self) -> None:
        self.strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        self.model, self.optimizer, self.step = build(self.strategy.scope())
        self.model.register_forward_hook(lambda *_: self.count())
        self.num_calls = 0

    def count(self) -> None:
        self.num_calls += 1

    def train(self, mistake: bool) -> Any:
        def step() -> int:
            if mistake and sg.get_replica_context().replica_id_in_sync_group == 1:
                raise ValueError("a mistake")
            return self.step()

        return self.strategy.run(step)


def test_strategy_whose_own_functions_and_errors_lead_to_it_is_dropped_too() -> None:
    trainer = Trainer()
    pid = trainer.train(mistake=False)[1]
    with pytest.raises(ValueError, match="a mistake"):
        trainer.train(mistake=True)
    assert trainer.num_calls > 0
    reference = weakref.ref(trainer.strategy)
    del trainer
    gc.collect()
    assert reference() is None
    assert is_gone(pid)


def test_result_that_waits_in_a_replica_keeps_the_strategy() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    pid = strategy.run(os.getpid)[1]
    result = strategy.run(lambda: torch.ones(2**20))
    del strategy
    gc.collect()
    assert result[1].sum() == 2**20
    del result
    gc.collect()
    assert is_gone(pid)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
def test_dropped_optimizer_goes_at_once(kind: Any) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        _, optimizer, step = build(strategy.scope(), kind)
        _, kept, other_step = build(strategy.scope())
        strategy.run(step)
        strategy.run(other_step)
        reference = weakref.ref(optimizer)
        with no_collection():
            del optimizer, step
            assert reference() is None
    assert kept.state_dict()["state"][0]["step"] == 1, "what it left behind does not stand in the way of others"


def test_strategy_that_has_not_run_refuses_training_outside_and_lets_go_when_closed() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.adopt(model)
    with pytest.raises(StrategyError, match=r"backward\(\) reached 2 distributed parameter.*outside strategy.run"):
        model(torch.ones(2)).sum().backward()
    other(torch.ones(2)).sum().backward()
    assert model.weight.grad is None
    assert other.weight.grad is not None
    strategy.close()
    model(torch.ones(2)).sum().backward()
    assert model.weight.grad is not None
    with sg.MirroredStrategy(["cpu:2"]) as second:
        second.adopt(model)
        assert second.run(lambda: model.weight.shape[1]).values == (2,)


class Holder:
    """Something of the program's own that steps use."""

    large: Any = None


class Large:
    """Large values of many kinds in an object, and who else has them."""

    def __init__(self, holder: Any) -> None:
        arrays = [np.ones(100_000) for _ in range(3)]
        tensor = torch.ones(100_000)
        self._references = [weakref.ref(each) for each in (*arrays, tensor)]
        self._texts = ["x" * 100_000, b"x" * 100_000]
        self._num_own = self._users()
        nested, many = {"in a list": [arrays[1]]}, [arrays[2], *range(2000)]
        holder.large = [arrays[0], tensor, nested, many, *self._texts, tuple(self._texts)]

    def _users(self) -> list[int]:
        return list(map(sys.getrefcount, self._texts))

    def are_kept(self) -> bool:
        gc.collect()
        return any(each() is not None for each in self._references) or self._users() != self._num_own


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
        lambda: sg.ParameterServerStrategy(num_workers=2, consistency=sg.Synchronous()),
    ],
    ids=["mirrored", "parameter server"],
)
def test_large_values_that_the_program_drops_are_not_kept(make: Callable[[], sg.Strategy]) -> None:
    holder, kept = Holder(), Holder()
    with make() as strategy:
        model, _, step = build(strategy.scope())
        large = [Large(each) for each in (model, holder, kept)]
        users: Any = model, holder, kept

        def using() -> list[int]:
            return [len(each.large) for each in users]

        for _ in range(2):
            strategy.run(using)
        assert all(each.are_kept() for each in large)
        users[0].large = users[1].large = None
        for _ in range(2):
            strategy.run(step)  # which uses neither
        assert [each.are_kept() for each in large] == [False, False, True]
    kept.large = None
    assert not large[-1].are_kept()
