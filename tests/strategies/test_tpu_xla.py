"""TPUStrategy on real devices of torch_xla, which `make test-tpu` lets divide the CPU: one program on four devices."""

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices.vendors import torch_xla as xla
from stratagem.errors import DeviceConfigurationError, DeviceError, DevicesInUseError, StratagemWarning, StrategyError
from tests.contracts.strategies_under_test import ON_XLA
from tests.steps import plain_step

pytestmark = [
    pytest.mark.skipif(not ON_XLA, reason="torch_xla computes on the CPU in `make test-tpu` alone"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[Any]:
    with sg.TPUStrategy() as made:
        made.run(int)
        yield made


def batch_of(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 3))


def train(strategy: sg.Strategy | None, sizes: list[int], make: Callable[[], nn.Module] = make_net) -> Any:
    batches = [batch_of(size, seed) for seed, size in enumerate(sizes)]
    if strategy is None:
        model = make()
        step = plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        return model, [step(*each).item() for each in batches]
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = plain_step(model, optimizer)
    losses = [strategy.run(step, args=each) for each in strategy.distribute(batches)]
    return model, [strategy.reduce("mean", each).item() for each in losses]


def assert_alike(ours: Any, theirs: Any) -> None:
    (model, losses), (plain, expected) = ours, theirs
    assert losses == pytest.approx(expected, abs=5e-6)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, atol=5e-6, rtol=5e-6, msg=name)


def test_step_is_called_once_and_sees_the_global_batch(strategy: sg.Strategy) -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> tuple[int, torch.Tensor]:
        calls.append(len(x))
        context = sg.get_replica_context()
        assert context is not None
        assert (context.num_replicas_in_sync, context.share, context.num_examples) == (1, 1.0, 0)
        return len(x), context.all_reduce("sum", x.sum())

    assert (len(strategy.devices), strategy.num_replicas_in_sync, strategy.world_size) == (4, 1, 1)
    assert (strategy.device, strategy.is_chief) == (torch.device("xla:0"), True)
    (batch,) = strategy.distribute([torch.arange(8.0)])
    number, total = strategy.run(step, args=(batch,))
    assert (calls, strategy.local_results(number), strategy.reduce("sum", total).item()) == ([8], (8,), 28.0)


def test_rows_of_a_batch_are_spread_over_the_devices(strategy: Any) -> None:
    import torch_xla

    def layout_of(x: torch.Tensor) -> str:
        return str(torch_xla._XLAC._get_xla_sharding_spec(x))

    def layouts(sizes: list[int], **options: Any) -> list[str]:
        shape = (3,) if options else ()
        batches = [torch.zeros(*shape, size, 2) for size in sizes]
        results = [strategy.run(layout_of, args=(each,)) for each in strategy.distribute(batches, **options)]
        return [strategy.local_results(each)[0] for each in results]

    assert layouts([8, 7, 4, 2]) == ["{devices=[4,1]0,1,2,3}", "", "{devices=[4,1]0,1,2,3}", ""]
    assert layouts([8], batch_dim=1) == ["{devices=[1,4,1]0,1,2,3}"]
    assert strategy.local_results(strategy.run(layout_of, args=(torch.zeros(8, 2),))) == ("",)  # no batch


@pytest.mark.parametrize("sizes", [[8, 8, 6], [7, 3, 2], [4, 9]])
def test_statistics_of_batches_are_those_of_one_device(strategy: sg.Strategy, sizes: list[int]) -> None:
    assert_alike(train(strategy, sizes), train(None, sizes))


def test_frozen_statistics_train_what_is_before_them(strategy: sg.Strategy) -> None:
    def frozen() -> nn.Module:
        model = make_net()
        model[1].eval()
        model[1].running_var.fill_(2.0)
        return model

    assert_alike(train(strategy, [8, 6], frozen), train(None, [8, 6], frozen))


def test_rows_that_do_not_divide_may_be_scattered(strategy: sg.Strategy) -> None:
    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (table(ids) * nn.functional.one_hot(ids, 4)).sum()
        loss.backward()
        optimizer.step()
        return loss

    with strategy.scope():
        table = nn.Embedding(4, 4)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        nn.init.zeros_(table.weight)
    for batch in strategy.distribute([torch.tensor([0, 1, 1, 3, 3, 3, 0])]):
        strategy.run(step, args=(batch,))
    assert table.weight.cpu().diagonal().tolist() == [-2.0, -2.0, 0.0, -3.0]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_steps_are_compiled_once_for_each_shape(strategy: Any, optimizer: Any) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))
        made = optimizer(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    step = plain_step(model, made)

    def epoch(seed: int) -> None:
        for batch in strategy.distribute([batch_of(size, seed + size) for size in (8, 8, 8, 8, 5)]):
            strategy.reduce("mean", strategy.run(step, args=batch))
        scheduler.step()
        model.state_dict()["0.weight"].cpu()

    before = xla.one_program().num_compilations
    epoch(0)  # the first step has no state of the optimizer yet
    after = xla.one_program().num_compilations
    assert 2 <= after - before <= 5
    epoch(1)
    epoch(2)
    assert xla.one_program().num_compilations - after <= 1


def test_optimizers_do_not_wait_for_the_devices(strategy: sg.Strategy) -> None:
    from torch_xla.debug import metrics

    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters())
    step = plain_step(model, optimizer)
    for batch in strategy.distribute([batch_of(8)] * 2):
        strategy.run(step, args=batch)
    before = metrics.counter_value("aten::_local_scalar_dense") or 0
    results = [strategy.run(step, args=batch) for batch in strategy.distribute([batch_of(8)] * 3)]
    assert (metrics.counter_value("aten::_local_scalar_dense") or 0) == before
    assert all(state["step"].device.type == "cpu" for state in optimizer.state.values())
    assert len({strategy.reduce("mean", each).item() for each in results}) == 3  # as each step left it


def test_new_tensors_of_a_step_are_on_the_devices(strategy: sg.Strategy) -> None:
    made = strategy.run(lambda: [str(torch.arange(3).device), str(torch.zeros(2, device="cpu").device)])
    assert strategy.local_results(made) == (["xla:0", "cpu"],)
    assert torch.arange(3).device.type == "cpu"


def test_results_are_as_their_step_left_them_and_come_to_the_host(strategy: sg.Strategy) -> None:
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(2))

    def step() -> torch.Tensor:
        with torch.no_grad():
            weight.add_(1.0)
        return weight

    first, second = strategy.run(step), strategy.run(step)
    (value,) = strategy.local_results(first)
    assert (value.device.type, value.requires_grad, value.tolist()) == ("cpu", False, [1.0, 1.0])
    assert strategy.gather(second).tolist() == [2.0, 2.0]


def test_hooks_of_parameters_come_along(strategy: sg.Strategy) -> None:
    seen: list[str] = []
    with strategy.scope():
        model = nn.Linear(2, 1)
        model.weight.register_hook(lambda gradient: seen.append(gradient.device.type))
        model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.device.type))
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    assert seen == ["xla", "xla"]
    assert model.weight.grad is not None


def test_model_made_elsewhere_is_adopted_with_its_optimizer(strategy: sg.Strategy) -> None:
    model, expected = make_net(), make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plain = torch.optim.Adam(expected.parameters(), lr=0.1)
    plain_step(model, optimizer)(*batch_of(8))
    plain_step(expected, plain)(*batch_of(8))
    strategy.adopt(model, optimizer)
    for batch in strategy.distribute([batch_of(8, 1)]):
        strategy.run(plain_step(model, optimizer), args=batch)
    plain_step(expected, plain)(*batch_of(8, 1))
    torch.testing.assert_close(model[3].weight.cpu(), expected[3].weight, atol=2e-6, rtol=2e-6)


def test_model_that_the_program_moved_to_the_host_comes_back(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parameter = model.weight
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    model.cpu()
    assert (model.weight is parameter, parameter.device.type) == (True, "cpu")
    with torch.no_grad():
        parameter.fill_(3.0)
    strategy.run(optimizer.step)
    assert parameter.cpu().tolist() == [[2.0, 2.0]]


def test_state_is_saved_and_loaded_without_torch_xla(strategy: sg.Strategy) -> None:
    model, _ = train(strategy, [8])
    saved = io.BytesIO()
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, saved)
    saved.seek(0)
    plain = make_net()
    plain.load_state_dict(torch.load(saved))
    before = plain[0].weight.detach().clone()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in plain.state_dict().items()})
    assert strategy.reduce("max", strategy.run(lambda: model[0].weight.abs().max())).item() == 0.0
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].weight.cpu(), before)


def test_averages_and_metrics_are_those_of_one_device(strategy: sg.Strategy) -> None:
    def run(chosen: sg.Strategy) -> tuple[list[Any], float]:
        with chosen.scope():
            model = make_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            average = sg.ExponentialMovingAverage(0.9)
            mean = sg.metrics.Mean()

        train_one = plain_step(model, optimizer)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            mean.update_state(train_one(x, y))

        for batch in chosen.distribute([batch_of(8), batch_of(6)]):
            chosen.run(step, args=batch)
            average.apply(model.parameters())
        return [average.average(each).cpu() for each in model.parameters()], mean.result().item()

    with sg.OneDeviceStrategy("cpu:0") as one:
        expected, expected_mean = run(one)
    averages, mean = run(strategy)
    assert mean == pytest.approx(expected_mean, abs=2e-6)
    for ours, theirs in zip(averages, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


def test_seed_decides_what_the_devices_draw(strategy: sg.Strategy) -> None:
    def drawn() -> list[float]:
        return [number for _ in range(2) for number in strategy.gather(strategy.run(lambda: torch.rand(2))).tolist()]

    torch.manual_seed(3)
    first = drawn()
    torch.manual_seed(3)
    assert drawn() == first
    assert len(set(first)) == 4
    assert drawn() != first


def test_failed_step_says_why_and_the_next_one_works(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def fail() -> None:
        model(torch.ones(3, 5))

    def fail_in_update() -> None:
        model.weight.sum().backward()
        model.weight.grad = None
        optimizer.param_groups[0]["lr"] = "high"
        model.bias.sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"shapes|dimension|size"):
        strategy.run(fail)
    with pytest.raises(Exception, match=r"str|lr|high"):
        strategy.run(fail_in_update)
    optimizer.param_groups[0]["lr"] = 0.1
    assert strategy.local_results(strategy.run(lambda: torch.zeros(1).device.type)) == ("xla",)
    assert strategy.gather(strategy.run(lambda: model(torch.ones(1, 2)))).shape == (1, 1)


def test_model_of_the_host_is_refused_in_a_step(strategy: sg.Strategy) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match=r"used a tensor, or a model, of the host; make models inside"):
        strategy.run(lambda: model(torch.ones(1, 2)))
    strategy.adopt(model)
    assert strategy.gather(strategy.run(lambda: model(torch.ones(1, 2)))).shape == (1, 2)


def test_synchronized_statistics_are_those_of_the_batch(strategy: sg.Strategy) -> None:
    def make(kind: Any) -> Callable[[], nn.Module]:
        def model() -> nn.Module:
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(6, 8), kind(8), nn.Linear(8, 3))

        return model

    assert_alike(train(strategy, [8, 6], make(nn.SyncBatchNorm)), train(None, [8, 6], make(nn.BatchNorm1d)))


def test_threads_run_one_after_the_other(strategy: sg.Strategy) -> None:
    under_way: list[int] = []

    def step(number: int) -> torch.Tensor:
        assert not under_way
        under_way.append(number)
        total = torch.arange(100.0).sum() + number
        under_way.remove(number)
        return total

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda number: strategy.run(step, args=(number,)), range(8)))
    assert [strategy.reduce("mean", each).item() for each in results] == [4950.0 + number for number in range(8)]


def test_batches_that_never_divide_are_told_of_once(four_cpus: None) -> None:
    with sg.TPUStrategy() as own:
        first, *others = own.distribute([torch.zeros(7)] * 10)
        for batch in others[:6]:
            own.run(torch.sum, args=(batch,))
        own.run(torch.sum, args=(first,))
        with pytest.warns(StratagemWarning, match="8 batches in a row, the last of 7 rows, did not divide evenly"):
            own.run(torch.sum, args=(first,))
        own.run(torch.sum, args=(first,))


def test_devices_of_one_program_have_no_other_strategy(strategy: sg.Strategy) -> None:
    for make in (lambda: sg.MirroredStrategy(["tpu:0", "tpu:1"]), lambda: sg.OneDeviceStrategy("tpu:0")):
        with pytest.raises(DeviceConfigurationError, match=r"compute one program together.*sg.TPUStrategy\(\)"):
            make()
    with pytest.raises(DevicesInUseError, match=r"in use by sg.TPUStrategy\(\)"):
        sg.config.set_visible_devices(["tpu:0"], "TPU")
    with pytest.raises(DeviceError, match="does not tell how much memory"):
        sg.config.get_memory_info("tpu:0")


def test_all_devices_must_be_visible(inventory: Any) -> None:
    sg.config.set_visible_devices(["tpu:0", "tpu:1"], "TPU")
    with pytest.raises(DeviceConfigurationError, match="on all 4 devices of torch_xla, and 2 are visible"):
        sg.TPUStrategy()


def test_closed_strategy_leaves_a_plain_model(four_cpus: None) -> None:
    own = sg.TPUStrategy()
    model, _ = train(own, [8])
    own.close()
    with pytest.raises(StrategyError, match="TPUStrategy was closed at"):
        own.run(int)
    assert model.cpu()(torch.zeros(2, 6)).shape == (2, 3)


def test_scopes_of_devices_place_on_them(strategy: sg.Strategy) -> None:
    with sg.device("/tpu:0"):
        placed = torch.ones(3) + 1
    assert (placed.device.type, placed.cpu().tolist()) == ("xla", [2.0, 2.0, 2.0])
