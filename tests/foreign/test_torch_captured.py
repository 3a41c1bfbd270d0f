"""State that a step captures: what it changes lives in its replica, what the main program changes replaces it."""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from stratagem.errors import StrategyError
from tests.foreign.programs import Program, Programs, Runner

programs = Programs()
rows_seen = 0


def batch(num_rows: int = 7, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, width, generator=numbers), torch.randn(num_rows, 1, generator=numbers)


def linear(on: Runner, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Linear(3, 1)
        return model, torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def sums(on: Runner, step: Callable[..., Any], *more: Any, num_runs: int = 3) -> list[Any]:
    """What a step that returns a number returned in some runs, summed over the replicas."""
    return [on.sum(on(step, *batch(), **dict(zip("abc", more, strict=False)))) for _ in range(num_runs)]


# What a step changes


@programs()
def a_dict_that_counts(on: Runner) -> Any:
    stats = {"rows": 0, "runs": 0}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        stats["rows"] += len(x)
        return torch.tensor(stats["rows"])

    return sums(on, step)


@programs()
def a_list_that_grows(on: Runner) -> Any:
    seen: list[int] = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return torch.tensor(sum(seen))

    return sums(on, step)


@programs()
def a_variable_of_the_function_around(on: Runner) -> Any:
    total = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += len(x)
        return torch.tensor(total)

    def look() -> torch.Tensor:
        return torch.tensor(total)

    return sums(on, step), on.sum(on(look))


@programs()
def a_variable_of_a_step_that_is_defined_anew(on: Runner) -> Any:
    total, mean, found = 0, torch.zeros(()), []
    for _ in range(3):

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal total, mean
            total += len(x)
            mean = mean + len(x)
            return mean + total

        found.append(on.sum(on(step, *batch())))
        del step
    return found


@programs()
def an_alias_of_a_parameter(on: Runner) -> Any:
    model, optimizer = linear(on)
    on(lambda x, y: torch.zeros(()), *batch())
    weight, part = model.weight.data, {"first": model.weight.detach()[0, :1]}

    def step(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        return torch.cat([weight[0], part["first"], a[0]])

    return [on.first(on(step, *batch(), a=weight)) for _ in range(3)]


class Own(torch.optim.Optimizer):
    """An optimizer of the program, with settings of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.factor, self.used = 1.0, [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.used.append(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-self.factor * group["lr"])


@programs()
def an_attribute_of_an_own_optimizer(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Linear(3, 1)
        optimizer = Own(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        return model.weight.detach().clone()

    found = []
    for factor in (1.0, 0.5, 2.0):
        optimizer.factor = factor
        found.append(on.first(on(step, *batch())))
    return found


@programs()
def a_global(on: Runner) -> Any:
    global rows_seen  # noqa: PLW0603
    rows_seen = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        global rows_seen  # noqa: PLW0603
        rows_seen += len(x)
        return torch.tensor(rows_seen)

    def look() -> torch.Tensor:
        return torch.tensor(rows_seen)

    before = sums(on, step), on.sum(on(look))
    rows_seen = 0
    return before, sums(on, step, num_runs=2)


@programs()
def objects_in_objects(on: Runner) -> Any:
    class Meter:
        count = 0  # of all meters

        def __init__(self) -> None:
            self.window: collections.deque[int] = collections.deque(maxlen=2)
            self.total = torch.zeros(())

        def add(self, number: int) -> None:
            self.window.append(number)
            self.total += number
            Meter.count += number

    meters = {"rows": [Meter(), Meter()]}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for meter in meters["rows"]:
            meter.add(len(x))
        step.rows = getattr(step, "rows", 0) + len(x)  # type: ignore[attr-defined]
        first = meters["rows"][0]
        return torch.stack([first.total, torch.tensor([sum(first.window), Meter.count, step.rows]).sum()])  # type: ignore[attr-defined]

    return sums(on, step)


@programs()
def attributes_of_a_module(on: Runner) -> Any:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.rows, self.calls, self.flag = 0, [0], False
            self.cache: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows += len(x)
            self.calls.append(len(x))
            self.cache["sum"] = self.cache.get("sum", torch.zeros(())) + x.sum().detach()
            return super().forward(x)

    with on.scope():
        torch.manual_seed(3)
        model = Counting()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model(x)
        return torch.stack([torch.tensor(float(model.rows + sum(model.calls))), model.cache["sum"]])

    before = sums(on, step)
    model.flag = True  # what the step has changed stays
    after = sums(on, step, num_runs=2)
    model.calls.clear()
    model.rows = 0
    return before, after, sums(on, step, num_runs=1)


@programs()
def containers_and_tensors_as_arguments(on: Runner) -> Any:
    stats, seen, total = {"rows": 0}, [0], torch.zeros(())

    def step(x: torch.Tensor, y: torch.Tensor, a: dict[str, int], b: list[int], c: torch.Tensor) -> torch.Tensor:
        a["rows"] += len(x)
        b[0] += len(x)
        c += len(x)
        return c + torch.tensor(a["rows"] + b[0])

    before = sums(on, step, stats, seen, total)
    stats["rows"] = 0
    total.zero_()
    return before, sums(on, step, stats, seen, total)


@programs()
def a_hidden_state(on: Runner) -> Any:
    """Each replica goes on with the state of its rows; the graph of the last call may be in it."""
    with on.scope():
        torch.manual_seed(0)
        cell = nn.RNNCell(3, 2)
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)

    class State:
        hidden: torch.Tensor | None = None
        loss: torch.Tensor | None = None

    state = State()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        state.hidden = cell(x, None if state.hidden is None else state.hidden.detach())
        state.loss = (state.hidden.sum(1, keepdim=True) - y).square().mean()
        state.loss.backward()
        optimizer.step()
        return state.loss.detach()

    losses = [on.mean(on(step, *batch())) for _ in range(3)]
    state.hidden = None
    losses += [on.mean(on(step, *batch())) for _ in range(2)]
    return losses, dict(cell.named_parameters())


# What the main program changes


@programs()
def large_containers(on: Runner) -> Any:
    numbers, table = list(range(2000)), dict.fromkeys(range(2000), 0)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        numbers.append(len(x))
        table[3] += len(x)
        return torch.tensor([sum(numbers[2000:]) + numbers[0] * len(x), table[3] + table[5] * len(x)])

    before = sums(on, step)
    numbers[:] = range(1, 2001)
    table.update({3: 0, 5: 9})
    return before, sums(on, step)


@programs()
def one_entry_of_what_a_step_changes(on: Runner) -> Any:
    stats: dict[str, Any] = {"rows": 0, "rate": 1, "old": 5}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        stats["rows"] += len(x)
        return torch.tensor([stats["rows"], stats["rate"] * len(x), stats.get("old", 0) * len(x)])

    before = sums(on, step)
    stats["rate"] = 3
    del stats["old"]
    return before, sums(on, step)


@programs()
def two_functions_that_share_state(on: Runner) -> Any:
    counts = collections.Counter[str]()

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counts["train"] += len(x)
        return torch.tensor(counts["train"])

    def test(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counts["test"] += len(x)
        return torch.tensor(counts["train"] + counts["test"])

    results = []
    for _ in range(2):
        results += [*sums(on, train, num_runs=2), *sums(on, test, num_runs=2)]
        counts["test"] = 0
    return results


@programs()
def a_function_made_for_each_run(on: Runner) -> Any:
    stats = {"rows": 0}

    def count(x: torch.Tensor, factor: int) -> torch.Tensor:
        stats["rows"] += factor * len(x)
        return torch.tensor(stats["rows"])

    return [on.sum(on(lambda x, y, factor=factor: count(x, factor), *batch())) for factor in range(4)]


@programs()
def a_table_filled_in_place(on: Runner) -> Any:
    table, numbers = torch.zeros(3), [1.0]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return table * len(x) + sum(numbers) * len(x)

    results = sums(on, step, num_runs=1)
    table.data.fill_(2.0)
    results += sums(on, step, num_runs=1)
    table[1] = 5.0
    numbers.append(3.0)
    return results + sums(on, step, num_runs=2)


# Trainers


class Trainer:
    """As many programs have one: all state in one object, the step a method."""

    def __init__(self, on: Runner) -> None:
        self.model, self.optimizer = linear(on, momentum=0.9)
        with on.scope():
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.loss = nn.SmoothL1Loss(beta=0.5)
        self.log = logging.getLogger("tests.captured")
        self.lock = threading.Lock()
        self.rows = 0
        self.history: list[int] = []
        self.epoch = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.rows += len(x)
        self.history.append(len(x))
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.log.debug("loss %s", loss)
        return torch.stack([loss.detach() * len(x), torch.tensor(float(self.rows + sum(self.history) + self.epoch))])


@programs()
def a_trainer_with_a_step(on: Runner) -> Any:
    trainer = Trainer(on)
    results = []
    for epoch in range(2):
        trainer.epoch = 0 * epoch
        results += [on.sum(on(trainer.step, *batch())) for _ in range(2)]
        trainer.schedule.step()
        trainer.history.clear()
    return results, dict(trainer.model.named_parameters())


@programs()
def weights_of_classes_made_outside_the_scope(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="none")
    scale = nn.Module()
    scale.register_buffer("factor", torch.tensor(2.0))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (criterion(model(x), y.abs().long().flatten() % 4) * scale.factor).mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [on.mean(on(step, *batch())) for _ in range(2)]
    criterion.weight[1] = 7.0  # type: ignore[index]
    return losses, [on.mean(on(step, *batch())) for _ in range(2)], model.weight


@programs()
def accumulation_over_several_runs(on: Runner) -> Any:
    model, optimizer = linear(on, momentum=0.9)

    def micro_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(model(x), y) / 3
        loss.backward()
        return loss

    def update() -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    norms = []
    for _ in range(2):
        for micro in range(3):
            held = on.strategy.no_sync() if on.strategy is not None and micro < 2 else contextlib.nullcontext()
            with held:
                on(micro_step, *batch(5 + micro))
        norms.append(on.first(on(update)))
    return norms, dict(model.named_parameters())


# Hooks and methods of instances


@programs()
def hooks_that_fill_a_list(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    features: list[torch.Tensor] = []
    sizes: dict[str, int] = {}

    def remember(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        features.append(output.detach())
        sizes["last"] = len(output)

    first = model[0].register_forward_hook(remember)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features.clear()
        model(x)
        return torch.stack([each.sum() for each in features] + [torch.tensor(float(sizes["last"]))])

    before = sums(on, step, num_runs=2)
    second = model[2].register_forward_hook(remember)
    both = sums(on, step, num_runs=2)
    first.remove()
    one = sums(on, step, num_runs=2)
    second.remove()
    model[1].register_forward_pre_hook(lambda module, given: remember(module, given, given[0]))
    return before, both, one, sums(on, step, num_runs=1)


@programs()
def a_forward_set_on_an_instance(on: Runner) -> Any:
    model, optimizer = linear(on)
    factor = 1.0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [on.mean(on(step, *batch()))]
    plain = model.forward
    model.forward = lambda x: factor * plain(x) + 1  # type: ignore[method-assign]
    losses += [on.mean(on(step, *batch()))]
    factor = 2.0
    losses += [on.mean(on(step, *batch()))]
    del model.forward
    return losses, on.mean(on(step, *batch()))


# Random numbers


@programs(without=["2 workers of 1"])
def a_generator_of_the_program(on: Runner) -> Any:
    """Replica 0 draws what one device would; the others draw their own."""
    with on.scope():
        inside = torch.Generator().manual_seed(5)
    outside = torch.Generator().manual_seed(6)

    def step(a: torch.Generator) -> torch.Tensor:
        return torch.cat([torch.rand(2, generator=each) for each in (inside, a)])

    def drawn() -> torch.Tensor:
        results = on(step, a=outside)
        if on.strategy is None:
            return results  # type: ignore[no-any-return]
        values = on.strategy.local_results(results)
        assert len({tuple(each.tolist()) for each in values}) == len(values)
        return values[0]  # type: ignore[no-any-return]

    first = [drawn() for _ in range(2)]
    inside.manual_seed(5)
    return first, drawn()


@programs(without=["one device", "2 workers of 1"])
def a_generator_for_each_replica(on: Runner) -> Any:
    number = 1 if on.strategy is None else on.strategy.num_replicas_in_sync
    given = [torch.Generator().manual_seed(seed) for seed in range(number)]
    own = given[0] if on.strategy is None else sg.PerReplica(given)

    def step(a: torch.Generator) -> torch.Tensor:
        return torch.rand(2, generator=a)

    def drawn() -> list[torch.Tensor]:
        results = [on(step, a=own) for _ in range(2)]
        if on.strategy is None:
            return results
        alone = [torch.Generator().manual_seed(each.initial_seed()) for each in given]
        for each in results:
            torch.testing.assert_close(list(each.values), [torch.rand(2, generator=mine) for mine in alone])
        return [each[0] for each in results]

    before = drawn()
    for seed, each in enumerate(given):
        each.manual_seed(10 + seed)
    return before, drawn()


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)


@pytest.fixture(scope="module")
def servers(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(num_workers=1) as strategy:
        strategy.local_results(strategy.run(int))  # its worker starts now, not in a test
        yield strategy


def test_worker_keeps_its_state_and_gets_what_the_main_program_changes(servers: sg.ParameterServerStrategy) -> None:
    stats = {"runs": 0, "rate": 1}
    numbers = torch.Generator().manual_seed(1)

    def step() -> tuple[int, float]:
        stats["runs"] += stats["rate"]
        return stats["runs"], torch.rand((), generator=numbers).item()

    found = [servers.local_results(servers.run(step))[0] for _ in range(3)]
    assert [runs for runs, _ in found] == [1, 2, 3]
    assert len({number for _, number in found}) == 3
    assert stats == {"runs": 0, "rate": 1}
    stats["rate"] = 5
    assert servers.local_results(servers.run(step))[0][0] == 8
    stats["runs"] = 100
    assert servers.local_results(servers.run(step))[0][0] == 105


def test_no_sync_around_runs_is_refused_where_each_goes_to_any_worker(servers: sg.ParameterServerStrategy) -> None:
    with pytest.raises(StrategyError, match="each run goes to whichever worker is free"), servers.no_sync():
        pass


def test_replicas_get_what_the_main_program_has_after_a_run_that_failed(four_cpus: None) -> None:
    stats = {"runs": 0}

    def step(fails: bool) -> int:
        stats["runs"] += 1 + sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
        if fails:
            raise ValueError("no")
        return stats["runs"]

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert strategy.run(step, args=(False,)).values == (1, 2)
        with pytest.raises(ValueError, match="no"):
            strategy.run(step, args=(True,))
        assert strategy.run(step, args=(False,)).values == (3, 4)


@pytest.mark.parametrize("is_argument", [False, True])
def test_tensor_with_a_graph_is_refused(four_cpus: None, is_argument: bool) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            made = torch.ones(2, requires_grad=True) * 2
            plain = torch.ones(2, requires_grad=True)
        with pytest.raises(StrategyError, match=r"a tensor of shape \(2,\) with a graph \(MulBackward0\)"):
            strategy.run(lambda x: x.sum() if is_argument else made.sum(), args=(made if is_argument else 1,))
        with pytest.raises(StrategyError, match="requires_grad=True that is not a parameter"):
            strategy.run(lambda: plain.sum() + 1)


def leave(number: int) -> int:
    step()  # type: ignore[name-defined]  # noqa: F821
    return number


def test_a_global_with_the_name_of_an_attribute_is_not_captured(
    four_cpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the last cell left a function `step`, with an optimizer that no strategy has any more."""
    leftover = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    monkeypatch.setitem(globals(), "step", leftover.step)
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train() -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        strategy.run(train)
        with pytest.raises(StrategyError, match="was created outside"):
            strategy.run(leave, args=(1,))
