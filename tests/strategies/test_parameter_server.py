"""Workers that push by themselves: what a step means there, and what the main program sees of it."""

import copy
import gc
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import NonFiniteGradientError, ParameterError, StratagemWarning, StrategyError
from stratagem.parameters.network.options import ClusterOptions
from tests.steps import falling_step, plain_step
from tests.training.estimators import Record, one_pass
from tests.training.estimators import batches as estimator_batches
from tests.training.estimators import make as make_estimator

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(num_workers=2, num_ps=2) as made:
        made.run(int)  # its workers are there before the first test
        yield made


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(number: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(number)
    ]


class Halving(torch.optim.Optimizer):
    """Not one of torch's: its state holds a plain number and a tensor that is replaced each time."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["number"] = state.get("number", 0) + 1
                    state["mean"] = 0.5 * state.get("mean", torch.zeros_like(parameter)) + 0.5 * parameter.grad
                    parameter.sub_(state["mean"], alpha=group["lr"] / state["number"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "own": lambda parameters: Halving(parameters, lr=0.1),
}


# The others differ from one of these in what they compute with an element, not in what they keep.
KINDS_OF_OPTIMIZERS = ("momentum", "adamw", "adafactor", "own")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS_OF_OPTIMIZERS else pytest.mark.soak) for name in OPTIMIZERS]
)
def test_steps_one_after_the_other_equal_one_device(strategy: sg.ParameterServerStrategy, name: str) -> None:
    expected = make_net()
    own = OPTIMIZERS[name](expected.parameters())
    step = plain_step(expected, own)
    losses = [step(*batch).item() for batch in batches()]
    with strategy.scope():
        model = make_net()
        optimizer = OPTIMIZERS[name](model.parameters())
    distributed = plain_step(model, optimizer)
    # Read at once, so that each step, in whichever worker, has the updates of all before.
    found = [strategy.reduce("mean", strategy.run(distributed, args=batch)).item() for batch in batches()]
    assert found == pytest.approx(losses, abs=1e-6)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[key], atol=1e-6, rtol=1e-6)
    states, theirs = optimizer.state_dict()["state"], own.state_dict()["state"]
    for number in states:
        torch.testing.assert_close(states[number], theirs[number], atol=1e-6, rtol=1e-6)


def test_run_returns_before_the_step_is_done(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    def step(path: str) -> int:
        while not Path(path).exists():
            time.sleep(0.01)
        return 7

    result = strategy.run(step, args=(str(tmp_path / "go"),))
    assert not result.is_done
    (tmp_path / "go").touch()
    assert strategy.local_results(result) == (7,)


def test_number_of_steps_under_way_is_bounded(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    def step(folder: str, number: int) -> int:
        (Path(folder) / f"begun-{number}").touch()
        time.sleep(0.02)
        return number

    results = [strategy.run(step, args=(str(tmp_path), number)) for number in range(10)]
    # All but four have been given to one of two workers that take two at a time, and are done.
    assert sum(each.is_done for each in results) >= 6
    assert [strategy.local_results(each)[0] for each in results] == list(range(10))


def test_results_keep_their_structure(strategy: sg.ParameterServerStrategy) -> None:
    result = strategy.run(lambda: {"loss": torch.tensor(2.0), "parts": (1, torch.ones(50_000))})
    assert strategy.reduce("sum", result["loss"]).item() == 2.0
    assert strategy.local_results(result)[0]["parts"][1].sum() == 50_000


def test_whole_batch_goes_to_one_worker(strategy: sg.ParameterServerStrategy) -> None:
    assert strategy.num_replicas_in_sync == 1
    data = torch.arange(10.0)
    sizes = [strategy.run(len, args=(batch,)) for batch in strategy.distribute(data, global_batch_size=4)]
    assert [strategy.local_results(each)[0] for each in sizes] == [4, 4, 2]
    total = strategy.run(lambda x: x.sum(), args=(next(iter(strategy.distribute(data, global_batch_size=10))),))
    assert strategy.reduce("mean", total).item() == 45.0


def run_for_a_while(strategy: sg.ParameterServerStrategy) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        strategy.run(int)


def test_error_of_a_step_is_raised_once(strategy: sg.ParameterServerStrategy) -> None:
    def fail() -> None:
        raise ValueError("bad row 812")

    result = strategy.run(fail)
    with pytest.raises(ValueError, match="bad row 812") as caught:
        result.wait()
    lines = "".join(caught.value.__notes__).splitlines()
    assert re.fullmatch(r"raised in worker [01]:", lines[0])
    assert lines[2].endswith("in fail"), "the library's frames are left out"
    assert strategy.local_results(strategy.run(int)) == (0,)
    strategy.run(fail)
    with pytest.raises(ValueError, match="bad row 812"):
        run_for_a_while(strategy)
    assert strategy.local_results(strategy.run(int)) == (0,)


def test_changes_between_steps_reach_all_workers(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def look() -> tuple[float, bool, float]:
        time.sleep(0.05)  # so that both workers get one
        return model[0].weight.sum().item(), model[1].training, optimizer.param_groups[0]["lr"]

    def look_twice() -> set[Any]:
        results = [strategy.run(look) for _ in range(4)]
        return {strategy.local_results(each)[0] for each in results}

    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert look_twice() == {(6.0, True, 1.0)}
    model.eval()
    scheduler.step()
    model.load_state_dict({"0.weight": torch.ones(1, 2)})
    assert look_twice() == {(2.0, False, 0.5)}


@pytest.mark.parametrize("step_size", [1, 10])
def test_a_schedule_that_a_worker_has_alone_is_warned_of_once(four_cpus: None, step_size: int) -> None:
    with sg.ParameterServerStrategy(num_workers=2) as strategy:
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size, gamma=0.5)
        train = plain_step(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = train(x, y)
            scheduler.step()
            return loss

        def train_for_a_while() -> None:
            for batch in batches(4):
                strategy.reduce("mean", strategy.run(step, args=batch)).item()
            strategy.run(int).wait()

        words = r"changed StepLR in its worker.*Call scheduler\.step\(\)"
        with pytest.warns(StratagemWarning, match=words) as told:
            train_for_a_while()
        assert len(told) == 1
        assert told[0].filename == __file__


def test_rates_that_a_step_is_told_and_the_schedule_of_one_worker_are_not_warned_of(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(num_workers=1) as strategy, warnings.catch_warnings():
        warnings.simplefilter("error", StratagemWarning)
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train = plain_step(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            train(x, y)
            scheduler.step()

        for batch in batches(4):
            strategy.run(step, args=batch)
        strategy.run(int).wait()
    with sg.ParameterServerStrategy(num_workers=2) as strategy, warnings.catch_warnings():
        warnings.simplefilter("error", StratagemWarning)
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = plain_step(model, optimizer)

        def step_at(rate: float, x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.param_groups[0]["lr"] = rate
            train(x, y)

        for number, batch in enumerate(batches(4)):
            strategy.run(step_at, args=(0.1 / (1 + number), *batch))
        strategy.run(int).wait()


def test_a_schedule_of_the_main_program_is_not_warned_of(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = plain_step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StratagemWarning)
        for batch in batches(4):
            strategy.run(step, args=batch)
            scheduler.step()
        rate = strategy.run(lambda: optimizer.param_groups[0]["lr"])
        assert strategy.local_results(rate) == (0.1 * 0.5**4,)


def test_state_of_model_and_optimizer_can_be_saved_and_loaded(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer)
    for batch in batches(3):
        strategy.run(step, args=batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))  # waits for the three
    assert saved[1]["state"][0]["step"].item() == 3
    one = [strategy.reduce("mean", strategy.run(step, args=batch)).item() for batch in batches(2)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = [strategy.reduce("mean", strategy.run(step, args=batch)).item() for batch in batches(2)]
    assert one == again


def test_main_program_sees_all_steps_before_it_uses_the_model(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    step = falling_step(model, optimizer, pause_s=0.02)
    with torch.no_grad():
        model.weight.fill_(0.0)
    for _ in range(5):
        strategy.run(step)
    assert model(torch.ones(1, 1)).item() == -5.0


def test_averages_of_the_main_program_are_of_whole_steps(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    step = falling_step(model, optimizer, pause_s=0.02)
    with torch.no_grad():
        model.weight.fill_(0.0)
    for _ in range(4):
        strategy.run(step)
    averages = sg.ExponentialMovingAverage(0.5).apply(model)
    assert averages.average(model.weight).item() == -4.0
    for _ in range(4):
        strategy.run(step)
    assert averages.apply().average(model.weight).item() == -6.0
    for _ in range(4):
        strategy.run(step)
    with averages.swapped(model):
        assert model.weight.item() == -6.0
    assert model.weight.item() == -12.0


def test_buffers_and_what_a_step_writes_itself_come_together(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        with torch.no_grad():
            model[1].bias.clamp_(-0.01, 0.01)

    for _ in range(6):
        strategy.run(step, args=(torch.randn(8, 2) + 5,))
    assert model.state_dict()["0.num_batches_tracked"].item() == 6
    assert (model[0].running_mean > 1.5).all()
    assert model[1].bias.abs().item() <= 0.011


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.01)


def test_rows_that_one_worker_writes_leave_those_of_others_alone(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    with strategy.scope():
        table = nn.Embedding(4, 4, max_norm=1.0)  # changes the rows that it looks up
        optimizer = torch.optim.SGD(table.parameters(), lr=0.25)
    with torch.no_grad():
        table.weight.fill_(1.0)

    def step(row: int, folder: str) -> None:
        optimizer.zero_grad()
        if row == 1:
            wait_for(Path(folder) / "begun")
        table(torch.tensor([row])).sum().backward()
        if row == 0:
            (Path(folder) / "begun").touch()
            wait_for(Path(folder) / "go")
        optimizer.step()

    first, second = (strategy.run(step, args=(row, str(tmp_path))) for row in (0, 1))
    second.wait()
    (tmp_path / "go").touch()
    first.wait()
    expected = torch.tensor([0.25, 0.25, 1.0, 1.0])[:, None].expand(4, 4)
    torch.testing.assert_close(table.state_dict()["weight"], expected)


def test_graph_of_values_that_an_update_has_replaced_is_refused(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        strategy.run(step).wait()


def test_graph_of_one_network_outlives_the_update_of_another(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        generator, critic = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]

    def step() -> None:
        fake = generator(torch.ones(1, 2))
        critic(fake.detach()).sum().backward()
        optimizers[1].step()
        critic(fake).sum().backward()
        optimizers[0].step()

    before = generator[0].weight.clone()
    for _ in range(2):
        strategy.run(step).wait()
    assert not torch.equal(generator.state_dict()["0.weight"], before)


def test_gradient_that_is_not_finite_is_not_pushed(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    before = model.weight.clone()
    strategy.run(step, args=(torch.full((1, 2), torch.nan),)).wait()
    with pytest.warns(StratagemWarning, match="non-finite gradient in .*'weight'"):
        strategy.run(int)
    assert torch.equal(model.state_dict()["weight"], before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(9):
            strategy.run(step, args=(torch.full((1, 2), torch.inf),)).wait()
        with pytest.raises(NonFiniteGradientError, match="in a row"):
            strategy.run(int)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of its Adagrad
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients_change_only_their_rows(strategy: sg.ParameterServerStrategy, kind: Any) -> None:
    torch.manual_seed(0)
    first = torch.randn(100, 4)
    plain = nn.Embedding(100, 4, sparse=True, _weight=first.clone())
    own = kind(plain.parameters(), lr=0.1)
    with strategy.scope():
        table = nn.Embedding(100, 4, sparse=True, _weight=first.clone())
        optimizer = kind(table.parameters(), lr=0.1)

    def step(table: nn.Embedding, optimizer: Any, rows: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = table(rows).square().sum()
        loss.backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
        return loss.item()

    for rows in (torch.tensor([3, 5, 3]), torch.tensor([5, 99]), torch.tensor([0])):
        expected = step(plain, own, rows)
        assert strategy.local_results(strategy.run(step, args=(table, optimizer, rows)))[0] == pytest.approx(expected)
    assert torch.allclose(table.state_dict()["weight"], plain.weight, atol=1e-6)
    touched = (table.weight != first).any(dim=1).nonzero().flatten().tolist()
    assert touched == [0, 3, 5, 99]


def test_optimizers_that_cannot_push_are_refused(four_cpus: None) -> None:
    for make, message in (
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS computes the loss many times"),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "SGD without momentum"),
    ):
        with sg.ParameterServerStrategy(1) as strategy:
            with strategy.scope():
                model = nn.Embedding(10, 2, sparse=True)
                optimizer = make(model)
            with pytest.raises(sg.StratagemError, match=message):
                strategy.run(int)
            del optimizer


def test_table_that_would_change_while_others_read_it_is_refused(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(1) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.EmbeddingBag(10, 2, sparse=True, max_norm=1.0))
        with pytest.raises(StrategyError, match=r"max_norm=1.0 would change it while others read it"):
            strategy.run(int)
        del model


class Scaled(torch.optim.Optimizer):
    """Has an attribute of its own, and keeps the sum of gradients in a list, if told to."""

    def __init__(self, params: Any, *, scale: float, keeps_list: bool) -> None:
        super().__init__(params, {"lr": 1.0})
        self.scale, self.keeps_list = scale, keeps_list

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.keeps_list:
                    self.state[parameter].setdefault("sums", [torch.zeros_like(parameter)])[0].add_(parameter.grad)
                parameter.sub_(parameter.grad, alpha=self.scale)


def test_optimizer_keeps_its_own_attributes(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = Scaled(model.parameters(), scale=3.0, keeps_list=False)
    with torch.no_grad():
        model.weight.zero_()

    step = falling_step(model, optimizer)
    strategy.run(step).wait()
    assert model.weight.item() == -3.0


def test_state_that_cannot_be_shared_is_refused(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(1) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
            optimizer = Scaled(model.parameters(), scale=1.0, keeps_list=True)
        with pytest.raises(ParameterError, match="Scaled keeps 'sums' as a list, which workers cannot share"):
            strategy.run(int)
        del optimizer


def test_step_that_fails_changes_nothing(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.BatchNorm1d(2)
        frozen = nn.Linear(100, 100).requires_grad_(False)

    def spoil() -> None:
        model(torch.randn(4, 2) + 5)
        with torch.no_grad():
            model.weight.zero_()
            frozen.weight.zero_()
        raise ValueError("spoilt")

    def look() -> tuple[float, float, int]:
        return model.weight.sum().item(), frozen.weight.abs().sum().item(), int(model.num_batches_tracked)

    before = frozen.weight.abs().sum().item()
    for _ in range(2):
        with pytest.raises(ValueError, match="spoilt"):
            strategy.run(spoil).wait()
        results = [strategy.run(look) for _ in range(4)]
        assert {strategy.local_results(each)[0] for each in results} == {(2.0, before, 0)}
    with torch.no_grad():
        frozen.weight.fill_(1.0)
    assert strategy.local_results(strategy.run(look))[0] == (2.0, 10_000.0, 0)


def test_memory_of_dropped_models_is_given_back(strategy: sg.ParameterServerStrategy) -> None:
    def held() -> int:
        gc.collect()
        strategy.run(int).wait()
        return len(strategy.workers.begin().variables.held)

    before = held()
    for _ in range(3):
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = plain_step(model, optimizer)
        strategy.run(step, args=batches(1)[0]).wait()
        assert held() > before
        del model, optimizer, step
        assert held() == before


def test_groups_can_be_added_between_steps(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0, momentum=0.5)

    def step() -> None:
        optimizer.zero_grad()
        (model[0].weight + model[1].weight).sum().backward()
        optimizer.step()

    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.0)
    strategy.run(step)
    strategy.run(step).wait()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 10.0})
    strategy.run(step).wait()
    assert [each.item() for each in model.state_dict().values()] == [-(1 + 1.5 + 1.75), -10.0]


def test_state_stays_with_its_parameter_when_another_is_added_before_it(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(3)])
        optimizer = torch.optim.SGD([{"params": [each]} for each in model[:2]], lr=1.0, momentum=0.5)

    def step() -> None:
        optimizer.zero_grad()
        (model[0] + 100 * model[1] + 10 * model[2]).backward()
        optimizer.step()

    strategy.run(step).wait()
    optimizer.param_groups[0]["params"].append(model[2])
    optimizer.load_state_dict(optimizer.state_dict())  # before workers know of it
    strategy.run(step).wait()
    states = optimizer.state_dict()["state"]
    assert [states[number]["momentum_buffer"].item() for number in range(3)] == [1.5, 10.0, 150.0]


def test_staleness_is_counted_for_each_worker(strategy: sg.ParameterServerStrategy) -> None:
    def total() -> int:
        return sum(sum(counts.values()) for counts in strategy.staleness().values())

    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, step = total(), plain_step(model, optimizer)
    for batch in batches(8):
        strategy.run(step, args=batch)
    model.state_dict()
    assert total() - before == 8


# Strategies of their own


def test_staleness_never_exceeds_its_bound(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(3, consistency=sg.BoundedStaleness(1), verbose=True) as strategy:
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = plain_step(model, optimizer)
        for batch in batches(30):
            strategy.run(step, args=batch)
        model.state_dict()
        found = strategy.staleness()
    assert sum(sum(counts.values()) for counts in found.values()) == 30
    assert max(max(counts) for counts in found.values()) <= 1


def test_what_the_main_program_writes_during_steps_makes_nobody_wait(four_cpus: None, tmp_path: Path) -> None:
    with sg.ParameterServerStrategy(2, consistency=sg.BoundedStaleness(1)) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(path: str) -> None:
            Path(path, str(os.getpid())).touch()
            optimizer.zero_grad()
            model.weight.sum().backward()
            while not Path(path, "go").exists():
                time.sleep(0.002)
            optimizer.step()

        results = [strategy.run(step, args=(str(tmp_path),)) for _ in range(2)]
        deadline = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.iterdir())) < 2:  # both are in a step
            assert time.monotonic() < deadline
            time.sleep(0.002)
        with torch.no_grad():
            model.weight.fill_(10.0)
        results.append(strategy.run(step, args=(str(tmp_path),)))
        (tmp_path / "go").touch()
        while not all(map(strategy.is_ready, results)):
            if time.monotonic() > deadline:
                strategy.workers.end()  # else those who wait are waited for
            assert time.monotonic() < deadline
        assert model.state_dict()["weight"].item() == 7.0
        found = strategy.staleness()
    assert sum(sum(counts.values()) for counts in found.values()) == 3
    assert max(max(counts) for counts in found.values()) <= 1


def test_rate_can_follow_staleness_and_reads_may_be_torn(four_cpus: None, capsys: pytest.CaptureFixture[str]) -> None:
    consistency = sg.Async(rate_of=lambda staleness: 0.0)
    with sg.ParameterServerStrategy(1, consistency=consistency, torn_reads=True, verbose=True) as strategy:
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        strategy.run(plain_step(model, optimizer), args=batches(1)[0]).wait()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert "worker 0: 1 pushes, mean 0.00 (0: 1)" in capsys.readouterr().out


def test_straggler_is_dropped_with_backup_workers(four_cpus: None, tmp_path: Path) -> None:
    with sg.ParameterServerStrategy(3, consistency=sg.Synchronous(backup_workers=1)) as strategy:
        assert strategy.num_replicas_in_sync == 3
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.fill_(0.0)

        def step(x: torch.Tensor, folder: str) -> float:
            optimizer.zero_grad()
            model(x).mean().backward()
            while x.max() > 100 and not (Path(folder) / "go").exists():
                time.sleep(0.01)
            optimizer.step()
            return x.max().item()

        data = torch.tensor([[1.0], [2.0], [3.0], [4.0], [500.0], [500.0]])
        (batch,) = strategy.distribute(data, global_batch_size=6)
        values = strategy.local_results(strategy.run(step, args=(batch, str(tmp_path))))
        assert sorted(values) == [2.0, 4.0]
        assert model.weight.item() == -2.5  # the mean over four examples
        (tmp_path / "go").touch()
        assert model.state_dict()["weight"].item() == -2.5  # waits for the third, which was too late
        assert strategy.workers.board.num_dropped.sum() == 1
        (batch,) = strategy.distribute(torch.ones(6, 1), global_batch_size=6)
        strategy.run(step, args=(batch, str(tmp_path)))
        assert model.state_dict()["weight"].item() == -3.5


def test_what_cannot_be_sent_is_told_once(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(2, consistency=sg.Synchronous(backup_workers=1)) as strategy:
        with pytest.raises(StrategyError, match="a generator cannot be sent"):
            strategy.run(int, args=((each for each in "ab"),))
        assert strategy.local_results(strategy.run(int))[0] == 0


@pytest.fixture(scope="module")
def backed(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(3, consistency=sg.Synchronous(backup_workers=1)) as made:
        made.run(int)
        yield made


def run_all(strategy: sg.ParameterServerStrategy, step: Callable[..., Any], data: torch.Tensor, *args: Any) -> None:
    """Runs a step with three parts, waits for all of them, and raises what went wrong."""
    (batch,) = strategy.distribute(data, global_batch_size=len(data))
    strategy.run(step, args=(batch, *args))
    strategy.workers.settle()
    strategy.workers.raise_failures()


@pytest.mark.filterwarnings("ignore:non-finite gradient")
def test_update_that_most_workers_skip_holds_nobody_up(backed: sg.ParameterServerStrategy) -> None:
    with backed.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    run_all(backed, step, torch.tensor([[torch.nan], [torch.nan], [1.0]]))
    before = model.weight.item()
    run_all(backed, step, torch.ones(3, 1))
    assert before - model.weight.item() == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore:non-finite gradient")
def test_worker_that_skips_one_update_is_in_the_round_of_the_next(
    backed: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    with backed.scope():
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in model]
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()

    def step(x: torch.Tensor, path: str) -> None:
        if x.isnan().any():
            Path(path).touch()
        while not Path(path).exists():
            time.sleep(0.05)
        for part, optimizer in zip(model, optimizers, strict=True):
            optimizer.zero_grad()
            part(x if part is model[0] else torch.ones(1, 1)).mean().backward()
            optimizer.step()

    (tmp_path / "first").touch()
    run_all(backed, step, torch.full((3, 1), 100.0), str(tmp_path / "first"))
    assert [each.item() for each in model.parameters()] == [-100.0, -1.0]
    run_all(backed, step, torch.tensor([[torch.nan], [1.0], [1.0]]), str(tmp_path / "second"))
    assert [each.item() for each in model.parameters()] == [-101.0, -2.0]


def test_run_may_make_any_number_of_updates(backed: sg.ParameterServerStrategy) -> None:
    with backed.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()

    def step(x: torch.Tensor) -> None:
        for _ in range(70):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    for number in (1, 2):
        run_all(backed, step, torch.ones(3, 1))
        assert model.weight.item() == -70.0 * number


def test_buffers_of_all_workers_come_together_with_backup_workers(backed: sg.ParameterServerStrategy) -> None:
    with backed.scope():
        model = nn.BatchNorm1d(1)
        model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model.seen += len(x)
        model(x).mean().backward()
        optimizer.step()

    for _ in range(5):
        run_all(backed, step, torch.randn(6, 1))
    assert (model.seen.item(), model.num_batches_tracked.item()) == (30, 15)


def test_writes_of_all_workers_come_together_with_backup_workers(backed: sg.ParameterServerStrategy) -> None:
    with backed.scope():
        table = nn.Embedding(3, 4, max_norm=1.0)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.0)
    with torch.no_grad():
        table.weight.fill_(1.0)

    def step(rows: torch.Tensor) -> None:
        table(rows).sum().backward()
        optimizer.step()

    run_all(backed, step, torch.arange(3))
    torch.testing.assert_close(table.weight.detach(), torch.full((3, 4), 0.5))


def test_worker_that_waits_for_an_update_of_its_own_says_so(four_cpus: None) -> None:
    consistency = sg.Synchronous(backup_workers=1)
    with sg.ParameterServerStrategy(3, consistency=consistency, stall_timeout_s=4.0) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(x: torch.Tensor) -> None:
            model(x).mean().backward()
            for _ in range(int(x)):
                optimizer.step()

        run_all(strategy, step, torch.ones(3, 1))
        with pytest.raises(StrategyError, match="update 2 of a step needs 2 workers, 1 came in time"):
            run_all(strategy, step, torch.tensor([[1.0], [1.0], [2.0]]))


def test_ctrl_c_keeps_the_state_of_optimizers(four_cpus: None) -> None:
    strategy = sg.ParameterServerStrategy(2)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for _ in range(6):
        strategy.run(step)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KeyboardInterrupt), strategy.workers.attending():
        raise KeyboardInterrupt
    torch.testing.assert_close(optimizer.state_dict(), before)
    with pytest.raises(StrategyError, match=r"was closed at .* by Ctrl-C"):
        strategy.run(step)


def test_error_of_the_program_is_not_replaced_by_that_of_a_step(four_cpus: None) -> None:
    def fail() -> None:
        raise ValueError("in a step")

    with pytest.raises(ZeroDivisionError), sg.ParameterServerStrategy(1) as strategy:  # noqa: PT012
        result = strategy.run(fail)
        deadline = time.monotonic() + 20.0
        while not strategy.is_ready(result):
            assert time.monotonic() < deadline
        raise ZeroDivisionError


def test_gradients_that_are_not_finite_are_told_with_run_and_worker(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: float) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 1), x)).sum().backward()
        optimizer.step()

    first = strategy.workers.num_runs + 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(12):
            strategy.run(step, args=(float("nan") if number == 2 else 1.0,))
        strategy.workers.settle()
        strategy.workers.raise_failures()
    (warning,) = told
    assert re.match(rf"non-finite gradient in replica \d, .*, run {first + 2}; update", str(warning.message))


def test_step_that_nobody_looked_at_is_told_at_the_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import stratagem as sg

def fail():
    raise ValueError("bad row 19")

if __name__ == "__main__":
    strategy = sg.ParameterServerStrategy(1)
    strategy.run(fail)
""")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert "Exception ignored" not in done.stderr
    assert "ValueError: bad row 19\nraised in worker 0:" in done.stderr


def test_objects_stay_usable_after_the_end(four_cpus: None) -> None:
    strategy = sg.ParameterServerStrategy(1)
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    strategy.run(plain_step(model, optimizer), args=batches(1)[0])
    strategy.close()
    assert optimizer.state_dict()["state"][0]["step"].item() == 1
    plain_step(model, optimizer)(*batches(1)[0])
    assert strategy.staleness() == {0: {0: 1}}
    with pytest.raises(StrategyError, match=r"closed at .*test_parameter_server.py"):
        strategy.run(int)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sg.ParameterServerStrategy(0), "num_workers is a whole number from 1"),
        (lambda: sg.ParameterServerStrategy(2, num_ps=0), "num_ps is a whole number from 1"),
        (lambda: sg.ParameterServerStrategy(2, torn_pushes="allow"), "torn_pushes is True or False"),
        (
            lambda: sg.ParameterServerStrategy(2, torn_pushes=True, consistency=sg.Synchronous(backup_workers=1)),
            "is for workers that push by themselves",
        ),
        (lambda: sg.ParameterServerStrategy(2, consistency="async"), "got 'async'"),  # type: ignore[arg-type]
        (lambda: sg.ParameterServerStrategy(2, consistency=sg.Synchronous(2)), "leaves none of 2 workers"),
        (lambda: sg.ParameterServerStrategy(2, max_restarts=-1), "max_restarts"),
        (lambda: sg.BoundedStaleness(-1), "max_staleness is a whole number from 0"),
        (lambda: sg.Async(rate_of=3), "rate_of is a function of the staleness"),  # type: ignore[arg-type]
        (lambda: sg.ParameterServerStrategy(2, compression="bf16"), "compression is for tasks of a cluster"),  # type: ignore[call-arg]
        (
            lambda: ClusterOptions.of(heartbeat_timeout_s=float("nan")),
            "heartbeat_timeout_s is a number of seconds above 0",
        ),
        (lambda: sg.FixedShardsPartitioner(0), "num_shards is a whole number from 1"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(sg.StratagemError, match=message):
        make()


def test_optimizer_steps_only_in_a_run(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.run(plain_step(model, optimizer), args=batches(1)[0]).wait()
    with pytest.raises(StrategyError, match="outside strategy"):
        optimizer.step()


# Training without writing the loop


def test_estimator_trains_evaluates_and_goes_on(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    records, results = [Record(), Record()], []
    for record, place, chosen in zip(records, ("one device", "workers"), (None, strategy), strict=True):
        for max_steps in (3, 6):
            estimator = make_estimator(tmp_path / place, chosen)
            estimator.train(estimator_batches, hooks=[record], max_steps=max_steps)
        results.append(estimator.evaluate(one_pass))
    # Two workers have steps at the same time: what they compute from may be one update old.
    assert records[1].losses == pytest.approx(records[0].losses, abs=0.1)
    assert results[1] == pytest.approx(results[0], abs=0.1)
    assert results[1]["global_step"] == 6


def test_the_schedule_of_an_estimator_counts_the_steps_of_all_workers(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    class Rates(sg.estimator.SessionRunHook):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def after_run(self, context: Any, values: Any) -> None:
            self.rates.append(values.learning_rate)

    hooks = [Rates(), Rates()]
    for hook, place, chosen in zip(hooks, ("one device", "workers"), (None, strategy), strict=True):
        for max_steps in (3, 6):
            make_estimator(tmp_path / place, chosen).train(estimator_batches, hooks=[hook], max_steps=max_steps)
    assert hooks[1].rates == hooks[0].rates
    assert len(set(hooks[0].rates)) > 1


def test_staleness_goes_to_tensorboard(strategy: sg.ParameterServerStrategy) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, float] = {}
            self.histograms: dict[str, list[int]] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars[tag] = value

        def add_histogram(self, tag: str, values: torch.Tensor, step: int) -> None:
            self.histograms[tag] = values.tolist()

    writer = Writer()
    strategy.write_staleness(writer, 7)
    for worker, counts in strategy.staleness().items():
        assert len(writer.histograms[f"staleness/worker {worker}"]) == sum(counts.values())
        assert 0 <= writer.scalars[f"staleness/worker {worker}, mean"] <= max(counts)


def test_strategy_that_is_dropped_ends_its_workers(four_cpus: None) -> None:
    strategy = sg.ParameterServerStrategy(1)
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.run(plain_step(model, optimizer), args=batches(1)[0]).wait()
    (process,) = [worker.process for worker in strategy.workers.scheduler.workers]
    del strategy
    gc.collect()
    assert process.wait(PATIENCE_S)
    assert model(batches(1)[0][0]).shape == (8, 3)
