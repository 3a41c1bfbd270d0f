"""Devices hold everywhere: limits, names, logs, settings and prints are those of each replica's own device."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _len_torch_function_stack

import stratagem as sg
from stratagem.devices.device import MIB
from stratagem.devices.inventory import Inventory

LIMIT = 256  # MiB
TWO = ["gpu:0", "gpu:1"]
STRATEGIES: dict[str, Callable[[], sg.Strategy]] = {
    "one device": lambda: sg.OneDeviceStrategy("gpu:0"),
    "mirrored 1": lambda: sg.MirroredStrategy(TWO[:1]),
    "mirrored 2": lambda: sg.MirroredStrategy(TWO),
    "mirrored 2 torch": lambda: sg.MirroredStrategy(TWO, cross_device_ops="torch"),
    "central 2": lambda: sg.CentralStorageStrategy(TWO),
    "local sgd 2": lambda: sg.LocalSGDStrategy(2, devices=TWO),
}
SELDOM = ("mirrored 1", "central 2", "mirrored 2 torch", "local sgd 2")
kept: list[torch.Tensor] = []


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.soak if name in SELDOM else ()) for name in STRATEGIES],
)
def strategy(inventory: Inventory, request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    """Each strategy on simulated GPUs with a limit; afterwards nothing of placement is left in torch."""
    inventory.simulate("GPU", 2, memory_limit=LIMIT)
    with STRATEGIES[request.param]() as made:
        yield made
    assert _len_torch_function_stack() == 0
    inventory.simulate("GPU", 1)  # the configuration is free again


def numel_of(num_mib: int, replica: int | None = None) -> int:
    context = sg.get_replica_context()
    if replica is not None and context is not None and context.replica_id_in_sync_group != replica:
        return 0
    return torch.ones(num_mib * MIB // 4).numel()


def numel_in(x: torch.Tensor) -> int:
    return (x + 1).numel()


def each_of(strategy: sg.Strategy, value: Any) -> tuple[Any, ...]:
    return strategy.local_results(value)


def test_limits_hold_and_names_are_those_of_each_replica(strategy: sg.Strategy) -> None:
    names = [device.name for device in strategy.devices]
    with strategy.scope():
        model = nn.Linear(256, 256)
        optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> tuple[Any, ...]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        kept.append(loss.detach() + 1)  # nothing of a strategy that is closed counts, whoever still has it
        return loss.detach(), sg.device_of(model.weight).name, sg.device_of(loss).name, sg.device_of(x).name

    for _ in range(3):
        losses, *found = strategy.run(step, args=(torch.ones(8, 256),))
    assert all(list(each_of(strategy, each)) == names for each in found)
    assert sg.device_of(each_of(strategy, losses)[0]).name == "/device:CPU:0"  # what comes back is the program's
    used = sg.config.get_memory_info("gpu:0")
    assert 256 * 1024 <= used["current"] <= used["peak"] < 32 * MIB
    for replica, name in enumerate(names):
        with pytest.raises(sg.OutOfMemoryError, match=f"{name}.* 512 MiB.* its limit is {LIMIT} MiB") as caught:
            strategy.run(numel_of, args=(512, replica))
        error = caught.value
        assert (error.device, error.limit_bytes, error.requested_bytes) == (name, LIMIT * MIB, 512 * MIB)
        del caught, error
    data = torch.zeros(320, MIB // 4)
    assert each_of(strategy, strategy.run(numel_in, args=(data[:8],))) == (8 * MIB // 4,) * len(names)
    with pytest.raises(sg.OutOfMemoryError, match=rf"GPU:\d.* 320 MiB.* its limit is {LIMIT} MiB"):
        strategy.run(numel_in, args=(data,))
    assert each_of(strategy, strategy.run(numel_of, args=(8,))) == (8 * MIB // 4,) * len(names)  # it lives on

    with pytest.raises(sg.OutOfMemoryError, match=rf"GPU:\d.* 381.5 MiB.* its limit is {LIMIT} MiB"):
        use_large_model(strategy)


def test_what_a_closed_strategy_made_does_not_count(inventory: Inventory) -> None:
    inventory.simulate("GPU", 1, memory_limit=LIMIT)
    with sg.OneDeviceStrategy("gpu:0") as first, sg.OneDeviceStrategy("gpu:0") as second:
        kept = [torch.ones(1)]
        first.run(lambda: kept.append(torch.ones(MIB // 4)))
        second.run(lambda: kept.append(torch.ones(MIB // 2)))
        assert sg.config.get_memory_info("gpu:0")["current"] == 3 * MIB
        first.close()
        assert sg.config.get_memory_info("gpu:0")["current"] == 2 * MIB
        assert [sg.device_of(each).name for each in kept] == ["/device:CPU:0", "/device:CPU:0", "/device:GPU:0"]
        with sg.device("/gpu:0"):
            placed = kept[1] + 1  # where its storage was marked before
            assert sg.device_of(placed).name == "/device:GPU:0"
        del placed
    assert _len_torch_function_stack() == 0
    assert kept[2].sum() == MIB // 2


def use_large_model(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(5000, 20000, bias=False)
    strategy.run(lambda: model(torch.ones(1, 5000)).sum())


@pytest.fixture
def mirrored(inventory: Inventory) -> Iterator[sg.MirroredStrategy]:
    inventory.simulate("GPU", 3)
    with sg.MirroredStrategy(TWO) as made:
        yield made
    sg.config.set_soft_device_placement(False)


def test_children_have_what_the_program_has_set(
    mirrored: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    with mirrored.scope():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> tuple[Any, ...]:
        context = sg.get_replica_context()
        assert context is not None
        print(f"hello from {context.replica_id_in_sync_group}")
        with sg.device("/gpu:1"):
            placed = x @ x
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        peak = sg.config.get_memory_info(sg.device_of(loss))["peak"]
        return sg.device_of(placed).name, sg.device_of(loss).name, peak, repr(sg.config.list_logical_devices("GPU"))

    def lacking() -> str:
        with sg.device("/gpu:7"):
            return sg.device_of(torch.ones(1)).name

    with sg.log_placement() as log:
        placed, found, peaks, devices = mirrored.run(step, args=(torch.ones(4, 4),))
    assert placed.values == ("/device:GPU:1",) * 2
    assert found.values == ("/device:GPU:0", "/device:GPU:1")
    assert all(peak >= 0 for peak in peaks.values)
    assert devices.values == (repr(sg.config.list_logical_devices("GPU")),) * 2
    mirrored.print("once")
    printed = capsys.readouterr().out
    assert sorted(printed.splitlines()) == ["[replica 0] hello from 0", "[replica 1] hello from 1", "once"]

    lines = [(each.replica, each.name, each.device, each.file == __file__) for each in log.records]
    for number, ahead in enumerate(("", "replica_1/")):
        own = f"/device:GPU:{number}"
        assert [line[1:] for line in lines if line[0] == number] == [
            (f"{ahead}MatMul", "/device:GPU:1", True),
            (f"{ahead}Linear", own, True),
            (f"{ahead}Sum", own, True),
            (f"{ahead}Backward", own, True),
        ]
    assert log.table()

    with pytest.raises(sg.errors.DeviceNotFoundError, match="GPU:7"):
        mirrored.run(lacking)
    sg.config.set_soft_device_placement(True)
    with pytest.warns(sg.errors.PlacementWarning, match="does not exist"):
        assert mirrored.run(lacking).values == ("/device:GPU:2",) * 2
    sg.config.set_log_device_placement(True)
    try:
        mirrored.run(lambda: torch.ones(2).sum())
    finally:
        sg.config.set_log_device_placement(False)
    printed = capsys.readouterr().out
    for number in range(2):
        assert f"[replica {number}] Sum: /job:localhost/replica:0/task:0/device:GPU:{number}\n" in printed


def test_each_thread_is_at_home_on_its_own_device(inventory: Inventory) -> None:
    inventory.simulate("GPU", 2, memory_limit=LIMIT)
    begun, ended = threading.Event(), threading.Event()
    found: dict[str, str] = {}

    def first() -> None:
        begun.wait(10)
        found["first"] = sg.device_of(torch.ones(1)).name

    def second() -> None:
        begun.set()
        ended.wait(10)  # the first leaves its device while the second is on its own
        found["second"] = sg.device_of(torch.ones(1)).name

    with sg.OneDeviceStrategy("gpu:0") as one, sg.OneDeviceStrategy("gpu:1") as other:
        threads = [threading.Thread(target=each.run, args=(step,)) for each, step in ((one, first), (other, second))]
        for thread in threads:
            thread.start()
        begun.wait(10)
        found["main"] = sg.device_of(torch.ones(1)).name
        threads[0].join()
        ended.set()
        threads[1].join()
        assert found == {"main": "/device:CPU:0", "first": "/device:GPU:0", "second": "/device:GPU:1"}
        assert sg.device_of(torch.ones(1)).name == "/device:CPU:0"
    assert _len_torch_function_stack() == 0


def test_replicas_are_in_no_scope_around_the_run(inventory: Inventory) -> None:
    inventory.simulate("GPU", 2, memory_limit=LIMIT)

    def step() -> tuple[str, str]:
        with sg.device("/gpu:1"):
            inner = sg.device_of(torch.ones(1)).name
        return sg.device_of(torch.ones(1)).name, inner

    with sg.MirroredStrategy(TWO) as mirrored, sg.OneDeviceStrategy("gpu:0") as one, sg.device("/cpu:0"):
        names, inner = mirrored.run(step)
        assert names.values == ("/device:GPU:0", "/device:GPU:1")
        assert inner.values == ("/device:GPU:1",) * 2
        with sg.device("/gpu:1"):
            assert one.run(step) == ("/device:GPU:0", "/device:GPU:1")
            assert sg.device_of(torch.ones(1)).name == "/device:GPU:1"
            assert sg.get_strategy().run(step)[0] == "/device:GPU:1"  # no strategy changes nothing
        assert sg.device_of(torch.ones(1)).name == "/device:CPU:0"


def test_variables_that_are_returned_stay_on_the_device(inventory: Inventory) -> None:
    inventory.simulate("GPU", 1, memory_limit=LIMIT)
    with sg.OneDeviceStrategy("gpu:0") as one:
        with one.scope():
            model = nn.Linear(256, 256)
        used = sg.config.get_memory_info("gpu:0")["current"]
        state, made = one.run(lambda: (model.state_dict(), torch.ones(4)))
        assert sg.config.get_memory_info("gpu:0")["current"] == used > 0
        names = [sg.device_of(each).name for each in (state["weight"], model.weight, made)]
        assert names == ["/device:GPU:0", "/device:GPU:0", "/device:CPU:0"]


def test_log_has_what_asynchronous_workers_do(inventory: Inventory) -> None:
    inventory.simulate("GPU", 2)
    with sg.ParameterServerStrategy(devices=TWO) as strategy:
        with strategy.scope():
            model = nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> str:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            return sg.device_of(loss).name

        coordinator, x = sg.ClusterCoordinator(strategy), torch.ones(4, 4)
        with sg.log_placement() as log:
            found = coordinator.fetch([coordinator.schedule(step, args=(x,)) for _ in range(2)])
            late = coordinator.schedule(step, args=(x,))
        coordinator.schedule(step, args=(x,)).fetch()
        found.append(late.fetch())  # belongs to the block, whenever it is done
    lines = [(each.operation, each.device, each.file == __file__) for each in log.records]
    assert sorted(lines) == sorted((what, device, True) for device in found for what in ("Linear", "Sum", "Backward"))
    assert {each.name.partition("/")[0] for each in log.records} == {f"replica_{each[-1]}" for each in found}


def test_what_a_step_returns_is_the_programs_and_what_it_only_keeps_is_counted(inventory: Inventory) -> None:
    inventory.simulate("GPU", 1, memory_limit=LIMIT)
    kept: list[torch.Tensor] = []

    def used(num_mib: int, *, returns: bool) -> int:
        def step() -> torch.Tensor | None:
            kept.append(torch.ones(num_mib * MIB // 4))
            return kept[-1] if returns else None

        before = sg.config.get_memory_info("gpu:0")["current"]
        strategy.run(step)
        return round((sg.config.get_memory_info("gpu:0")["current"] - before) / MIB)

    with sg.OneDeviceStrategy("gpu:0") as strategy:
        assert used(8, returns=False) == 8
        assert used(8, returns=True) == 0  # it may be anywhere in the program from here on
        assert [sg.device_of(each).name for each in kept] == ["/device:GPU:0", "/device:CPU:0"]
        with pytest.raises(sg.OutOfMemoryError, match=f"its limit is {LIMIT} MiB"):
            used(LIMIT - 4, returns=True)  # while the step runs it counts
        kept.clear()
        assert used(LIMIT - 4, returns=True) == 0
        kept.clear()
