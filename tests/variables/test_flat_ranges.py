"""Small parameters that lie side by side are updated at once, and come out as if each were updated by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.engine import context
from stratagem.variables.optimizer_slices import ELEMENTWISE
from stratagem.variables.slices import SplitUpdate

pytestmark = pytest.mark.usefixtures("fork_server")
NUM_LAYERS = 24
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Adam": {"amsgrad": True}}


def make(name: str) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 5) for _ in range(NUM_LAYERS)])  # neither weights nor biases fill a cache line
    first = [each for layer in model[:4] for each in layer.parameters()]
    swapped = [*model[4:8], model[9], model[8], *model[10:]]  # an optimizer has an order of its own
    rest = [each for layer in swapped for each in layer.parameters()]
    return model, ELEMENTWISE[name]([{"params": first, "lr": 0.02}, {"params": rest}], lr=0.01, **OPTIONS.get(name, {}))


def make_step(model: nn.ModuleList, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, left_out: int = -1, own: int = -1) -> torch.Tensor:
        optimizer.zero_grad()
        y = x
        for number, layer in enumerate(model):
            y = y + torch.tanh(layer(y)) if number != left_out else y
        loss = (y - x.flip(1)).square().mean()
        loss.backward()
        if own >= 0:
            for parameter in model[own].parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * 2
        optimizer.step()
        return loss.detach()

    return step


def num_at_once() -> list[int]:
    """How many parts each range has that one update takes, in replica 0."""
    runtime = context.open_runtimes[-1]
    (update,) = runtime.updates.values()
    assert isinstance(update, SplitUpdate)
    return [len(each.parts) for each in update._ranges]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("four_cpus")
def test_updates_of_neighbours_equal_those_of_each(name: str, size: int) -> None:
    batches = [torch.randn(12, 5, generator=torch.Generator().manual_seed(number)) for number in range(7)]
    # A layer without gradients counts fewer steps from then on; another has gradients that the step has set.
    left_out, own = [-1, -1, 3, -1, 20, 14, -1], [-1, -1, -1, 7, -1, 5, -1]
    plain_model, plain_optimizer = make(name)
    plain = make_step(plain_model, plain_optimizer)
    losses = [plain(*each) for each in zip(batches, left_out, own, strict=True)]
    with sg.MirroredStrategy([f"cpu:{number}" for number in range(size)]) as strategy:
        with strategy.scope():
            model, optimizer = make(name)
        step = make_step(model, optimizer)
        for number, (batch, *options) in enumerate(zip(batches, left_out, own, strict=True)):
            (given,) = strategy.distribute([batch])
            result = strategy.run(step, args=(given, *options))
            torch.testing.assert_close(strategy.reduce("mean", result), losses[number], rtol=1e-5, atol=1e-7)
            if number == 1 and size < 3:  # of three, the last has all of so few elements
                assert max(num_at_once()) > 10
        torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), rtol=1e-5, atol=1e-6)
        state, expected = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-6)


def test_nothing_between_neighbours_is_ever_touched(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.ModuleList([nn.Linear(5, 5) for _ in range(8)] + [nn.Linear(1500, 1500), nn.Linear(1500, 5)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        y = x
        for layer in model[:8]:
            y = layer(y)
        (y.mean() + model[9](model[8](x.repeat(1, 300))).mean()).backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(torch.full((4, 5), 1e3),))
    runtime = context.open_runtimes[-1]
    store, _ = runtime.copies.find(model[0].weight)
    between = torch.ones(store.num_elements, dtype=torch.bool)
    for placement in store.placements:
        between[placement.offset : placement.offset + placement.numel] = False
    assert between.any()
    assert not store.shared[between].any()
    assert not runtime.copies.sum_of(store)[between].any()


@pytest.mark.usefixtures("four_cpus")
def test_parameter_that_is_never_used_leaves_nothing_behind_in_each_step() -> None:
    with sg.MirroredStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            model, optimizer = make("Adam")
        step = make_step(model, optimizer)
        sizes = []
        for _ in range(4):
            strategy.run(step, args=(torch.ones(4, 5), 9))
            (update,) = context.open_runtimes[-1].updates.values()
            sizes.append(len(update._inner.state))
        assert len(set(sizes[1:])) == 1


@pytest.mark.usefixtures("four_cpus")
def test_gradient_may_be_a_view_of_the_one_before() -> None:
    def course(strategy: sg.Strategy) -> torch.Tensor:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            first = model[0].weight
            first.grad = first.grad.t()  # type: ignore[union-attr]
            optimizer.step()

        for _ in range(3):
            strategy.run(step, args=(torch.arange(12.0).view(4, 3) / 9,))
        return model[0].weight.detach().clone()

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as mirrored, sg.OneDeviceStrategy() as one:
        torch.testing.assert_close(course(mirrored), course(one))
