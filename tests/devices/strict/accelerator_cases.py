"""What programs do on GPUs with inputs, statistics, workers and shares, on strict devices; see `in_a_program`."""

import contextlib
import importlib
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.devices.strict.counts import counted

_open = contextlib.ExitStack()
STRATEGIES: list[sg.Strategy] = []


def prepare() -> None:
    """Two replicas, the second of which is on the first device."""
    sg.config.simulate_devices("GPU", 3, memory_limit=512, strict=True)
    torch.set_num_threads(1)
    STRATEGIES.append(_open.enter_context(sg.MirroredStrategy(["gpu:2", "gpu:0"])))


def finish() -> None:
    _open.close()


# Inputs


def case_distributed_batches_arrive_on_the_device_of_each_replica() -> None:
    (strategy,) = STRATEGIES
    data = TensorDataset(torch.arange(14.0).view(7, 2), torch.arange(7))
    for pinned in (False, True):
        loader = DataLoader(data, batch_size=3, pin_memory=pinned)
        rows = []
        for x, y in strategy.distribute(loader):
            devices, numbers = strategy.run(lambda x, y: (f"{x.device} {y.device}", y), args=(x, y))
            found = list(strategy.local_results(devices))  # of the last row the first replica's alone
            assert found == ["gpu:2 gpu:2", "gpu:0 gpu:0"][: len(found)]
            rows += [row for each in strategy.local_results(numbers) for row in each.tolist()]
        assert rows == list(range(7))


def case_asynchronous_copy_from_pinned_memory_waits_for_nothing() -> None:
    host = torch.arange(6.0)
    with counted() as blocking:
        plain = host.to("gpu:1")
    with counted() as pinned:
        fast = host.pin_memory().to("gpu:1", non_blocking=True)
    assert sum(blocking.waits.values()) == 1
    assert sum(pinned.waits.values()) == 0
    assert fast.tolist() == plain.tolist() == host.tolist()


# Statistics of the global batch


def _normalized(recomputed: bool, kind: type[nn.Module]) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), kind(4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
        loss = result.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def case_synchronized_batch_normalisation_equals_one_device() -> None:
    (strategy,) = STRATEGIES
    batch = torch.randn(9, 3, generator=torch.Generator().manual_seed(2))
    model, step = _normalized(False, nn.BatchNorm1d)
    expected = [float(step(batch)) for _ in range(3)]
    for recomputed in (False, True):
        with strategy.scope():
            ours, our_step = _normalized(recomputed, nn.SyncBatchNorm)
        losses = [
            float(strategy.reduce("mean", strategy.run(our_step, args=each)))
            for each in strategy.distribute([(batch,)] * 3)
        ]
        assert losses == pytest.approx(expected, abs=1e-5)
        for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, atol=1e-5, rtol=1e-5)


def case_hooks_of_a_backward_pass_are_in_the_replica() -> None:
    (strategy,) = STRATEGIES
    with strategy.scope():
        model = nn.Linear(2, 1)

    def step(x: torch.Tensor) -> tuple[bool, int]:
        seen: list[tuple[int, int]] = []
        result = model(x)
        result.register_hook(
            lambda _: seen.append((threading.get_ident(), sg.get_replica_context().replica_id_in_sync_group))
        )
        result.sum().backward()
        ((thread, replica),) = seen
        return thread != threading.get_ident(), replica

    assert list(strategy.local_results(strategy.run(step, args=(torch.ones(4, 2),)))) == [(True, 0), (True, 1)]


# Workers of a parameter server that go at their own pace


def case_asynchronous_workers_compute_on_their_devices() -> None:
    with sg.ParameterServerStrategy(devices=["gpu:0", "gpu:1"], num_ps=2) as strategy:
        with strategy.scope():
            torch.manual_seed(1)
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)

        def step(x: torch.Tensor) -> tuple[str, float]:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return str(loss.device), loss.item()

        results = [strategy.run(step, args=(torch.ones(4, 2),)) for _ in range(30)]
        found = [each for result in results for each in strategy.local_results(result)]
        assert {device for device, _ in found} <= {"gpu:0", "gpu:1"}
        assert found[-1][1] < found[0][1] / 10
        assert float(strategy.run(lambda x: model(x).mean(), args=(torch.ones(4, 2),))) == pytest.approx(1, abs=0.5)


# Shares


def case_share_that_is_full_is_named() -> None:
    part = sg.config.LogicalDeviceConfiguration
    _open.close()
    sg.config.set_logical_device_configuration("gpu:0", [part(memory_limit=64), part(memory_limit=64)])
    with pytest.raises(sg.OutOfMemoryError, match=r"on /device:GPU:1: .*64 MiB"), sg.devices.serve("gpu:1") as device:
        torch.empty(80 * 2**20, dtype=torch.uint8, device=device.torch_device)
    with sg.device("/gpu:1"), pytest.raises(sg.OutOfMemoryError, match="on /device:GPU:1"):
        torch.empty(80 * 2**20, dtype=torch.uint8)
    with (
        sg.OneDeviceStrategy("gpu:1") as strategy,
        pytest.raises(sg.OutOfMemoryError, match="on /device:GPU:1") as caught,
    ):
        strategy.run(lambda: torch.empty(80 * 2**20, dtype=torch.uint8, device="gpu"))
    assert (caught.value.device, caught.value.limit_bytes) == ("/device:GPU:1", 64 * 2**20)


def case_keras_shuffles_on_one_device() -> None:
    keras = importlib.import_module("keras")
    keras.utils.set_random_seed(0)
    with sg.OneDeviceStrategy("gpu:1") as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(loss="mse", optimizer="sgd")
        losses = model.fit(torch.ones(8, 3).numpy(), torch.ones(8, 1).numpy(), batch_size=4, epochs=3, verbose=0)
    assert losses.history["loss"][-1] < losses.history["loss"][0]


def case_keras_trains_on_one_device_with_variables_on_it() -> None:
    keras = importlib.import_module("keras")
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).numpy()
    found = []
    strategy = _open.enter_context(sg.OneDeviceStrategy("gpu:1"))
    place = str(strategy.devices[0].torch_device)
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(0)
        with scope:
            layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.5))
        losses = model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append((losses, [each.numpy() for each in model.weights]))
    (expected, theirs), (losses, ours) = found
    assert {str(each.value.device) for each in (*model.weights, *model.optimizer.variables)} == {place}
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-5, atol=1e-6)
