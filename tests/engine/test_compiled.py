"""What `torch.compile` makes, in replicas: compiled in each, once, with the exchange of gradients outside of it."""

import importlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from tests.engine.test_run import results

# Torch's compiler uses what torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore")

Compile = Callable[[Any], Any]


def counters() -> Any:
    """Those of the replica that asks: what a test has imported goes to replicas as a copy."""
    return importlib.import_module("torch._dynamo.utils").counters


def reset() -> None:
    torch.compiler.reset()
    counters().clear()


@pytest.fixture(autouse=True)
def fresh_compiler(strategy: sg.MirroredStrategy) -> Iterator[None]:
    """Lets replicas forget what they have compiled, and which sizes have changed."""
    results(strategy, reset)
    yield
    reset()


class Net(nn.Module):
    """Of a class of the program's own: `compile()` of one of torch's compiles nothing."""

    def __init__(self, *, dropout: float = 0.0, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), norm(16)  # type: ignore[call-arg]
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return output


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def as_it_is(model: Any) -> Any:
    return model


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(size, 6, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def made(**options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net(**options)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(
    strategy: sg.Strategy, in_scope: Compile = as_it_is, outside: Compile = as_it_is, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and values after some steps; the last batch is uneven."""
    with strategy.scope():
        model, optimizer = made(**options)
        compiled = in_scope(model)
    step = step_of(outside(compiled), optimizer)
    losses = [
        float(strategy.reduce("mean", strategy.run(step, args=batch)))
        for batch in strategy.distribute(batches(8, 8, 5, 8))
    ]
    return losses, {name: each.clone() for name, each in model.state_dict().items()}


def assert_same(
    ours: tuple[list[float], dict[str, torch.Tensor]], theirs: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=2e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, each in ours[1].items():
        torch.testing.assert_close(each, theirs[1][name], atol=2e-5, rtol=2e-5)


def num_graphs() -> int:
    return int(counters()["stats"]["unique_graphs"])


STRATEGIES: dict[str, Callable[[], sg.Strategy]] = {
    "mirrored 1": lambda: sg.MirroredStrategy(["cpu:0"]),
    "mirrored 3": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "central storage 2": lambda: sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "parameter server 1": lambda: sg.ParameterServerStrategy(1),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_model_equals_one_device(four_cpus: None, name: str) -> None:
    with STRATEGIES[name]() as made:
        ours = trained(made, wrapped)
    assert_same(ours, trained(sg.OneDeviceStrategy()))


@pytest.mark.parametrize(
    ("in_scope", "outside"),
    [(wrapped, as_it_is), (in_place, as_it_is), (as_it_is, wrapped), (as_it_is, in_place)],
    ids=["wrapped in the scope", "in place in the scope", "wrapped after it", "in place after it"],
)
def test_model_is_compiled_once_in_each_replica(
    strategy: sg.MirroredStrategy, in_scope: Compile, outside: Compile
) -> None:
    ours = trained(strategy, in_scope, outside)
    # One graph for the first size, one for all others: torch takes a size that changes for one that may.
    assert results(strategy, num_graphs) == [2, 2]
    assert_same(ours, trained(sg.OneDeviceStrategy()))


def test_model_compiled_between_two_runs(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model, optimizer = made()
    step, (x, y) = step_of(model, optimizer), batches(8)[0]
    results(strategy, step, x, y)
    model.compile(backend="eager")
    results(strategy, step, x, y)
    assert results(strategy, num_graphs) == [1, 1]


def test_graphs_that_are_made_while_a_scope_is_open_stay_in_their_process(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model, optimizer = made()
        step, (x, y) = step_of(wrapped(model), optimizer), batches(8)[0]
        for _ in range(2):
            results(strategy, step, x, y)
        assert results(strategy, num_graphs) == [1, 1]
        assert not strategy._replicas.distribution.tracker.has_news


def test_statistics_and_random_numbers_of_a_compiled_model(strategy: sg.MirroredStrategy) -> None:
    def course(how: Compile) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(7)
        return trained(strategy, how, dropout=0.5, norm=nn.BatchNorm1d)

    plain, compiled = course(as_it_is), course(lambda model: torch.compile(model, backend="aot_eager"))
    assert_same(compiled, plain)
    assert compiled[1]["norm.num_batches_tracked"] == 4


def test_synchronized_statistics_of_a_compiled_model(strategy: sg.MirroredStrategy) -> None:
    ours = trained(strategy, wrapped, norm=nn.SyncBatchNorm)
    assert_same(ours, trained(sg.OneDeviceStrategy(), norm=nn.BatchNorm1d))


def test_hooks_of_a_compiled_model(strategy: sg.MirroredStrategy) -> None:
    def halved(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2

    def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def hooked(model: Net) -> Net:
        model.first.register_forward_hook(doubled)
        model.last.weight.register_hook(halved)
        return model

    ours = trained(strategy, lambda model: wrapped(hooked(model)))
    assert_same(ours, trained(sg.OneDeviceStrategy(), hooked))
    with strategy.scope():
        model, _ = made()
    compiled = wrapped(model)
    compiled.register_forward_hook(doubled)
    with pytest.raises(sg.errors.StrategyError, match=r"model OptimizedModule .* was created outside"):
        results(strategy, lambda: compiled(torch.ones(1, 6)))


def test_state_of_a_compiled_model_is_loaded_and_saved(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model, _ = made()
        compiled = wrapped(model)
    results(strategy, lambda: compiled(torch.ones(1, 6)))
    state = {name: torch.full_like(each, 0.5) for name, each in compiled.state_dict().items()}
    assert all(name.startswith("_orig_mod.") for name in state)
    compiled.load_state_dict(state)
    first, second = results(strategy, lambda: compiled(torch.ones(1, 6)))
    torch.testing.assert_close(first, second)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(first, plain(torch.ones(1, 6)).detach())


def test_model_compiled_without_a_scope_is_refused_by_its_own_name_and_can_be_adopted(
    strategy: sg.MirroredStrategy,
) -> None:
    model, optimizer = made()
    compiled = wrapped(model)
    step, (x, y) = step_of(compiled, optimizer), batches(8)[0]
    with pytest.raises(sg.errors.StrategyError, match=r"model Net \(4 parameters\) was created outside .*adopt"):
        results(strategy, step, x, y)
    strategy.adopt(compiled)
    strategy.adopt(optimizer)
    first, second = results(strategy, step, x, y)
    torch.testing.assert_close(first, second)


def test_functions_that_a_step_calls_are_compiled_and_see_what_changes(strategy: sg.MirroredStrategy) -> None:
    factors = {"of": 2.0}

    @torch.compile(backend="eager")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factors["of"]

    def step(x: torch.Tensor) -> torch.Tensor:
        return scaled(x)

    assert [each.item() for each in results(strategy, step, torch.ones(1))] == [2.0, 2.0]
    assert [each.item() for each in results(strategy, step, torch.ones(1))] == [2.0, 2.0]
    assert results(strategy, num_graphs) == [1, 1]
    factors["of"] = 3.0
    assert [each.item() for each in results(strategy, step, torch.ones(1))] == [3.0, 3.0]


def test_compiled_step_calls_the_library_outside_of_its_graphs(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model, optimizer = made()
        seen = sg.metrics.Mean()
    plain = step_of(model, optimizer)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = plain(x, y)
        seen.update_state(loss)
        return loss

    for x, y in batches(8, 8, 8):
        results(strategy, step, x, y)
    assert seen.result() > 0
    assert results(strategy, num_graphs) == [2, 2]  # up to the backward pass, and after the update


def test_options_and_settings_of_the_compiler_reach_all_replicas(strategy: sg.MirroredStrategy) -> None:
    def rank_of_graph(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    whole = torch.compile(rank_of_graph, backend="eager", fullgraph=True)

    def caught() -> str:
        try:
            whole(torch.ones(1))
        except Exception as error:
            return type(error).__name__
        return "none"

    assert results(strategy, caught) == ["Unsupported"] * 2

    def limit() -> int:
        torch.compile(rank_of_graph, backend="eager")
        return int(torch._dynamo.config.recompile_limit)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with torch._dynamo.config.patch(recompile_limit=5):
        results(strategy, torch.compile(doubled, backend="eager"), torch.ones(1))
        assert results(strategy, limit) == [5, 5]


def test_compiled_update_is_refused_and_says_what_to_compile(strategy: sg.MirroredStrategy) -> None:
    match = r"calls optimizer\.step\(\) as it is.*fused=True.*the model or the whole step may be compiled"
    with strategy.scope():
        model, optimizer = made()
    x, y = batches(8)[0]
    update = torch.compile(optimizer.step, backend="eager")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.mse_loss(model(x), y).backward()
        update()

    with pytest.raises(sg.errors.StrategyError, match=match):
        results(strategy, step, x, y)
    results(strategy, step_of(model, optimizer), x, y)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    with pytest.raises(sg.errors.StrategyError, match=match):
        results(strategy, step_of(model, optimizer), x, y)


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's compiler needs one of C++")
def test_machine_code_equals_one_device(strategy: sg.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = importlib.import_module("torch._inductor.config")
    monkeypatch.setattr(settings, "compile_threads", 1)  # more of them stay for the life of the process
    ours = trained(strategy, torch.compile)
    assert_same(ours, trained(sg.OneDeviceStrategy()))
