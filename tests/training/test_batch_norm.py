"""Batch normalization on real replicas, against plain torch on one device with the whole batch."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices import inventory as inventory_module
from stratagem.devices.inventory import Inventory
from stratagem.errors import StrategyError
from stratagem.objects.per_replica import PerReplica
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.training.batch_norm import SyncBatchNorm, convert_sync_batchnorm

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", params=[2, 4])
def strategy(request: pytest.FixtureRequest) -> Iterator[MirroredStrategy]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory_module, "_THIS_PROCESS", Inventory())
        sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * request.param)
        with MirroredStrategy() as made:
            with made.scope():
                pass  # starts the replicas, before the guards of the first test look around
            yield made


def net_1d() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.BatchNorm1d(5))


def net_1d_of_sequences() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 5))


def net_2d() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    )


def net_3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), nn.Flatten(), nn.Linear(3, 5))


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    net_1d: (6,),
    net_1d_of_sequences: (2, 3),
    net_2d: (2, 4, 4),
    net_3d: (2, 2, 2, 2),
}


def batch_of(size: int, shape: tuple[int, ...], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *shape, generator=generator) * 2 + 3
    return x, torch.randint(5, (size,), generator=generator)


def distributed(batch: Batch, counts: tuple[int, ...]) -> tuple[PerReplica, PerReplica]:
    x, y = (PerReplica(each.split(counts), counts) for each in batch)
    return x, y


def uneven(size: int, num_replicas: int) -> tuple[int, ...]:
    """As differing as can be: one replica has a single example."""
    rest = size - 1
    others = num_replicas - 1
    return (1, *[rest // others + (index < rest % others) for index in range(others)])


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    optimizer.zero_grad()
    output = model(x)
    loss = nn.functional.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
    return loss, output, *[each.grad.clone() for each in model.parameters()]  # type: ignore[union-attr]


def pair(
    strategy: MirroredStrategy, make: Callable[[], nn.Module]
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """A converted model in the scope, and a plain one that starts equal, each with its optimizer."""
    torch.manual_seed(1)
    with strategy.scope():
        model = convert_sync_batchnorm(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    plain = make()
    return model, optimizer, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name], value, rtol=1e-5, atol=2e-6, msg=lambda text, n=name: n + text
        )


def assert_trains_equally(
    strategy: MirroredStrategy, make: Callable[[], nn.Module], counts: tuple[int, ...], *, num_steps: int = 3
) -> None:
    model, optimizer, plain, plain_optimizer = pair(strategy, make)
    for number in range(num_steps):
        batch = batch_of(sum(counts), SHAPES[make], seed=number)
        expected = step(plain, plain_optimizer, *batch)
        loss, output, *gradients = strategy.run(step, args=(model, optimizer, *distributed(batch, counts)))
        torch.testing.assert_close(strategy.reduce("mean", loss), expected[0].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(strategy.gather(output), expected[1].detach(), rtol=1e-5, atol=5e-6)
        for got, wanted in zip(gradients, expected[2:], strict=True):
            for of_replica in got.values:
                torch.testing.assert_close(of_replica, wanted, rtol=1e-5, atol=2e-6)
        assert_same_state(model, plain)


# Every kind of layer is tried with uneven batches; elsewhere one stands for all.
mostly_2d = pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[] if make is net_2d else pytest.mark.soak) for make in SHAPES]
)


@mostly_2d
def test_sync_batch_norm_trains_as_one_device(strategy: MirroredStrategy, make: Callable[[], nn.Module]) -> None:
    assert_trains_equally(strategy, make, (4,) * strategy.num_replicas_in_sync)


@pytest.mark.parametrize("make", SHAPES)
def test_sync_batch_norm_trains_as_one_device_when_batches_are_uneven(
    strategy: MirroredStrategy, make: Callable[[], nn.Module]
) -> None:
    assert_trains_equally(strategy, make, uneven(11, strategy.num_replicas_in_sync))


@mostly_2d
@pytest.mark.parametrize("empty_is_first", [False, True])
def test_sync_batch_norm_trains_as_one_device_when_replicas_are_empty(
    strategy: MirroredStrategy, make: Callable[[], nn.Module], empty_is_first: bool
) -> None:
    size = strategy.num_replicas_in_sync
    counts = (3,) * (size // 2) + (0,) * (size - size // 2)
    assert_trains_equally(strategy, make, counts[::-1] if empty_is_first else counts)


def test_sync_batch_norm_matches_one_device_without_affine_and_with_cumulative_average(
    strategy: MirroredStrategy,
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 5), nn.BatchNorm1d(5, momentum=None)
        )

    model, optimizer, plain, plain_optimizer = pair(strategy, make)
    counts = uneven(9, strategy.num_replicas_in_sync)
    for number in range(4):
        batch = batch_of(9, (6,), seed=number)
        strategy.run(step, args=(model, optimizer, *distributed(batch, counts)))
        step(plain, plain_optimizer, *batch)
    assert_same_state(model, plain)


@pytest.mark.parametrize("training", [True, False])
def test_sync_batch_norm_without_running_statistics_always_takes_the_global_batch(
    strategy: MirroredStrategy, training: bool
) -> None:
    with strategy.scope():
        layer = convert_sync_batchnorm(nn.BatchNorm1d(6, track_running_stats=False)).train(training)
    x, y = batch_of(9, (6,))
    outputs = strategy.run(layer, args=(distributed((x, y), uneven(9, strategy.num_replicas_in_sync))[0],))
    expected = nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(strategy.gather(outputs), expected, rtol=1e-5, atol=1e-6)


def test_sync_batch_norm_is_as_accurate_as_one_device_when_the_mean_is_large(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        layer = convert_sync_batchnorm(nn.BatchNorm1d(6))
    x = batch_of(64, (6,))[0] + 1000 * torch.arange(64)[:, None].div(64).round()
    exact = nn.BatchNorm1d(6).double()
    one_device = nn.BatchNorm1d(6)
    exact(x.double()), one_device(x)
    strategy.run(layer, args=(distributed((x, x), (64 // strategy.num_replicas_in_sync,) * len(strategy.devices))[0],))
    error = (layer.running_var - exact.running_var).abs().max()  # type: ignore[operator]
    plain_error = (one_device.running_var - exact.running_var).abs().max()  # type: ignore[operator]
    assert error <= 2 * plain_error + 1e-6 * exact.running_var.max()  # type: ignore[union-attr]


def test_sync_batch_norm_gives_the_input_its_gradient(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        layer = convert_sync_batchnorm(nn.BatchNorm2d(2))

    def input_gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (layer(x) * x.detach().sin()).sum().backward()
        assert x.grad is not None
        return x.grad

    x, _ = batch_of(9, (2, 4, 4))
    counts = uneven(9, strategy.num_replicas_in_sync)
    got = strategy.run(input_gradient, args=(PerReplica(x.split(counts)),))  # without counts: replicas weigh alike
    whole = x.clone().requires_grad_()
    (nn.BatchNorm2d(2)(whole) * x.sin()).sum().div(strategy.num_replicas_in_sync).backward()
    torch.testing.assert_close(strategy.gather(got), whole.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sync_batch_norm_keeps_the_type_of_its_input(strategy: MirroredStrategy, dtype: torch.dtype) -> None:
    with strategy.scope():
        layer = convert_sync_batchnorm(nn.BatchNorm2d(2, dtype=torch.float64 if dtype == torch.float64 else None))
    x = batch_of(8, (2, 4, 4))[0].to(dtype)
    counts = uneven(8, strategy.num_replicas_in_sync)
    got = strategy.gather(strategy.run(layer, args=(PerReplica(x.split(counts), counts),)))
    plain = nn.BatchNorm2d(2, dtype=torch.float64)
    expected = plain(x.double())
    assert got.dtype == dtype
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(got.double(), expected, **tolerance)
    torch.testing.assert_close(layer.running_var.double(), plain.running_var, rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]


def test_sync_batch_norm_uses_running_statistics_in_eval(strategy: MirroredStrategy) -> None:
    model, optimizer, plain, plain_optimizer = pair(strategy, net_2d)
    batch, counts = batch_of(7, SHAPES[net_2d]), uneven(7, strategy.num_replicas_in_sync)
    strategy.run(step, args=(model, optimizer, *distributed(batch, counts)))
    step(plain, plain_optimizer, *batch)
    before = copy.deepcopy(model.state_dict())
    outputs = strategy.gather(strategy.run(model.eval(), args=distributed(batch, counts)[:1]))
    torch.testing.assert_close(outputs, plain.eval()(batch[0]).detach(), rtol=1e-5, atol=5e-6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sync_batch_norm_needs_two_values_per_channel_in_the_global_batch(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        layer = convert_sync_batchnorm(nn.BatchNorm1d(6))
    counts = (1,) + (0,) * (strategy.num_replicas_in_sync - 1)
    with pytest.raises(ValueError, match="more than 1 value per channel in training, but the global batch has 1"):
        strategy.run(layer, args=(PerReplica(torch.ones(1, 6).split(counts), counts),))


def test_conversion_after_the_scope_counts_until_the_first_run(strategy: MirroredStrategy) -> None:
    torch.manual_seed(1)
    with strategy.scope():
        model = net_1d()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = copy.deepcopy(model)
    convert_sync_batchnorm(model)
    batch, counts = batch_of(9, (6,)), uneven(9, strategy.num_replicas_in_sync)
    strategy.run(step, args=(model, optimizer, *distributed(batch, counts)))
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), *batch)
    assert_same_state(model, plain)


def test_conversion_refuses_a_model_that_replicas_already_have(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        model = net_1d()
    strategy.run(lambda: model.training)
    with pytest.raises(StrategyError, match=r"(?s)before its first strategy.run, .* already have '1'.*model = sg"):
        convert_sync_batchnorm(model)
    with strategy.scope(), pytest.raises(StrategyError, match="already have"):
        convert_sync_batchnorm(model)
    assert not any(isinstance(each, SyncBatchNorm) for each in model.modules())


def test_controllers_changes_reach_the_sync_batch_norm_of_all_replicas(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        layer = convert_sync_batchnorm(nn.BatchNorm1d(6))
    x = PerReplica([torch.full((2, 6), 5.0)] * strategy.num_replicas_in_sync)
    strategy.run(layer, args=(x,))
    state = layer.state_dict()
    layer.load_state_dict(state | {"running_mean": torch.full((6,), 4.0), "running_var": torch.ones(6)})
    outputs = strategy.run(layer.eval(), args=(x,))
    for output in outputs.values:
        torch.testing.assert_close(output, torch.ones(2, 6), rtol=1e-4, atol=1e-4)


def test_plain_batch_norm_agrees_on_all_replicas_after_each_run(strategy: MirroredStrategy) -> None:
    momentum = 0.3
    with strategy.scope():
        layer = nn.BatchNorm1d(6, momentum=momentum)
    counts = tuple(2 + rank for rank in range(strategy.num_replicas_in_sync))
    mean, var = torch.zeros(6), torch.ones(6)
    for number in range(3):
        x, _ = batch_of(sum(counts), (6,), seed=number)
        strategy.run(layer, args=(PerReplica(x.split(counts), counts),))
        parts = [(part, len(part) / len(x)) for part in x.split(counts)]
        mean = (1 - momentum) * mean + momentum * sum(part.mean(0) * share for part, share in parts)
        var = (1 - momentum) * var + momentum * sum(part.var(0) * share for part, share in parts)
        seen = strategy.run(lambda: [each.clone() for each in layer.buffers()])
        for replica in range(strategy.num_replicas_in_sync):
            torch.testing.assert_close(seen[0][replica], mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(seen[1][replica], var, rtol=1e-5, atol=1e-6)
            assert seen[2][replica] == number + 1
        assert all(torch.equal(own, there[0]) for own, there in zip(layer.buffers(), seen, strict=True))


def test_plain_batch_norm_counts_empty_replicas_for_nothing(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        layer = nn.BatchNorm1d(6, momentum=1.0)
    counts = (0,) * (strategy.num_replicas_in_sync - 1) + (4,)
    x, _ = batch_of(4, (6,))
    strategy.run(layer, args=(PerReplica(x.split(counts), counts),))
    torch.testing.assert_close(layer.running_mean, x.mean(0))
    torch.testing.assert_close(layer.running_var, x.var(0))
    assert layer.num_batches_tracked == 1


def test_conversion_keeps_parameters_buffers_and_keys() -> None:
    model = nn.Sequential(net_2d(), net_1d(), net_3d()).eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = copy.deepcopy(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(now) == list(tensors)
    assert all(now[name] is tensor for name, tensor in tensors.items())
    assert list(model.state_dict()) == list(state)
    assert sum(isinstance(each, SyncBatchNorm) for each in model.modules()) == 5
    assert not any(each.training for each in model.modules())
    fresh = nn.Sequential(net_2d(), net_1d(), net_3d())
    fresh.load_state_dict(model.state_dict())


def test_conversion_takes_a_single_layer_and_leaves_a_converted_one() -> None:
    layer = nn.BatchNorm2d(3, eps=0.1, momentum=None)
    converted = convert_sync_batchnorm(layer)
    assert isinstance(converted, SyncBatchNorm)
    assert convert_sync_batchnorm(converted) is converted
    assert repr(converted).startswith("SyncBatchNorm(3, eps=0.1, momentum=None, affine=True")


def test_conversion_refuses_a_layer_of_another_class_and_changes_nothing() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return -super().forward(input)

    model = nn.Sequential(nn.BatchNorm1d(3), Own(3))
    with pytest.raises(StrategyError, match="'1' is a Own, whose own computation would be lost"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("make", SHAPES)
def test_sync_batch_norm_outside_any_run_is_plain(make: Callable[[], nn.Module]) -> None:
    plain = make()
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    x, _ = batch_of(6, SHAPES[make])
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))


def test_sync_batch_norm_refuses_the_dimensions_that_its_plain_layer_refuses() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        convert_sync_batchnorm(nn.BatchNorm2d(3))(torch.ones(2, 3))
