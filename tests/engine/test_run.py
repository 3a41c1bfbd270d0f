"""What can be run, what comes back, and what is seen of changes between runs."""

import collections
import contextlib
import dataclasses
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg


def rank() -> int:
    return sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]


def results(strategy: sg.Strategy, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return list(strategy.local_results(strategy.run(function, args=args, kwargs=kwargs)))


# What can be run


class Multiplier:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, x: int) -> int:
        return self.factor * x

    def __call__(self, x: int) -> int:
        return self.factor + x

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @staticmethod
    def squared(x: int) -> int:
        return x * x


def test_every_kind_of_callable(strategy: sg.MirroredStrategy) -> None:
    base = 10

    def closure(x: int, *, extra: int = 0) -> int:
        return base + x + extra

    assert results(strategy, closure, 1, extra=2) == [13, 13]
    assert results(strategy, lambda x: x + base, 1) == [11, 11]
    assert results(strategy, functools.partial(closure, extra=5), 1) == [16, 16]
    assert results(strategy, Multiplier(3).times, 4) == [12, 12]
    assert results(strategy, Multiplier(3), 4) == [7, 7]
    assert results(strategy, Multiplier.name) == ["Multiplier", "Multiplier"]
    assert results(strategy, Multiplier.squared, 3) == [9, 9]
    assert [each.factor for each in results(strategy, Multiplier, 3)] == [3, 3]
    assert results(strategy, len, "abc") == [3, 3]
    assert results(strategy, torch.add, torch.tensor(1), torch.tensor(2)) == [3, 3]


def test_recursive_and_mutually_recursive_functions(strategy: sg.MirroredStrategy) -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n > 0 and even(n - 1)

    assert results(strategy, even, 10) == [True, True]


def test_a_distributed_module_itself(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    first, second = results(strategy, model, torch.ones(3, 2))
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert results(strategy, model.forward, torch.ones(1, 2))[1].shape == (1, 1)


def test_functions_of_a_notebook(strategy: sg.MirroredStrategy) -> None:
    cell: dict[str, Any] = {"__name__": "__main__", "torch": torch, "sg": sg}
    exec("class Cell:\n    n = 2\ndef helper(x):\n    return x * Cell.n\ndef f(x):\n    return helper(x)\n", cell)  # noqa: S102
    assert results(strategy, cell["f"], 4) == [8, 8]
    exec("def helper(x):\n    return x + 100\n", cell)  # noqa: S102
    assert results(strategy, cell["f"], 4) == [104, 104]


PROGRAM = """
import os, sys
from pathlib import Path
import torch, stratagem as sg

with open(sys.argv[1], "a") as log:
    log.write("main\\n")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
    def forward(self, x):
        return self.linear(x)

sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
with sg.MirroredStrategy() as strategy:
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [strategy.reduce("mean", strategy.run(step, args=(torch.ones(4, 2),))).item() for _ in range(3)]
    assert losses[0] > losses[2], losses
    print("trained", type(strategy.run(lambda: Net()).values[1]) is Net)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "command", pytest.param("stdin", marks=pytest.mark.soak)])
def test_program_is_executed_once(way: str, tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "train.py"
    script.write_text(PROGRAM)
    command, text = {
        "file": ([str(script)], None),
        "stdin": (["-"], PROGRAM),
        "command": (["-c", PROGRAM], None),
    }[way]
    done = subprocess.run(
        [sys.executable, "-W", "error", *command, str(log)],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained True\n"
    assert log.read_text() == "main\n"


USERS_MODULE = """
from pathlib import Path
with open({log!r}, "a") as log:
    log.write("x")
rate = 2
class Custom(ValueError):
    pass
def setup(given):
    global model
    model = given
def predict(x):
    return (model(x) * rate).sum()
def fail():
    raise Custom("row 7")
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "users_steps.py").write_text(USERS_MODULE.format(log=str(tmp_path / "log")))
    monkeypatch.syspath_prepend(tmp_path)
    import users_steps  # type: ignore[import-not-found]

    yield users_steps
    assert (tmp_path / "log").read_text() == "x"
    del sys.modules["users_steps"]


def test_users_module_with_distributed_globals_is_not_run_again(
    strategy: sg.MirroredStrategy, users_module: Any
) -> None:
    with strategy.scope():
        users_module.setup(nn.Linear(2, 1))
    expected = users_module.predict(torch.ones(2)).item()
    assert [each.item() for each in results(strategy, users_module.predict, torch.ones(2))] == [expected] * 2
    users_module.rate = 4
    for function in (users_module.predict, lambda x: users_module.predict(x) + 0):
        assert [each.item() for each in results(strategy, function, torch.ones(2))] == pytest.approx([2 * expected] * 2)
    with pytest.raises(users_module.Custom, match="row 7"):
        strategy.run(users_module.fail)

    def fail_in_one() -> None:
        if rank() == 1:
            users_module.fail()

    with pytest.raises(users_module.Custom, match="row 7"):
        strategy.run(fail_in_one)


# What is seen of changes between runs


scale = 1


def test_captured_values_are_current(strategy: sg.MirroredStrategy) -> None:
    global scale  # noqa: PLW0603
    items, tensor, array, keywords = [1], torch.zeros(2), np.zeros(2), {"a": 1}

    def look(default: list[int] = items) -> str:
        return repr((items, tensor.tolist(), array.tolist(), keywords, scale, default))

    seen = []
    for change in (
        lambda: None,
        lambda: items.append(2),
        lambda: tensor.add_(1),
        lambda: tensor.data.add_(1),
        lambda: array.fill(3),
        lambda: keywords.update(a=5),
        lambda: look.__defaults__[0].append(9),
    ):
        change()
        scale += 1
        for _ in range(2):
            own, other = results(strategy, look)
            assert own == other
        seen.append(own)
    assert len(set(seen)) == 7


def test_captured_inference_tensors_arrive(strategy: sg.MirroredStrategy) -> None:
    with torch.inference_mode():
        captured = torch.arange(3)
    for _ in range(2):
        assert results(strategy, lambda: captured.sum().item()) == [3, 3]


def test_changes_of_captured_values_stay_in_their_replica(strategy: sg.MirroredStrategy) -> None:
    items = [0]

    def grow() -> int:
        items.append(rank())
        return len(items)

    assert results(strategy, grow) == [2, 2]


def test_parts_of_a_model_replaced_in_the_scope_are_replaced_everywhere(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    look = lambda: tuple(model(torch.ones(1, 2)).shape)  # noqa: E731
    assert results(strategy, look) == [(1, 2)] * 2
    with strategy.scope():
        model[1] = nn.Linear(2, 5)
    assert results(strategy, look) == [(1, 5)] * 2


def test_many_functions_and_back_to_the_first(strategy: sg.MirroredStrategy) -> None:
    first = lambda: "first"  # noqa: E731
    assert results(strategy, first) == ["first"] * 2
    for number in range(80):
        assert results(strategy, functools.partial(int, number)) == [number] * 2
    assert results(strategy, first) == ["first"] * 2


# Results


Pair = collections.namedtuple("Pair", "loss shape")


@dataclasses.dataclass
class Report:
    name: str
    values: torch.Tensor


def test_results_of_any_nesting(strategy: sg.MirroredStrategy) -> None:
    def returned() -> Any:
        pair = Pair(torch.tensor(float(rank())), torch.ones(2, 3).shape)
        return {"pair": pair, "list": [None, "text", 3], "report": Report("r", torch.ones(2))}

    result = strategy.run(returned)
    assert isinstance(result["pair"], Pair)
    assert result["pair"].loss.values == (0, 1)
    assert result["pair"].shape[1].values == (3, 3)
    assert [each.values for each in result["list"]] == [(None, None), ("text", "text"), (3, 3)]
    assert isinstance(result["report"], Report)
    assert result["report"].values[1].tolist() == [1, 1]
    assert strategy.local_results(result)[1]["pair"].loss == 1
    assert strategy.reduce("sum", result["pair"].loss) == 1


def test_large_results_stay_until_they_are_asked_for(strategy: sg.MirroredStrategy) -> None:
    result = strategy.run(lambda: torch.full((100_000,), float(rank()), requires_grad=True) * 2)
    assert repr(result).endswith(", ...)")
    again = strategy.run(lambda x: x.sum(), args=(result,))
    assert again.values == (0, 200_000)
    assert not result[1].requires_grad
    assert result[1].sum() == 200_000
    assert strategy.reduce("max", result).max() == 2


def test_returned_parameters_are_those_of_the_run(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        large, small = nn.Linear(300, 300), nn.Linear(2, 2)
    kept = strategy.run(lambda: (large.weight, small.weight[0]))
    before = large.weight.detach().clone(), small.weight[0].detach().clone()
    with torch.no_grad():
        large.weight.zero_()
        small.weight.zero_()
    for result, expected in zip(kept, before, strict=True):
        assert all(torch.equal(each, expected) for each in result.values)


def test_reductions_of_nestings(strategy: sg.MirroredStrategy) -> None:
    result = strategy.run(lambda: {"a": torch.tensor([1.0, rank()]), "b": [rank(), 2.5]})
    assert strategy.reduce("sum", result)["a"].tolist() == [2, 1]
    assert strategy.reduce("mean", result)["b"][0] == 0.5
    assert strategy.reduce("max", result)["b"][0] == 1
    assert strategy.reduce("min", result)["a"].tolist() == [1, 0]
    assert strategy.gather(result["a"]).tolist() == [1, 0, 1, 1]
    assert strategy.gather(strategy.run(lambda: torch.ones(2, 1 + rank())), axis=1).shape == (2, 3)
    assert strategy.gather(strategy.run(rank)).tolist() == [0, 1]


def test_means_are_weighted_by_examples(strategy: sg.MirroredStrategy) -> None:
    (batch,) = strategy.distribute([torch.arange(5.0)])
    result = strategy.run(lambda x: x.mean(), args=(batch,))
    assert strategy.reduce("mean", result) == 2
    assert strategy.reduce("mean", result, weighted=False) == 2.25


# What replicas print


def test_prints_are_shown_once_with_the_number(
    strategy: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    def talk() -> None:
        print("hello from", rank())
        print("no end", end="")
        print("trouble", file=sys.stderr)
        sg.get_strategy().print("once")

    strategy.run(talk)
    captured = capsys.readouterr()
    assert captured.out.count("[replica 1] hello from 1\n") == 1
    assert captured.out.count("hello from 0\n") == 1
    assert "[replica 1] no end\n" in captured.out
    assert captured.out.count("once") == 1
    assert captured.err.count("[replica 1] trouble\n") == 1
    assert captured.err.count("trouble") == 2


def test_a_bar_of_a_child_is_shown_as_it_is_when_the_step_ends(
    strategy: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    def show() -> None:
        for percent in range(0, 101, 50):
            print(f"\r{percent}%", end="", flush=True, file=sys.stderr)
            print(f"{percent} of 100", end="\r", flush=True)
        print("\n", end="", file=sys.stderr)
        print("after", file=sys.stderr)

    strategy.run(show)
    captured = capsys.readouterr()
    of_child = [line for line in captured.err.split("\n") if "[replica 1]" in line]
    assert of_child == ["[replica 1] 100%", "[replica 1] after"]
    assert captured.out.count("[replica 1]") == 1
    assert "[replica 1] 100 of 100\n" in captured.out


def test_much_output_is_all_shown(strategy: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        if rank() == 1:
            print("y" * 1_000_000)
            for number in range(2000):
                print(number, "z" * 100)

    strategy.run(talk)
    captured = capsys.readouterr().out
    assert captured.count("y") == 1_000_000
    assert captured.count("z") == 200_000


def test_strategy_print_in_the_main_program(strategy: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]) -> None:
    strategy.print("from", "outside", sep="-")
    assert capsys.readouterr().out == "from-outside\n"


# Training with what is around a model


Parts = tuple[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor]]


def make_parts(strategy: sg.Strategy, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Parts:
    torch.manual_seed(0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        called = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def rates(strategy: sg.Strategy, optimizer: torch.optim.Optimizer) -> list[float]:
    return results(strategy, lambda: optimizer.param_groups[0]["lr"])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("where", ["between", "inside"])
def test_schedulers(strategy: sg.MirroredStrategy, name: str, where: str) -> None:
    def course(strategy: sg.Strategy) -> list[list[float]]:
        _, optimizer, step = make_parts(strategy)
        with strategy.scope():
            scheduler = SCHEDULERS[name](optimizer)
        advance = functools.partial(scheduler.step, *([1.0] if name == "plateau" else []))

        def full_step(x: torch.Tensor) -> None:
            step(x)
            if where == "inside":
                advance()

        seen = []
        for _ in range(4):
            strategy.run(full_step, args=(torch.ones(2, 3),))
            if where == "between":
                advance()
            seen.append(rates(strategy, optimizer)[-1])
        assert len(set(rates(strategy, optimizer))) == 1
        return seen

    with warnings.catch_warnings():
        if name == "sequential":
            warnings.simplefilter("ignore")  # torch warns of its own calls
        assert course(strategy) == course(sg.OneDeviceStrategy())


def test_averaged_model_made_in_the_scope(strategy: sg.MirroredStrategy) -> None:
    def course(strategy: sg.Strategy) -> list[torch.Tensor]:
        model, _, step = make_parts(strategy)
        with strategy.scope():
            average = torch.optim.swa_utils.AveragedModel(model)

        def full_step(x: torch.Tensor) -> None:
            step(x)
            average.update_parameters(model)

        for _ in range(3):
            strategy.run(full_step, args=(torch.ones(2, 3),))
        for each in results(strategy, lambda: average.module[0].weight):
            assert torch.allclose(each, average.module[0].weight)
        assert average.n_averaged == 3
        return [each.detach().clone() for each in average.parameters()]

    for ours, theirs in zip(course(strategy), course(sg.OneDeviceStrategy()), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradient_scaler_made_in_the_scope(strategy: sg.MirroredStrategy) -> None:
    model, optimizer, _ = make_parts(strategy)
    with strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert results(strategy, step, torch.ones(2, 3)) == [16.0, 16.0]
    assert results(strategy, step, torch.ones(2, 3)) == [32.0, 32.0]
    assert scaler.get_scale() == 32.0


def test_patch_of_a_package_is_made_in_all_replicas_by_a_run(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as own:
        before = torch.nn.functional.relu6

        def patch() -> None:
            torch.nn.functional.relu6 = lambda x: x + 100

        def look() -> float:
            return torch.nn.functional.relu6(torch.ones(())).item()

        try:
            patch()
            assert own.run(look).values == (101.0, 1.0), "a package is imported as it is installed"
            own.run(patch)
            assert own.run(look).values == (101.0, 101.0)
        finally:
            torch.nn.functional.relu6 = before


class Plain:
    def __init__(self) -> None:
        self.x = 1


class TravelsInItsOwnWay(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


class SetsInItsOwnWay(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[f"own {name}"] = value


class Frozen(Plain):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [TravelsInItsOwnWay, SetsInItsOwnWay, Frozen])
def test_object_that_is_given_another_class_is_followed_on(strategy: sg.MirroredStrategy, kind: type) -> None:
    value = Plain()

    def look() -> tuple[str, dict[str, Any]]:
        return type(value).__name__, dict(vars(value))

    assert results(strategy, look) == [("Plain", {"x": 1})] * 2
    object.__setattr__(value, "__class__", kind)
    vars(value)["__class__"] = "an attribute like others"
    for number in (2, 3):
        assert results(strategy, look) == [look()] * 2
        vars(value)["x"] = number
    assert results(strategy, look) == [(kind.__name__, {"x": 3, "__class__": "an attribute like others"})] * 2
