"""Averages are those of the formula, and equal on one device and on two replicas, inside and outside a run."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import StrategyError
from stratagem.training.averaging import ExponentialMovingAverage

ROWS: dict[str, Callable[[], sg.Strategy]] = {
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored to one": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="to_one"),
}


@pytest.fixture(scope="module", params=list(ROWS))
def strategy(request: pytest.FixtureRequest, four_cpus: None) -> Iterator[sg.Strategy]:
    with ROWS[request.param]() as made:
        made.run(int)
        yield made


def values_of(averages: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> list[list[float]]:
    return [averages(each).detach().flatten().tolist() for each in model.parameters()]


def averaged(ema: ExponentialMovingAverage, variable: torch.Tensor, course: list[float]) -> list[float]:
    found = []
    for value in course:
        with torch.no_grad():
            variable.fill_(value)
        ema.apply([variable])
        found.append(ema.average(variable).item())
    return found


# The formula


def test_first_apply_takes_the_values() -> None:
    assert averaged(ExponentialMovingAverage(0.5), torch.zeros(1), [8.0, 0.0, 4.0]) == [8.0, 4.0, 4.0]


def test_decay_of_zero_follows_and_of_one_stays() -> None:
    assert averaged(ExponentialMovingAverage(0), torch.zeros(1), [1.0, 2.0]) == [1.0, 2.0]
    assert averaged(ExponentialMovingAverage(1), torch.zeros(1), [1.0, 2.0]) == [1.0, 1.0]


def test_zero_debias_begins_at_zero_and_divides_by_what_the_decays_leave() -> None:
    course, decay, biased, expected = [3.0, -1.0, 0.5, 7.0], 0.9, 0.0, []
    for number, value in enumerate(course, start=1):
        biased = decay * biased + (1 - decay) * value
        expected.append(biased / (1 - decay**number))
    found = averaged(ExponentialMovingAverage(decay, zero_debias=True), torch.zeros(1), course)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["number", "tensor", "function"])
def test_number_of_updates_lowers_the_decay(kind: str) -> None:
    given: Any = {"number": 0, "tensor": torch.tensor(0), "function": lambda: 0}[kind]
    assert averaged(ExponentialMovingAverage(0.999, given), torch.zeros(1), [0.0, 10.0]) == pytest.approx([0.0, 9.0])


def test_number_of_updates_is_read_at_each_apply() -> None:
    count, variable = torch.tensor(0), torch.zeros(1)
    ema = ExponentialMovingAverage(0.5, num_updates=count).apply([variable])
    variable.fill_(10.0)
    count.fill_(8)
    assert ema.apply([variable]).average(variable).item() == pytest.approx(5.0)  # (1 + 8) / (10 + 8)
    count.fill_(1000)
    variable.fill_(0.0)
    assert ema.apply([variable]).average(variable).item() == pytest.approx(2.5)


def test_variables_have_averages_of_their_own_age() -> None:
    first, second = torch.tensor([1.0]), torch.tensor([1.0])
    ema = ExponentialMovingAverage(0.5, zero_debias=True).apply([first])
    for each in (first, second):
        each.fill_(4.0)
    ema.apply([first, second])
    assert ema.average(first).item() == pytest.approx(3.0)
    assert ema.average(second).item() == 4.0


def test_variable_given_twice_counts_once() -> None:
    variable = torch.zeros(1)
    ema = ExponentialMovingAverage(0.5).apply(variable)
    variable.fill_(8.0)
    assert ema.apply([variable, variable]).average(variable).item() == 4.0


def test_low_precision_and_complex_variables() -> None:
    variables = [torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.complex64)]
    ema = ExponentialMovingAverage(0.5).apply(variables)
    for each in variables:
        each.fill_(2.0)
    ema.apply()
    for each in variables:
        assert ema.average(each).tolist() == [1.0, 1.0]
        assert ema.average(each).dtype == each.dtype


def test_names_and_what_to_restore() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = ExponentialMovingAverage(0.9)
    before = ema.variables_to_restore(model)
    ema.apply(model)
    after = ema.variables_to_restore(model)
    assert {name: id(each) for name, each in before.items()} == {name: id(each) for name, each in after.items()}
    assert after["0.weight/ExponentialMovingAverage"] is model[0].weight
    assert after["1.running_mean"] is model[1].running_mean
    assert ema.average_name(model[0].bias) == "0.bias/ExponentialMovingAverage"
    assert set(after) <= {*ema.state_dict(), *model.state_dict()}


def test_two_models_with_the_same_names() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    ema = ExponentialMovingAverage(0.9).apply(first).apply(second)
    assert ema.average_name(second.weight) == "weight_1/ExponentialMovingAverage"
    assert ema.variables_to_restore(second)["weight_1/ExponentialMovingAverage"] is second.weight
    assert torch.equal(ema.average(first.weight), first.weight)
    assert torch.equal(ema.average(second.weight), second.weight)


def test_a_model_that_holds_its_averages_can_call_functions_on_its_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.ema = ExponentialMovingAverage(0.9).track(model)  # type: ignore[assignment]
    met = []
    model.apply(lambda module: met.append(type(module).__name__))
    assert {"Linear", "ExponentialMovingAverage"} <= set(met)
    assert "ema.0.weight/ExponentialMovingAverage" in model.state_dict()
    model.load_state_dict(model.state_dict())


# State


@pytest.mark.parametrize("zero_debias", [False, True])
def test_state_goes_on_where_it_was_saved(zero_debias: bool) -> None:
    def advance(model: nn.Module, ema: ExponentialMovingAverage, num_steps: int) -> None:
        for _ in range(num_steps):
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(1.5).add_(0.1)
            ema.apply(model)

    model, ema = nn.Linear(2, 2), ExponentialMovingAverage(0.8, zero_debias=zero_debias)
    advance(model, ema, 3)
    state = copy.deepcopy(ema.state_dict())
    other = copy.deepcopy(model)
    advance(model, ema, 2)
    resumed = ExponentialMovingAverage(0.8, zero_debias=zero_debias).track(reversed(list(other.named_parameters())))
    resumed.load_state_dict(state)
    advance(other, resumed, 2)
    assert values_of(resumed.average, other) == values_of(ema.average, model)


def test_state_keeps_the_age_of_each_average_whatever_the_order() -> None:
    old, new = torch.ones(1), torch.ones(1)
    ema = ExponentialMovingAverage(0.5, zero_debias=True).apply([("old", old)]).apply([("old", old)])
    ema.track([("new", new)])
    resumed = ExponentialMovingAverage(0.5, zero_debias=True).track([("new", new), ("old", old)])
    resumed.load_state_dict(ema.state_dict())
    for each in (ema, resumed):
        assert each.average(old).item() == 1.0
        with pytest.raises(StrategyError, match="'new' has no average yet"):
            each.average(new)


def test_state_that_does_not_fit() -> None:
    state = ExponentialMovingAverage(0.9).apply(nn.Linear(2, 1)).state_dict()
    with pytest.raises(RuntimeError, match=r"call track\(model\) before load_state_dict"):
        ExponentialMovingAverage(0.9).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"'weight/\w+' has shape \(1, 2\), the variable \(1, 3\)"):
        ExponentialMovingAverage(0.9).track(nn.Linear(3, 1)).load_state_dict(state)
    others = [("other", torch.zeros(1)), ("bias", torch.zeros(1))]
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*other/Exp"):
        ExponentialMovingAverage(0.9).track(others).load_state_dict(state)


# Swapped


def test_swapped_puts_averages_in_and_values_back_also_after_an_error() -> None:
    model = nn.Linear(2, 1)
    ema = ExponentialMovingAverage(0.5).apply(model)
    average = model.weight.detach().clone()
    nn.init.constant_(model.weight, 7.0)
    with ema.swapped(model) as inside:
        assert inside is model
        assert torch.equal(model.weight, average)
    assert model.weight.tolist() == [[7.0, 7.0]]
    with pytest.raises(KeyError), ema.swapped(model):
        raise KeyError("stop")
    assert model.weight.tolist() == [[7.0, 7.0]]
    assert torch.equal(ema.average(model.weight), average)


# In a strategy


def train(
    strategy: sg.Strategy, *, inside: bool, prepare: bool, **options: Any
) -> tuple[nn.Module, ExponentialMovingAverage, Callable[[torch.Tensor], None]]:
    """Trains a little on uneven batches, with an average of the weights."""
    torch.manual_seed(1)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        ema = ExponentialMovingAverage(0.9, **options)
        if prepare:
            ema.track(model)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if inside:
            ema.apply(model)

    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(size, 3, generator=generator) for size in (8, 7, 1, 5)]
    for batch in strategy.distribute(batches):
        strategy.run(step, args=(batch,))
        if not inside:
            ema.apply(model)
    return model, ema, step


@pytest.mark.parametrize("zero_debias", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_averages_equal_those_of_one_device(strategy: sg.Strategy, inside: bool, zero_debias: bool) -> None:
    plain_model, plain, _ = train(sg.get_strategy(), inside=False, prepare=False, zero_debias=zero_debias)
    model, ema, _ = train(strategy, inside=inside, prepare=inside, zero_debias=zero_debias)
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ema.average(ours), plain.average(theirs))
        assert not torch.equal(ema.average(ours), ours)
    seen = strategy.local_results(strategy.run(lambda: values_of(ema.average, model)))
    assert list(seen) == [values_of(ema.average, model)] * strategy.num_replicas_in_sync


def test_averages_beside_statistics_in_other_layouts_and_held_by_the_model(strategy: sg.Strategy) -> None:
    def trained(strategy: sg.Strategy) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with strategy.scope():
            model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 1))
            model.to(memory_format=torch.channels_last)
            sg.convert_sync_batchnorm(model)
            model.ema = ExponentialMovingAverage(0.8).track(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
            layers = model[:4]
        assert len(model.ema.state_dict()) == 7

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            layers(x).square().mean().backward()
            optimizer.step()
            model.ema.apply()

        generator = torch.Generator().manual_seed(2)
        for batch in strategy.distribute([torch.randn(6, 3, 3, 3, generator=generator) for _ in range(3)]):
            strategy.run(step, args=(batch,))
        return [each.detach().clone() for each in model.state_dict().values()]

    for ours, theirs in zip(trained(strategy), trained(sg.get_strategy()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_averages_first_made_between_runs_can_be_used_inside(strategy: sg.Strategy) -> None:
    model, ema, _ = train(strategy, inside=False, prepare=False)
    expected = copy.deepcopy(ema)
    expected.apply()
    strategy.run(lambda: ema.apply(model).decay)
    for ours, (group, index) in zip(model.parameters(), expected._known().values(), strict=True):
        torch.testing.assert_close(ema.average(ours), group.shadow(index))


def test_variables_tracked_after_the_first_run(strategy: sg.Strategy) -> None:
    _, ema, _ = train(strategy, inside=True, prepare=True)
    with strategy.scope():
        other = nn.Linear(2, 1)
        ema.track(other)
    before = other.weight.detach().clone()
    strategy.run(lambda: ema.apply(other).decay)
    nn.init.zeros_(other.weight)
    strategy.run(lambda: ema.apply(other).decay)
    for weight in strategy.local_results(strategy.run(lambda: ema.average(other.weight))):
        torch.testing.assert_close(weight, 0.9 * before)


def test_model_and_averages_that_are_adopted(strategy: sg.Strategy) -> None:
    model = nn.Linear(2, 1)
    ema = ExponentialMovingAverage(0.5).apply(model)
    before = model.weight.detach().clone()
    strategy.adopt(model, ema)  # type: ignore[attr-defined]
    nn.init.zeros_(model.weight)
    strategy.run(lambda: ema.apply(model).decay)
    torch.testing.assert_close(ema.average(model.weight), 0.5 * before)


@pytest.mark.parametrize("kind", ["tensor", "function"])
def test_replicas_agree_on_the_number_of_updates(strategy: sg.Strategy, kind: str) -> None:
    count, plain_count = torch.tensor(0), [0]
    with strategy.scope():
        model = nn.Linear(1, 1)
        ema = ExponentialMovingAverage(0.99, count if kind == "tensor" else lambda: plain_count[0]).track(model)
    nn.init.zeros_(model.weight)
    strategy.run(lambda: ema.apply(model).decay)
    nn.init.ones_(model.weight)
    count.fill_(8)
    plain_count[0] = 8
    strategy.run(lambda: ema.apply(model).decay)
    for each in strategy.local_results(strategy.run(lambda: ema.average(model.weight).item())):
        assert each == pytest.approx(0.5)


def test_number_of_updates_that_the_step_counts(strategy: sg.Strategy) -> None:
    count = torch.tensor(0)
    with strategy.scope():
        model = nn.Linear(1, 1)
        ema = ExponentialMovingAverage(0.99, count).track(model)

    def step() -> None:
        ema.apply(model)
        count.add_(8)

    nn.init.zeros_(model.weight)
    strategy.run(step)
    nn.init.ones_(model.weight)
    strategy.run(step)
    assert count.item() == 16
    assert ema.average(model.weight).item() == pytest.approx(0.5)


def test_state_loaded_between_runs_reaches_the_replicas(strategy: sg.Strategy) -> None:
    model, ema, step = train(strategy, inside=True, prepare=True, zero_debias=True)
    states = copy.deepcopy([model.state_dict(), ema.state_dict()])
    x = torch.ones(2, 3)
    strategy.run(step, args=(x,))
    expected = values_of(ema.average, model)
    model.load_state_dict(states[0])
    ema.load_state_dict(states[1])
    strategy.run(step, args=(x,))
    for found in strategy.local_results(strategy.run(lambda: values_of(ema.average, model))):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_replicas_evaluate_with_averages_and_go_on_with_values(strategy: sg.Strategy) -> None:
    model, ema, step = train(strategy, inside=True, prepare=True)
    x = torch.ones(2, 3)
    own = model(x).detach()
    with ema.swapped(model):
        averaged = model(x).detach()
        for each in strategy.local_results(strategy.run(lambda: model(x))):
            torch.testing.assert_close(each.detach(), averaged)
    assert not torch.allclose(own, averaged)
    for each in strategy.local_results(strategy.run(lambda: model(x))):
        torch.testing.assert_close(each.detach(), own)
    with contextlib.suppress(KeyError), ema.swapped(model):
        raise KeyError("stop")

    def evaluate() -> torch.Tensor:
        with ema.swapped(model):
            return model(x).detach()

    for each in strategy.local_results(strategy.run(evaluate)):
        torch.testing.assert_close(each, averaged)
    torch.testing.assert_close(model(x).detach(), own)
    strategy.run(step, args=(x,))


# Bad input


def test_averages_made_inside_a_run_are_refused(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model, ema = nn.Linear(2, 1), ExponentialMovingAverage(0.9)
    with pytest.raises(StrategyError, match=r"(?s)'weight' of shape \(1, 2\).*strategy.scope\(\):.*track\(model\)"):
        strategy.run(lambda: ema.apply(model).decay)
    ema.track(model)
    strategy.run(lambda: ema.apply(model).decay)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan"), True, None, "0.9"], ids=repr)
def test_decay_out_of_range(decay: Any) -> None:
    with pytest.raises(StrategyError, match="decay is a number from 0 to 1, got "):
        ExponentialMovingAverage(decay)


def test_decay_of_one_with_zero_debias() -> None:
    with pytest.raises(StrategyError, match="below 1"):
        ExponentialMovingAverage(1.0, zero_debias=True)


@pytest.mark.parametrize("count", [-1, True, "3", torch.ones(2), torch.tensor(-1), float("nan")], ids=repr)
def test_number_of_updates_out_of_range(count: Any) -> None:
    with pytest.raises(StrategyError, match="num_updates is a number from 0 up"):
        ExponentialMovingAverage(0.9, count)
    with pytest.raises(StrategyError, match="num_updates is a number from 0 up"):
        ExponentialMovingAverage(0.9, lambda: count).apply(nn.Linear(1, 1))


@pytest.mark.parametrize("given", [3, ["weight"], [("weight", 3)], [(3, torch.ones(1))]], ids=repr)
def test_average_of_something_else(given: Any) -> None:
    with pytest.raises(StrategyError, match="averages are of a module, of tensors, or of pairs"):
        ExponentialMovingAverage(0.9).apply(given)


def test_average_of_whole_numbers() -> None:
    with pytest.raises(StrategyError, match=r"'step' of shape \(2,\) and type torch.int64"):
        ExponentialMovingAverage(0.9).apply([("step", torch.zeros(2, dtype=torch.int64))])


def test_average_that_does_not_exist() -> None:
    model, ema = nn.Linear(2, 1), ExponentialMovingAverage(0.9)
    with pytest.raises(StrategyError, match="nothing is averaged yet"):
        ema.apply()
    with pytest.raises(StrategyError, match=r"Parameter of shape \(1, 2\)\); call apply first"):
        ema.average(model.weight)
    with pytest.raises(StrategyError, match="Linear has no averages yet"), ema.swapped(model):
        pass
    ema.track(model)
    with pytest.raises(StrategyError, match="'weight' has no average yet; call apply first"):
        ema.average(model.weight)
    with pytest.raises(StrategyError, match="'weight' has no average yet"), ema.swapped(model):
        pass
    with pytest.raises(StrategyError, match=r"of shape \(3,\)\); there are those of 'weight', 'bias'"):
        ema.average(torch.ones(3))
    with pytest.raises(StrategyError, match="str 'weight'"):
        ema.average("weight")  # type: ignore[arg-type]
