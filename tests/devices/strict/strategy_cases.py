"""What strategies do on GPUs beyond their contract, on strict devices; see `in_a_program`."""

import contextlib
import copy
import gc
import threading

import pytest
import torch
import torch.distributed
from torch import nn

import stratagem as sg
from stratagem.devices.strict.counts import counted

LIMIT = 512  # MiB


def prepare() -> None:
    """Replicas are in the order of the list, which is not that of the devices."""
    sg.config.simulate_devices("GPU", 3, memory_limit=LIMIT, strict=True)
    torch.set_num_threads(1)
    for make in (
        lambda: sg.OneDeviceStrategy("gpu:2"),
        lambda: sg.MirroredStrategy(["gpu:2", "gpu:0"]),
        lambda: sg.CentralStorageStrategy(["gpu:2", "gpu:0"]),
    ):
        STRATEGIES.append(_open.enter_context(make()))


def finish() -> None:
    _open.close()


STRATEGIES: list[sg.Strategy] = []
_open = contextlib.ExitStack()


def case_step_is_on_the_device_of_its_replica() -> None:
    def look(given: torch.Tensor) -> tuple[str, str, int, str]:
        weight = model(given)
        return (
            str(given.device),
            str(weight.device),
            torch.accelerator.current_device_index(),
            str(given.cpu().gpu().device),
        )

    for strategy in STRATEGIES:
        with strategy.scope():
            model = nn.Linear(2, 2)
        expected = [str(device.torch_device) for device in strategy.devices]
        found = strategy.local_results(strategy.run(look, args=(torch.ones(4, 2),)))
        assert list(found) == [(each, each, int(each[-1]), each) for each in expected]
        assert torch.accelerator.current_device_index() == 0


def case_model_of_before_the_scope_comes_to_the_device() -> None:
    for strategy in STRATEGIES:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        strategy.adopt(model, optimizer)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        strategy.run(step, args=(torch.ones(4, 2),))
        places = {str(each.device) for each in (*model.parameters(), *model.buffers())}
        assert places == {str(strategy.devices[0].torch_device)}


def case_variables_are_on_the_device_when_the_scope_closes() -> None:
    """What a program keeps of a model before its first run fits what the model is afterwards."""

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for strategy in STRATEGIES:
        with strategy.scope():
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            for each in model.parameters():
                each.grad = torch.zeros_like(each)
            lazy, later = nn.LazyLinear(2, device="cpu"), nn.Linear(2, 2, device="meta")
            optimizer = torch.optim.Adagrad(model.parameters(), 0.1)  # it has state from the beginning
        assert (lazy.weight.device.type, later.weight.device.type) == ("cpu", "meta")  # they have no memory yet
        del lazy, later
        gc.collect()  # a lazy module holds itself
        device = strategy.device
        kept = [*model.parameters(), *model.buffers()]
        assert {each.device for each in kept} == {device}
        assert {each.grad.device for each in model.parameters()} == {device}
        assert all(torch.nn.parameter.Parameter is type(each) for each in model.parameters())
        shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        ahead = copy.deepcopy(model)
        assert model.eval()(torch.ones(4, 2).to(device)).device == device
        model.train()
        strategy.run(step, args=(torch.rand(4, 2),))
        assert all(now is before for now, before in zip([*model.parameters(), *model.buffers()], kept, strict=True))
        for name, each in model.named_parameters():
            shadow[name].lerp_(each.detach(), 0.5)
        assert {str(each.device) for each in (*shadow.values(), *ahead.parameters())} == {str(device)}


def case_model_of_before_the_scope_is_on_the_device_once_it_is_adopted() -> None:
    for strategy in STRATEGIES:
        model = nn.Linear(2, 2)
        strategy.adopt(model)
        assert {each.device for each in model.parameters()} == {strategy.device}


def case_scope_that_fails_moves_nothing() -> None:
    _, strategy, _ = STRATEGIES
    with contextlib.suppress(KeyError), strategy.scope():
        model = nn.Linear(2, 2)
        raise KeyError
    assert model.weight.device.type == "cpu"


def case_variables_of_a_parameter_server_stay_on_the_host() -> None:
    with sg.ParameterServerStrategy(devices=["gpu:2", "gpu:0"]) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 2)
        assert model.weight.device.type == "cpu"
        strategy.run(lambda x: model(x).sum().backward(), args=(torch.ones(4, 2),))
        assert model.weight.device.type == "cpu"


def case_results_come_to_the_program() -> None:
    for strategy in STRATEGIES:
        with strategy.scope():
            model = nn.Linear(2, 2)
        results = strategy.run(lambda x, model=model: {"made": model(x).detach()}, args=(torch.ones(4, 2),))
        assert {each["made"].device.type for each in strategy.local_results(results)} == {"cpu"}


def case_step_that_forgets_a_device_fails_as_on_a_gpu() -> None:
    for strategy in STRATEGIES:
        with strategy.scope():
            model = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            strategy.run(lambda x, model=model: model(x) + torch.ones(2, device="cpu"), args=(torch.ones(4, 2),))


def case_memory_limit_of_a_replica_holds() -> None:
    for strategy in STRATEGIES:
        device = strategy.devices[-1]

        def take(device: str = str(device.torch_device)) -> int:
            own = f"gpu:{torch.accelerator.current_device_index()}"
            return torch.empty(2**28, device="gpu").numel() if own == device else 0

        with pytest.raises(sg.OutOfMemoryError, match=f"/device:GPU:{device.index}.*limit of 512 MiB"):
            strategy.run(take)
        assert all(each == 0 for each in strategy.local_results(strategy.run(lambda: 0)))


def case_gradients_are_summed_beside_the_backward_pass() -> None:
    def step(x: torch.Tensor) -> list[str]:
        with counted() as counts:
            optimizer.zero_grad()
            model(x).sum().backward()
        optimizer.step()
        return [entry.name for entry in counts.order]

    _, strategy, _ = STRATEGIES
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(800, 800) for _ in range(12)))
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
    x = torch.ones(2, 800)
    strategy.run(step, args=(x,))
    for names in strategy.local_results(strategy.run(step, args=(x,))):
        sums = [number for number, name in enumerate(names) if name == "allreduce"]
        last = max(number for number, name in enumerate(names) if name == "mm")
        assert len(sums) > 1
        assert sums[0] < last  # the first sum has begun before the pass has come to its end


def case_hooks_in_replicas_run_in_another_thread_than_the_step() -> None:
    def step(x: torch.Tensor) -> bool:
        inside: list[int] = []
        result = model(x)
        result.register_hook(lambda grad: inside.append(threading.get_ident()))
        result.sum().backward()
        return inside != [] and threading.get_ident() not in inside

    for strategy in STRATEGIES:
        with strategy.scope():
            model = nn.Linear(2, 2)
        assert set(strategy.local_results(strategy.run(step, args=(torch.ones(4, 2),)))) == {True}


def case_tensors_on_devices_travel_to_replicas() -> None:
    shift = torch.full((2,), 3.0, device="gpu:0")
    for strategy in STRATEGIES:
        results = strategy.run(lambda x: (x.cpu() + shift.cpu()).sum(), args=(torch.ones(4, 2, device="gpu:1"),))
        assert [float(each) for each in strategy.local_results(results)] == [32] * strategy.num_replicas_in_sync


def case_dropout_draws_what_one_device_draws_in_replica_0() -> None:
    torch.manual_seed(3)
    expected = nn.functional.dropout(torch.ones(8))
    _, strategy, _ = STRATEGIES
    torch.manual_seed(3)
    first, second = strategy.local_results(strategy.run(nn.functional.dropout, args=(torch.ones(8),)))
    assert torch.equal(first, expected)
    assert not torch.equal(first, second)


def case_torch_distributed_has_a_backend_for_them() -> None:
    torch.distributed.init_process_group("strict", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.full((3,), 2.0, device="gpu:1")
        torch.distributed.all_reduce(tensor)
        torch.distributed.broadcast(tensor, 0)
        gathered = [torch.empty(3, device="gpu:1")]
        torch.distributed.all_gather(gathered, tensor)
        torch.distributed.barrier()
        assert gathered[0].tolist() == [2, 2, 2]
    finally:
        torch.distributed.destroy_process_group()


def case_autocast_of_the_program_reaches_all_replicas() -> None:
    for strategy in STRATEGIES:
        with strategy.scope():
            model = nn.Linear(2, 2)
        with torch.autocast("gpu", dtype=torch.bfloat16):
            results = strategy.run(lambda x, model=model: str(model(x).dtype), args=(torch.ones(4, 2),))
        assert set(strategy.local_results(results)) == {"torch.bfloat16"}


def case_scopes_place_and_copy() -> None:
    host = torch.ones(2)
    with sg.device("/gpu:1"):
        made = torch.zeros(2)
        total = made + host
    assert (str(made.device), str(total.device)) == ("gpu:1", "gpu:1")
    with sg.device("/cpu:0"):
        assert (total + 1).device.type == "cpu"
    model = sg.place(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), {"0": "/gpu:0", "1": "/gpu:1"})
    assert [str(each.device) for each in model.parameters()] == ["gpu:0", "gpu:0", "gpu:1", "gpu:1"]
    model(torch.ones(4, 2)).sum().backward()
    assert [str(each.grad.device) for each in model.parameters()] == ["gpu:0", "gpu:0", "gpu:1", "gpu:1"]


def case_what_nobody_has_placed_mixes_as_in_torch_beside_what_was_placed() -> None:
    host, made = torch.ones(2), torch.ones(2, device="gpu:0")
    with sg.device("/gpu:1"):
        placed = torch.zeros(2)
    for mix in (
        lambda: made + host,
        lambda: made * 2 + host,
        lambda: made.clone().add_(host),
        lambda: torch.cat([made, torch.ones(2, device="gpu:1")]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()
    assert str((placed + host).device) == "gpu:1"  # what a scope has placed is followed
    assert (made[torch.tensor([0])] + made.sum() * 2.0).tolist() == [5.0]
    with sg.log_placement() as log, pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        host + made
    assert not log.records
