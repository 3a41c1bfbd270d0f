"""Where eager operations run, what is copied for them, and that the numbers stay the same."""

import copy
import io
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices.device import LogicalDeviceConfiguration
from stratagem.devices.inventory import Inventory
from stratagem.errors import DevicesInUseError, DeviceTypeError, PlacementError
from tests.placement.conftest import where

pytestmark = pytest.mark.usefixtures("gpus")


def test_what_is_made_and_computed_in_a_scope_is_on_its_device() -> None:
    x = torch.ones(2, 3)
    with sg.device("/gpu:1"):
        made = torch.zeros(3, 2)
        product = x @ made
        several = torch.max(product, dim=0)
    assert where(x) == "CPU:0"
    assert [where(each) for each in (made, product, *several)] == ["GPU:1"] * 4


def test_without_a_scope_an_operation_runs_where_its_inputs_are() -> None:
    with sg.device("/gpu:2"):
        x = torch.ones(2)
    assert where(x + 1) == "GPU:2"
    assert where(x.view(1, 2).sum()) == "GPU:2"
    assert where(torch.ones(2) * x) == "GPU:2"
    assert where(torch.zeros_like(x)) == "GPU:2"
    assert where(torch.ones(2) + 1) == "CPU:0"


def test_inputs_are_copied_and_gradients_come_back() -> None:
    weight = torch.ones(3, requires_grad=True)
    with sg.device("/gpu:0"):
        half = weight * 2
    with sg.device("/gpu:1"):
        loss = (half * torch.tensor([1.0, 2.0, 3.0])).sum()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 4, 6]
    assert [where(each) for each in (half, loss, weight.grad)] == ["GPU:0", "GPU:1", "CPU:0"]


def test_copy_is_a_tensor_of_its_own() -> None:
    x = torch.ones(2)
    with sg.device("/gpu:0"):
        copied = x.contiguous()
        copied += 1
    assert x.tolist() == [1, 1]
    assert where(copied) == "GPU:0"


def test_views_and_indices_stay_with_their_tensor() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with sg.device("/gpu:1"):
        row = x[1]
        doubled = row * 2
        picked = doubled[torch.tensor([0, 2])]
    assert [where(each) for each in (row, doubled, picked)] == ["CPU:0", "GPU:1", "GPU:1"]
    assert row.data_ptr() == x[1].data_ptr()
    assert picked.tolist() == [6, 10]


def test_moves_that_the_program_asks_for() -> None:
    with sg.device("/gpu:1"):
        x = torch.ones(2)
        assert where(x.double()) == "GPU:1"
        assert where(x.to(x.device)) == "GPU:1"  # torch has one name for all of these
        assert where(x.cpu()) == "CPU:0"
        assert where(torch.as_tensor(np.ones(2))) == "GPU:1"
        assert where(torch.zeros(2, device="cpu")) == "GPU:1"
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert x.tolist() == [1, 1]
    with sg.device("/gpu:2"):
        y = torch.zeros(2)
    assert where(x.to(y)) == "GPU:2"


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> list[float]:
    losses = []
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    return first, nn.Linear(16, 3)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop"])
def test_layers_built_in_different_scopes_train_as_one(optimizer: str) -> None:
    plain = nn.Sequential(*make_layers())
    expected = train(plain, getattr(torch.optim, optimizer)(plain.parameters(), lr=0.1))
    first, second = make_layers()
    model = nn.Sequential(sg.place(first, "/gpu:0"), sg.place(second, "/gpu:1"))
    placed = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    # torch adds up the norms of the gradients device by device, in an order of its own.
    assert train(model, placed) == pytest.approx(expected, rel=1e-6)
    assert where(model(torch.ones(2, 8))) == "GPU:1"
    for part, device in ((first, "GPU:0"), (second, "GPU:1")):
        for parameter in part.parameters():
            assert where(parameter) == where(parameter.grad) == device
            states = [each for each in placed.state[parameter].values() if torch.is_tensor(each) and each.dim()]
            assert {where(each) for each in states} <= {device}


def test_training_inside_a_scope_equals_plain_torch() -> None:
    plain = nn.Sequential(*make_layers())
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    with sg.device("/gpu:3"):
        model = nn.Sequential(*make_layers())
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert losses == expected
    assert {where(parameter) for parameter in model.parameters()} == {"GPU:3"}


def test_model_of_another_device_in_a_scope_keeps_its_weights_and_statistics_there() -> None:
    plain = nn.Sequential(*make_layers())
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    model = sg.place(nn.Sequential(*make_layers()), "/gpu:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with sg.device("/gpu:1"):
        losses = train(model, optimizer)
        assert where(model(torch.ones(2, 8))) == "GPU:1"
    assert losses == expected
    kept = [*model.state_dict().values(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    assert {where(each) for each in kept} == {"GPU:0"}
    plain(torch.ones(2, 8))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("make", [nn.BatchNorm1d, lambda size: nn.InstanceNorm1d(size, track_running_stats=True)])
def test_statistics_are_updated_where_they_are_and_nothing_else_is_written(make: Callable[[int], nn.Module]) -> None:
    plain, x = make(3), torch.randn(4, 3, 5)
    placed = sg.place(copy.deepcopy(plain), "/gpu:0")
    version = x._version
    with sg.device("/gpu:1"):
        result = placed(x)
    assert x._version == version
    assert torch.equal(result, plain(x))
    assert torch.equal(placed.running_mean, plain.running_mean)
    assert where(placed.running_var) == "GPU:0"


def test_function_places_by_operation() -> None:
    with sg.device(lambda operation: "/gpu:2" if operation.type == "MatMul" else "/gpu:1"):
        x = torch.ones(2, 2)
        product = x @ x
        total = product + 1
    assert [where(each) for each in (x, product, total)] == ["GPU:1", "GPU:2", "GPU:1"]


def test_closure_of_an_optimizer_is_in_the_scope_and_its_update_is_not() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=2)
    seen = set()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        seen.add(where(loss))
        loss.backward()
        return loss

    with sg.device("/gpu:1"):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert seen == {"GPU:1"}
    assert where(weight) == "CPU:0"


def test_step_that_fails_leaves_the_scope_as_it_was() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    with sg.device("/gpu:1"):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        with torch.no_grad():
            assert where(torch.ones(2) + 1) == "GPU:1"


def test_copies_of_models_are_where_the_models_are() -> None:
    model = sg.place(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"0": "/gpu:0", "1": "/gpu:1"})
    twin = copy.deepcopy(model)
    assert [where(each) for each in twin.parameters()] == ["GPU:0", "GPU:0", "GPU:1", "GPU:1"]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    assert [where(each) for each in twin.parameters()] == ["GPU:0", "GPU:0", "GPU:1", "GPU:1"]


def test_recurrent_sparse_and_recomputed_operations_are_placed() -> None:
    with sg.device("/gpu:1"):
        lstm = nn.LSTM(3, 4, batch_first=True)
        sparse = torch.eye(3).to_sparse()
    output, (hidden, _) = lstm(torch.ones(2, 5, 3))
    assert where(output) == where(hidden) == where(sparse) == where(sparse @ torch.ones(3, 1)) == "GPU:1"
    layer = sg.place(nn.Linear(3, 3), "/gpu:2")
    torch.utils.checkpoint.checkpoint(layer, torch.ones(1, 3), use_reentrant=False).sum().backward()
    assert where(layer.weight.grad) == "GPU:2"
    gradient = torch.autograd.grad(layer(torch.ones(1, 3)).sum(), [layer.weight])[0]
    assert where(gradient) == "GPU:2"


def test_scope_lives_together_with_torchs_own_device_contexts() -> None:
    with torch.device("cpu"), sg.device("/gpu:1"):
        with torch.device("cpu"):
            assert where(torch.ones(2)) == "GPU:1"
        assert where(torch.ones(2)) == "GPU:1"
    with sg.device("/gpu:1"), torch.device("meta"):
        assert torch.ones(2).device.type == "meta"


def test_thread_places_once_it_has_entered_a_scope() -> None:
    model = sg.place(nn.Linear(2, 2), "/gpu:1")
    seen = []

    def other() -> None:
        with sg.device("/gpu:2"):
            seen.append(where(torch.ones(2)))
        seen.append(where(model(torch.ones(1, 2))))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["GPU:2", "GPU:1"]


def test_shares_of_the_cpu_are_devices_too() -> None:
    fresh = sg.devices.this_process()
    fresh.configure("cpu:0", [LogicalDeviceConfiguration()] * 2)
    with sg.device("/cpu:1"):
        x = torch.ones(2)
    assert where(x) == "CPU:1"
    with sg.device("/cpu:0"):
        assert where(x + 1) == "CPU:0"


def test_configuration_is_frozen_while_tensors_are_on_devices(inventory: Inventory) -> None:
    sg.config.set_log_device_placement(True)  # does not freeze it: programs do this first
    inventory.simulate("GPU", 2)
    sg.config.set_log_device_placement(False)
    with sg.device("/gpu:1"):
        x = torch.ones(2)
    with pytest.raises(DevicesInUseError, match=r"sg.device\(\) at .*test_eager.py"):
        inventory.simulate("GPU", 4)
    del x
    inventory.simulate("GPU", 4)


def test_in_place_change_across_devices_is_refused() -> None:
    x = torch.ones(2)
    with sg.device("/gpu:1"):
        with pytest.raises(PlacementError, match=r"'add_' changes a tensor on /device:CPU:0 .* for /device:GPU:1"):
            x += 1
        with pytest.raises(PlacementError, match="'add' changes"):
            torch.add(torch.ones(2), 1, out=x)
        with torch.no_grad():
            x -= torch.ones(2)  # an update by hand
        with sg.device(None):
            x += 1
    assert x.tolist() == [1, 1]
    assert where(x) == "CPU:0"


def test_device_of_refuses_what_is_no_tensor() -> None:
    with pytest.raises(DeviceTypeError, match="got Linear; for a module, ask its parameters"):
        sg.device_of(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_without_scope_or_log_torch_is_untouched() -> None:
    with sg.device("/gpu:1"):
        x = torch.ones(2)
    assert torch.overrides._len_torch_function_stack() == 1
    del x
    assert torch.overrides._len_torch_function_stack() == 0
    with sg.device("/cpu:0"):
        y = torch.ones(2)
    assert torch.overrides._len_torch_function_stack() == 0
    assert where(y) == "CPU:0"
