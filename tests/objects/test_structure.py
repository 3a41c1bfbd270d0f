"""What the program changes between runs reaches every replica: structure, hooks, groups; and what cannot is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import stratagem as sg
from stratagem.errors import StrategyError


class Net(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b: nn.Module = nn.Linear(4, 1)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.abs
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.activation(self.a(x)) * self.mask)
        return result


def outputs(strategy: sg.MirroredStrategy, model: nn.Module) -> list[torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(x)
            return result

    x = torch.arange(8.0).reshape(2, 4)
    return [forward(x), *strategy.local_results(strategy.run(forward, args=(x,)))]


def set_to(name: str, make: Callable[[], Any]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, make())

    return change


def times(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: factor * x


def use_none(model: Any) -> None:
    model.b.bias = None


def remove_hook(model: Any) -> None:
    model.before.remove()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "module": set_to("b", lambda: nn.Linear(4, 1)),
    "nested modules": set_to("b", lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))),
    "identity": set_to("a", nn.Identity),
    "parameter": set_to("b.weight", lambda: nn.Parameter(torch.full((1, 4), 3.0))),
    "no parameter": use_none,
    "function": set_to("activation", lambda: torch.tanh),
    "function with defaults": set_to("activation", lambda: nn.functional.silu),
    "own function": set_to("activation", lambda: lambda x: 3 * x),
    "closure": set_to("activation", lambda: times(4)),
    "forward": lambda model: setattr(model, "forward", lambda x, own=model: 2 * Net.forward(own, x)),
    "buffer": set_to("mask", lambda: torch.tensor([1.0, 0.0, 2.0, 0.0])),
    "new module": lambda model: model.b.add_module("unused", nn.Linear(2, 2)),
    "hook": lambda model: model.a.register_forward_hook(lambda module, given, output: output * 2),
    "hook before": lambda model: model.a.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
    "no hook": remove_hook,
    "pruned": lambda model: prune.l1_unstructured(model.a, "weight", 0.5),
    "assigned": lambda model: model.load_state_dict(Net().state_dict(), assign=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_of_structure_reach_every_replica(
    strategy: sg.MirroredStrategy, change: Callable[[nn.Module], Any]
) -> None:
    torch.manual_seed(0)
    with strategy.scope():
        model = Net()
        model.before = model.b.register_forward_hook(lambda module, given, output: output + 10)
    before = outputs(strategy, model)
    change(model)
    for _ in range(2):
        here, *replicas = outputs(strategy, model)
        assert all(torch.equal(each, here) for each in replicas)
    assert torch.equal(here, before[0]) == (change is CHANGES["new module"])


def test_order_of_a_sequence_and_its_length_follow(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    outputs(strategy, model)
    model[0], model[2] = model[2], model[0]
    here, *replicas = outputs(strategy, model)
    assert all(torch.equal(each, here) for each in replicas)
    del model[2]
    here, *replicas = outputs(strategy, model)
    assert all(torch.equal(each, here) for each in replicas)


def test_replaced_head_is_trained_in_all_replicas_alike(strategy: sg.MirroredStrategy) -> None:
    torch.manual_seed(0)
    with strategy.scope():
        model = Net()
    reference = Net()
    reference.load_state_dict(model.state_dict())
    outputs(strategy, model)
    head = nn.Linear(4, 1)
    reference.b = nn.Linear(4, 1)
    reference.b.load_state_dict(head.state_dict())
    model.b = head
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    step, plain_step, x = train(model, optimizer), train(reference, plain), torch.randn(5, 4)
    for batch in strategy.distribute((x,), global_batch_size=5):
        strategy.run(step, args=batch)
        plain_step(x)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name])
    here, *replicas = outputs(strategy, model)
    assert all(torch.equal(each, here) for each in replicas)


def test_hooks_of_the_function_are_not_replaced_by_those_of_the_program(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)

    def call() -> float:
        handle = model.register_forward_hook(lambda module, given, output: output + 1)
        try:
            return float(model(torch.zeros(2)).detach())
        finally:
            handle.remove()

    assert strategy.run(call).values == (1, 1)
    later = model.register_forward_hook(lambda module, given, output: output + 10)
    assert strategy.run(call).values == (11, 11)
    model.eval()
    assert strategy.run(call).values == (11, 11)
    later.remove()
    assert strategy.run(call).values == (1, 1)


def test_function_that_becomes_one_that_cannot_be_sent_is_named(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = Net()
    outputs(strategy, model)
    lines = (each for each in "ab")
    model.activation = lambda x: (next(lines), x)[1]
    with pytest.raises(StrategyError, match=r"a generator cannot be sent .*\(captured as 'lines' by <lambda>\)"):
        outputs(strategy, model)
    model.activation = torch.abs
    model.unused = lines
    here, *replicas = outputs(strategy, model)
    assert all(torch.equal(each, here) for each in replicas)


def test_module_whose_class_changes_is_refused(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 1))
    outputs(strategy, model)
    parametrizations.weight_norm(model[0])
    with pytest.raises(StrategyError, match="a distributed Linear has become a ParametrizedLinear"):
        outputs(strategy, model)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    here, *replicas = outputs(strategy, model)
    assert all(torch.equal(each, here) for each in replicas)


class RunningMean(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x


@pytest.mark.parametrize("way", ["shared_memory", "to_one"])
def test_buffers_that_the_function_replaces_agree(four_cpus: None, way: str) -> None:
    reference = RunningMean()
    with sg.MirroredStrategy(["cpu:2", "cpu:3"], cross_device_ops=way) as strategy:
        with strategy.scope():
            model = RunningMean()
        buffer = model.mean

        def step(x: torch.Tensor) -> float:
            model(x)
            return model.mean.item()

        for _ in range(3):
            x = torch.tensor([[1.0], [3.0]])
            reference(x)
            for batch in strategy.distribute((x,), global_batch_size=2):
                strategy.run(step, args=batch)
            assert model.mean is buffer
        assert model.mean.item() == pytest.approx(reference.mean.item())
        assert strategy.run(lambda: model.mean.tolist()[0]).values == (model.mean.item(),) * 2


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
def test_added_group_is_updated_in_every_replica(strategy: sg.MirroredStrategy, kind: Any) -> None:
    def course(scope: Any, run: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with scope:
            first, second = nn.Linear(4, 3), nn.Linear(3, 1)
            second.requires_grad_(False)
            optimizer = kind(first.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            second(first(x)).square().mean().backward()
            optimizer.step()

        x = torch.randn(6, 4)
        run(step, args=(x,))
        second.requires_grad_(True)
        optimizer.add_param_group({"params": second.parameters(), "lr": 0.01})
        run(step, args=(x,))
        run(step, args=(x,))
        assert [len(group["params"]) for group in optimizer.state_dict()["param_groups"]] == [2, 2]
        look = run(lambda: second.weight.sum().item())
        assert len(set(look.values if isinstance(look, sg.PerReplica) else [look])) == 1
        return [each.detach().clone() for each in (*first.parameters(), *second.parameters())]

    plain = sg.OneDeviceStrategy("cpu:0")
    for ours, theirs in zip(course(strategy.scope(), strategy.run), course(plain.scope(), plain.run), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_state_that_a_run_makes_unforeseen_is_whole_and_goes_when_none_is_loaded(
    strategy: sg.MirroredStrategy,
) -> None:
    def course(scope: Any, run: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        with scope:
            first, second = nn.Linear(64, 64), nn.Linear(64, 64)  # large enough to be cut
            optimizer = torch.optim.SGD(first.parameters(), lr=0.1)

        def step(x: torch.Tensor, changes: bool = False) -> None:
            if changes:
                optimizer.param_groups[0]["momentum"] = 0.9
                optimizer.add_param_group({"params": second.parameters(), "momentum": 0.5})
            optimizer.zero_grad()
            second(first(x)).square().mean().backward()
            optimizer.step()

        x = torch.randn(6, 64)
        run(step, args=(x,))
        run(step, args=(x, True))
        states = [copy.deepcopy(optimizer.state_dict())]
        run(step, args=(x,))
        optimizer.load_state_dict({**states[0], "state": {}})
        run(step, args=(x,))
        states.append(optimizer.state_dict())
        return states, [each.detach() for each in (*first.parameters(), *second.parameters())]

    plain = sg.OneDeviceStrategy("cpu:0")
    (states, weights), expected = course(strategy.scope(), strategy.run), course(plain.scope(), plain.run)
    assert len(states[0]["state"]) == 4
    torch.testing.assert_close((states, weights), expected)


def test_group_of_parameters_from_outside_is_refused(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outside = nn.Linear(2, 1)
    look = lambda: [len(group["params"]) for group in optimizer.param_groups]  # noqa: E731
    strategy.run(look)
    optimizer.add_param_group({"params": outside.parameters()})
    with pytest.raises(StrategyError, match=r"SGD holds 2 parameter.*made outside strategy.scope.*adopt\(model\)"):
        strategy.run(look)
    strategy.adopt(outside)
    assert strategy.local_results(strategy.run(look)) == ([2, 2], [2, 2])


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 1)
        self.lines: Any = (each for each in "ab")


def test_module_that_cannot_be_sent_is_named_and_can_be_mended(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Sequential(Locked())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    look = lambda: model[0].inside.weight.sum().item() + 0 * len(optimizer.param_groups)  # noqa: E731
    for _ in range(2):
        with pytest.raises(StrategyError, match=r"a generator cannot be sent .*the attribute 'lines' of a Locked"):
            strategy.run(look)
    del model[0].lines
    assert strategy.run(look).values == (look(), look())


def test_objects_of_another_open_strategy_are_refused(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        with pytest.raises(StrategyError, match="model Linear belongs to another strategy"):
            other.adopt(model)
        with pytest.raises(StrategyError, match="SGD belongs to another strategy"):
            other.adopt(optimizer)
        with pytest.raises(StrategyError, match="belongs to another strategy"):
            other.run(lambda: model.weight.sum().item())
        with other.scope():
            outer = nn.Sequential(model)
        with pytest.raises(StrategyError, match="model Linear belongs to another strategy"):
            other.run(lambda: len(outer))
    assert strategy.run(lambda: model.weight.shape[0]).values == (1, 1)


def test_objects_of_a_closed_strategy_may_be_adopted(strategy: sg.MirroredStrategy) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        with other.scope():
            model = nn.Linear(2, 1)
        other.run(lambda: model.weight.sum().item())
    strategy.adopt(model)
    look = lambda: model.weight.sum().item()  # noqa: E731
    assert strategy.run(look).values == (look(), look())
