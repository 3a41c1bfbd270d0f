"""Wrong calls say which rule they broke, what came and what to do; the strategy goes on working."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import DeviceError, StrategyError, UnevenDataError


@pytest.fixture(autouse=True)
def still_works(strategy: sg.MirroredStrategy) -> Iterator[None]:
    yield
    assert strategy.run(lambda: 1).values == (1, 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_model_made_outside_the_scope(strategy: sg.MirroredStrategy) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(
        StrategyError, match=r"model Sequential \(4 parameters\) was created outside strategy.scope\(\)"
    ):
        strategy.run(lambda: model(torch.ones(2)))
    with pytest.raises(StrategyError, match=r"parameter of shape \(2, 2\) was created outside"):
        strategy.run(lambda weight=model[0].weight: weight.sum())


def test_optimizer_made_outside_the_scope(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(StrategyError, match="optimizer SGD was created outside"):
        strategy.run(train(model, optimizer), args=(torch.ones(1, 2),))


def test_adopted_model_and_optimizer_with_state(strategy: sg.MirroredStrategy) -> None:
    def course(adopt: Callable[..., None], run: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer)(torch.ones(2, 2))
        adopt(model, optimizer)
        adopt(model, optimizer)
        for _ in range(2):
            run(train(model, optimizer), args=(torch.ones(2, 2),))
        adopt(model, optimizer)  # once more changes nothing
        run(train(model, optimizer), args=(torch.ones(2, 2),))
        return [*model.weight.flatten().tolist(), float(optimizer.state_dict()["state"][0]["step"])]

    ours = course(strategy.adopt, strategy.run)
    assert ours == pytest.approx(course(lambda *_: None, lambda step, args: step(*args)))
    assert ours[-1] == 4


@pytest.mark.parametrize("given", [3, None, "model", torch.ones(2)], ids=repr)
def test_adopting_something_else(strategy: sg.MirroredStrategy, given: object) -> None:
    with pytest.raises(StrategyError, match=f"adopt takes modules, optimizers.* got {type(given).__name__}"):
        strategy.adopt(given)


INSIDE = {
    "MirroredStrategy()": lambda strategy: sg.MirroredStrategy(),
    "OneDeviceStrategy()": lambda strategy: sg.OneDeviceStrategy(),
    "run": lambda strategy: strategy.run(len, args=("a",)),
    "scope": lambda strategy: strategy.scope().__enter__(),
    "adopt": lambda strategy: strategy.adopt(nn.Linear(1, 1)),
    "close": lambda strategy: strategy.close(),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("replica", [0, 1])
def test_what_belongs_to_the_main_program(strategy: sg.MirroredStrategy, name: str, replica: int) -> None:
    call = INSIDE[name]

    def inside() -> None:
        if sg.get_replica_context().replica_id_in_sync_group == replica:  # type: ignore[union-attr]
            call(strategy)

    with pytest.raises(StrategyError, match=rf"inside replica {replica}; (call|use) it in the main program"):
        strategy.run(inside)


def test_batch_smaller_than_the_replicas_counts_once(strategy: sg.MirroredStrategy) -> None:
    (batch,) = strategy.distribute([torch.tensor([3.0])])
    assert strategy.reduce("mean", strategy.run(lambda x: x.mean(), args=(batch,))) == 3
    with pytest.raises(UnevenDataError, match="2 replicas"):
        list(strategy.distribute([torch.ones(3)], uneven="error"))
    with pytest.raises(StrategyError, match="uneven"):
        strategy.distribute([torch.ones(3)], uneven="sometimes")


def test_parameter_unused_by_some_replicas_as_an_error(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"], unused="error") as strict:
        with strict.scope():
            model = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)})

        def step() -> None:
            replica = sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
            hidden = model["one"](torch.ones(1, 1))
            (model["two"](hidden) if replica == 0 else hidden).sum().backward()

        with pytest.raises(StrategyError, match=r"'two.weight' got a gradient on replica 0 but not on 1"):
            strict.run(step)
        assert strict.run(lambda: 1).values == (1, 1)


def test_what_cannot_be_reduced(strategy: sg.MirroredStrategy) -> None:
    with pytest.raises(StrategyError, match="no reduction named 'avg'; known: sum, mean, max, min"):
        strategy.reduce("avg", strategy.run(lambda: 1.0))
    with pytest.raises(StrategyError, match="str 'ok'; return tensors or numbers"):
        strategy.reduce("mean", strategy.run(lambda: "ok"))

    def differing() -> dict[str, int]:
        replica = sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
        return {"loss": 1} if replica else {"loss": 1, "acc": 2}

    with pytest.raises(StrategyError, match=r"replica 0 returned \{'loss', 'acc'\}, replica 1 returned \{'loss'\}"):
        strategy.run(differing)


@pytest.mark.parametrize(
    "options",
    [
        {"gradients": "avg"},
        {"unused": None},
        {"on_nonfinite": ["skip"]},
        {"stall_timeout_s": 0},
        {"stall_timeout_s": "1"},
    ],
    ids=repr,
)
def test_wrong_options(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(StrategyError, match=name) as caught:
        sg.MirroredStrategy(**options)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("devices", [[], ["cpu:0", "cpu:0"], ["gpx:0"], ["cpu:7"], "cpu:0", [3.5]], ids=repr)
def test_wrong_devices(devices: Any) -> None:
    with pytest.raises(DeviceError):
        sg.MirroredStrategy(devices)


def test_what_cannot_be_sent_is_named_before_anything_runs(strategy: sg.MirroredStrategy) -> None:
    lock, ran = threading.Lock(), []

    def step() -> None:
        ran.append(1)
        lock.acquire()

    with pytest.raises(StrategyError, match=r"a lock cannot be sent to the replicas \(captured as 'lock' by step\)"):
        strategy.run(step)
    with pytest.raises(StrategyError, match="a generator cannot be sent to the replicas"):
        strategy.run(lambda x: ran.append(1), args=((i for i in range(3)),))
    assert not ran


def test_result_that_cannot_be_sent_is_named(strategy: sg.MirroredStrategy) -> None:
    with pytest.raises(RuntimeError, match="what the function returned cannot be sent to the main program"):
        strategy.run(threading.Lock)


def test_calls_that_are_not_calls(strategy: sg.MirroredStrategy) -> None:
    with pytest.raises(StrategyError, match="got int 3"):
        strategy.run(3)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=r"args is a tuple .* got Tensor"):
        strategy.run(len, args=torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="kwargs is a dict"):
        strategy.run(len, kwargs=[1])  # type: ignore[arg-type]


def test_training_outside_run(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.run(train(model, optimizer), args=(torch.ones(1, 2),))
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(StrategyError, match=r"backward\(\) reached 2 distributed parameter"):
        model(torch.ones(1, 2)).sum().backward()
    assert all(map(torch.equal, before, [parameter.grad for parameter in model.parameters()]))
    with pytest.raises(StrategyError, match=r"optimizer.step\(\) was called outside strategy.run"):
        optimizer.step()
    other = torch.ones(2, requires_grad=True)
    other.sum().backward()
    assert other.grad.tolist() == [1, 1]


def test_training_before_the_first_run(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    with pytest.raises(StrategyError, match=r"backward\(\) reached 2 distributed parameter"):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is None


def test_sparse_gradients(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(StrategyError, match="sparse gradient, which replicas cannot sum; use sparse=False"):
        strategy.run(lambda: model(torch.tensor([1])).sum().backward())


def test_lazy_modules(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        with other.scope():
            model = nn.LazyLinear(2)
        with pytest.raises(StrategyError, match="a lazy module has no shape yet"):
            other.run(lambda: model(torch.ones(1, 3)))
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        with other.scope():
            model = nn.LazyLinear(2)
            model(torch.ones(1, 3))
        assert other.run(lambda: model(torch.ones(1, 3))).values[1].shape == (1, 2)
