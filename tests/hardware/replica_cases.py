"""Steps on accelerators, of one replica and of several; see `target`, and docs/accelerators.md."""

import importlib
import os
import threading

import pytest
import torch
from torch import nn

import stratagem as sg
from tests.hardware import target
from tests.hardware.gpu_cases import Part, take
from tests.hardware.target import KIND, MIB, name, needs, torch_device

DTYPE = torch.float32 if KIND == "MPS" else torch.float64  # so that only a wrong sum differs, not another order
WIDTH = 1024 if target.IS_REAL else 64  # of a real one so that gradients are summed in several buckets


def make(seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DTYPE)
    return model, torch.optim.SGD(model.parameters(), 0.002, momentum=0.9)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    sizes = [13, 12, 7, 1] * count
    return [
        (torch.randn(size, WIDTH, generator=generator).to(DTYPE), torch.randn(size, 1, generator=generator).to(DTYPE))
        for size in sizes[:count]
    ]


def trained(strategy: sg.Strategy, count: int) -> list[torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with strategy:
        with strategy.scope():
            model, optimizer = make()
        for batch in strategy.distribute(batches(count)):
            strategy.run(step, args=batch)
        return [each.detach().cpu().clone() for each in model.parameters()]


def assert_equal_weights(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """To the precision of kernels that add in another order."""
    tolerance = 1e-3 if torch.float32 == DTYPE else 1e-7
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@needs()
def case_one_device_equals_the_cpu() -> None:
    assert_equal_weights(trained(sg.OneDeviceStrategy(name(0)), 8), trained(sg.OneDeviceStrategy("cpu:0"), 8))


@needs(2)
def case_gradients_summed_beside_the_backward_pass_are_whole() -> None:
    """Sums that were read before their stream had them would show here."""
    assert_equal_weights(
        trained(sg.MirroredStrategy([name(0), name(1)]), 16), trained(sg.OneDeviceStrategy("cpu:0"), 16)
    )


@needs(2)
def case_sums_to_one_replica_and_central_variables_equal_the_cpu() -> None:
    expected = trained(sg.OneDeviceStrategy("cpu:0"), 8)
    devices = [name(0), name(1)]
    assert_equal_weights(trained(sg.MirroredStrategy(devices, cross_device_ops="to_one"), 8), expected)
    assert_equal_weights(trained(sg.CentralStorageStrategy(devices), 8), expected)


@needs(2)
def case_two_runs_agree_to_the_last_bit() -> None:
    first, second = (trained(sg.MirroredStrategy([name(0), name(1)]), 6) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


@needs(2)
def case_values_of_every_type_travel_between_replicas() -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)

    def step() -> list[tuple[list[float], list[float], float]]:
        replica = sg.get_replica_context()
        found = []
        for dtype in dtypes:
            own = torch.full((3,), replica.replica_id_in_sync_group + 1, dtype=dtype, device=torch_device(0).type)
            total = replica.all_reduce("sum", own)
            gathered = replica.all_gather(own, axis=0)
            assert total.device == gathered.device == own.device
            found.append((total.tolist(), gathered.tolist(), float(own[0])))
        return found

    with sg.MirroredStrategy([name(0), name(1)]) as strategy:
        for rank, found in enumerate(strategy.local_results(strategy.run(step))):
            assert found == [([3] * 3, [1] * 3 + [2] * 3, rank + 1)] * len(dtypes)


@needs()
def case_batches_arrive_whole_although_the_host_does_not_wait() -> None:
    """The host may write to a batch again as soon as `run` has returned."""
    devices = [each.name for each in sg.config.list_logical_devices(KIND)[:2]]
    with sg.MirroredStrategy(devices) as strategy:
        batch = torch.zeros(4, 2**18)
        for number in range(20):
            batch.fill_(number)
            sums = strategy.run(lambda x: x.double().sum(), args=next(iter(strategy.distribute([(batch,)]))))
            assert float(sum(each.item() for each in strategy.local_results(sums))) == number * batch.numel()


@needs()
def case_hooks_of_a_backward_pass_are_in_the_replica() -> None:
    devices = [each.name for each in sg.config.list_logical_devices(KIND)[:2]]

    def step(x: torch.Tensor) -> tuple[bool, int, int]:
        seen: list[tuple[int, int, int]] = []
        result = model(x)
        result.register_hook(
            lambda _: seen.append(
                (
                    threading.get_ident(),
                    sg.get_replica_context().replica_id_in_sync_group,
                    torch.accelerator.current_device_index(),
                )
            )
        )
        result.sum().backward()
        ((thread, replica, device),) = seen
        return thread != threading.get_ident(), replica, device

    with sg.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
        found = strategy.local_results(strategy.run(step, args=(torch.ones(4, 2),)))
        assert list(found) == [(True, rank, rank) for rank in range(len(devices))]


@needs()
def case_mixed_precision_of_the_program_reaches_all_replicas() -> None:
    devices = [each.name for each in sg.config.list_logical_devices(KIND)[:2]]
    with sg.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 2)
        with torch.autocast(torch_device(0).type, dtype=torch.bfloat16):
            results = strategy.run(lambda x: str(model(x).dtype), args=(torch.ones(4, 2),))
        assert set(strategy.local_results(results)) == {"torch.bfloat16"}


@needs()
def case_scaled_gradients_train() -> None:
    devices = [each.name for each in sg.config.list_logical_devices(KIND)[:2]]
    type_ = torch_device(0).type
    with sg.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            torch.manual_seed(1)
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler(type_)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast(type_, dtype=torch.float16):
                loss = (model(x) - 1).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        losses = [
            float(strategy.reduce("mean", strategy.run(step, args=each)))
            for each in strategy.distribute([(torch.eye(4),)] * 30)
        ]
        assert losses[-1] < losses[0] / 4


@needs(2)
def case_replicas_draw_different_numbers() -> None:
    with sg.MirroredStrategy([name(0), name(1)]) as strategy:
        torch.manual_seed(3)
        first = strategy.local_results(strategy.run(lambda: torch.randn(8, device=torch_device(0).type)))
        torch.manual_seed(3)
        again = strategy.local_results(strategy.run(lambda: torch.randn(8, device=torch_device(0).type)))
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))


@needs(2)
def case_replicas_start_although_the_program_has_used_the_device() -> None:
    """Drivers do not survive a fork: replicas come from a process that has not woken them."""
    before = torch.ones(3, device=torch_device(1)) * 2
    with sg.MirroredStrategy([name(0), name(1)]) as strategy:
        found = strategy.run(lambda: torch.ones(2, device=torch_device(0).type).sum())
        assert [float(each) for each in strategy.local_results(found)] == [2, 2]
    assert before.tolist() == [2, 2, 2]


@needs(2)
def case_error_in_one_replica_reaches_the_program_while_the_other_waits() -> None:
    """The other one waits for a sum that never comes; it must not wait forever."""
    with sg.MirroredStrategy([name(0), name(1)]) as strategy:
        with strategy.scope():
            model, optimizer = make()

        def step(x: torch.Tensor, fails: bool) -> float:
            optimizer.zero_grad()
            if fails and sg.get_replica_context().replica_id_in_sync_group == 1:
                raise ValueError("the second replica has failed")
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        batch = torch.ones(4, WIDTH, dtype=DTYPE)
        strategy.run(step, args=(batch, False))
        with pytest.raises(ValueError, match="the second replica has failed"):
            strategy.run(step, args=(batch, True))
        losses = strategy.local_results(strategy.run(step, args=(batch, False)))
        assert all(loss == loss for loss in losses)  # noqa: PLR0124  # which NaN is not


@needs()
def case_keras_trains_on_the_devices() -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = importlib.import_module("keras")
    devices = [each.name for each in sg.config.list_logical_devices(KIND)[:2]]
    x, y = torch.randn(32, 3, generator=torch.Generator().manual_seed(1)).numpy(), torch.ones(32, 1).numpy()

    def losses(strategy: sg.Strategy) -> list[float]:
        keras.utils.set_random_seed(0)
        with strategy:
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
                model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.05))
            found = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
            return [float(each) for each in found]

    assert losses(sg.MirroredStrategy(devices)) == pytest.approx(losses(sg.OneDeviceStrategy("cpu:0")), rel=1e-3)


@needs(2)
def case_tensor_of_a_device_that_a_step_uses_travels_to_replicas() -> None:
    shift = torch.full((2,), 3.0, device=torch_device(1))

    def step(x: torch.Tensor) -> tuple[float, str]:
        return (x + shift.to(x.device)).sum().item(), str(shift.device)

    with sg.MirroredStrategy([name(0), name(1)]) as strategy:
        found = strategy.local_results(strategy.run(step, args=(torch.ones(4, 2),)))
    assert list(found) == [(32, str(torch_device(1)))] * 2


@needs()
def case_state_is_saved_and_loaded_anywhere() -> None:
    with sg.OneDeviceStrategy(name(0)) as strategy, strategy.scope():
        model, _ = make()
        state = {key: value.cpu() for key, value in model.state_dict().items()}
    plain, _ = make(seed=2)
    plain.load_state_dict(state)
    assert all(torch.equal(ours, state[key]) for key, ours in plain.state_dict().items())


@needs(2)
def case_replica_that_takes_too_much_is_named_and_the_others_go_on() -> None:
    for index in range(2):
        sg.config.set_logical_device_configuration(name(index), [Part(memory_limit=512)])

    def step() -> int:
        own = torch.accelerator.current_device_index()
        return take(600 if own == 1 and greedy else 10, torch_device(own)).numel()

    with sg.MirroredStrategy([name(0), name(1)]) as strategy:
        greedy = True
        with pytest.raises(sg.OutOfMemoryError, match=f"/device:{KIND}:1"):
            strategy.run(step)
        greedy = False
        assert strategy.local_results(strategy.run(step)) == (10 * MIB, 10 * MIB)
