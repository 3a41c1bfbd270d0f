"""CentralStorageStrategy: variables and the optimizer's state exist once."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.engine.recipe import Exchange
from stratagem.strategies import central_storage
from stratagem.variables.central_updates import CentralUpdate
from tests.contracts.test_strategies import assert_equal_to_one_device, make_net, plain_step

NUM_ELEMENTS = 8 * 2**20  # 32 MB
NUM_REPLICAS = 4


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.Strategy]:
    with sg.CentralStorageStrategy([f"cpu:{number}" for number in range(NUM_REPLICAS)]) as made:
        made.run(int)
        yield made


def shared_mb(pids: list[int]) -> float:
    """The memory in which variables lie, as all processes hold it together: what is shared counts once."""
    total_kb, is_ours = 0, False
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                is_ours = "memfd:stratagem" in line
            elif is_ours and line.startswith("Pss:"):
                total_kb += int(line.split()[1])
    return total_kb / 1024


def test_parameters_and_state_take_the_memory_of_one(strategy: sg.Strategy) -> None:
    pids = list(strategy.local_results(strategy.run(os.getpid)))
    before = shared_mb(pids)
    with strategy.scope():
        model = nn.Linear(1, NUM_ELEMENTS, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> int:
        (model.weight[:100] ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.state[model.weight]["momentum_buffer"].numel()

    assert set(strategy.local_results(strategy.run(step))) == {NUM_ELEMENTS}
    size_mb, windows_mb = 4 * NUM_ELEMENTS / 2**20, NUM_REPLICAS * 2 * 8
    # Parameters, the sum of gradients and the state, each once, and the windows in which gradients are shown.
    assert 3 * size_mb <= shared_mb(pids) - before <= 1.1 * (3 * size_mb + windows_mb)


def test_the_state_of_an_optimizer_that_is_not_split_is_in_one_replica(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)

    def step() -> int:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return dict.__len__(optimizer.state)  # a step is refused to read it

    assert strategy.local_results(strategy.run(step)) == (6, 0, 0, 0)
    state = optimizer.state_dict()
    assert len(state["state"]) == 6
    optimizer.load_state_dict(state)
    assert strategy.local_results(strategy.run(step)) == (6, 0, 0, 0)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adafactor])
def test_replicas_with_copies_of_their_own_equal_one_device(
    four_cpus: None, monkeypatch: pytest.MonkeyPatch, make: type[torch.optim.Optimizer]
) -> None:
    """The way that accelerators take."""
    monkeypatch.setattr(central_storage, "choose_exchange", lambda *_: Exchange.TO_ONE)
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        made = []

        def build() -> tuple[nn.Module, object]:
            model = make_net()
            made.append(make(model.parameters(), lr=0.05))
            return model, plain_step(model, made[-1])

        assert_equal_to_one_device(strategy, build, tolerance=2e-5)
        optimizer = made[-1]
        sizes = strategy.local_results(strategy.run(lambda: dict.__len__(optimizer.state)))
        assert sizes[1] == 0  # only where variables are kept


def test_an_optimizer_can_work_where_variables_are_kept() -> None:
    model, other = make_net(), make_net()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, other)]
    update = CentralUpdate(None, torch.device("cpu", 0))  # type: ignore[arg-type]  # it asks nothing of the replica
    for number in range(3):
        for each in (model, other):
            each.zero_grad()
            each(torch.full((2, 6), float(number))).pow(2).sum().backward()
        update._step_elsewhere(optimizers[0])
        optimizers[1].step()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        with torch.no_grad():  # what the program writes in between counts
            for each in (*model.parameters(), *other.parameters()):
                each.add_(1.0)
    assert len(optimizers[0].state) == 6


class WarmingUp(torch.optim.SGD):
    """Has attributes and an option of its own, and changes them."""

    def __init__(self, parameters: Iterable[torch.Tensor], num_warmup_steps: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.num_warmup_steps, self.num_steps = num_warmup_steps, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["rate"] = group["lr"] * min(1.0, self.num_steps / self.num_warmup_steps)
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["rate"])


def test_an_optimizer_of_the_users_own_is_the_same_where_variables_are_kept() -> None:
    model, other = make_net(), make_net()
    optimizers = [WarmingUp(each.parameters(), num_warmup_steps=4) for each in (model, other)]
    calls: list[torch.optim.Optimizer] = []
    optimizers[0].register_step_pre_hook(lambda optimizer, *_: calls.append(optimizer))
    optimizers[0].register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    update = CentralUpdate(None, torch.device("cpu", 0))  # type: ignore[arg-type]  # it asks nothing of the replica
    for number in range(1, 4):
        for each in (model, other):
            each.zero_grad()
            each(torch.full((2, 6), float(number))).pow(2).sum().backward()
        update._step_elsewhere(optimizers[0])
        optimizers[1].step()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert [each.num_steps for each in optimizers] == [number, number]
        assert optimizers[0].param_groups[0]["rate"] == optimizers[1].param_groups[0]["rate"]
        assert len(calls) == 2 * number
    assert all(each is optimizers[0] for each in calls)


class Twice(torch.optim.Optimizer):
    """Calls another optimizer in its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([each for group in inner.param_groups for each in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_that_calls_another_is_refused(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = Twice(torch.optim.Rprop(model.parameters()))

    def step() -> None:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(
        sg.errors.StrategyError, match=r"Twice.step\(\) calls Rprop.step\(\), but only replica 0 updates"
    ):
        strategy.run(step)


def test_devices_are_checked(four_cpus: None) -> None:
    with pytest.raises(sg.errors.DeviceError, match="gpu"):
        sg.CentralStorageStrategy(["cpu:0"], parameter_device="gpu:7")
