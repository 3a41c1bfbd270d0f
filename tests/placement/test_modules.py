"""Moving models, and parts of them, to devices."""

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import DeviceConfigurationError, DeviceNotFoundError, DeviceTypeError, PlacementError
from tests.placement.conftest import where

pytestmark = pytest.mark.usefixtures("gpus")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.decoder = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x).relu()) * self.scale


def devices_of(model: nn.Module) -> dict[str, str]:
    return {name: where(tensor) for name, tensor in model.state_dict().items()}


def test_parts_move_and_the_longest_name_wins() -> None:
    model = Net()
    expected = model(torch.ones(3, 4)).detach()
    parameters = list(model.parameters())
    placed = sg.place(model, {"encoder": "/gpu:0", "encoder.1": "/gpu:2", "decoder": "/gpu:1", "decoder.bias": "gpu:3"})
    assert placed is model
    found = devices_of(model)
    assert found["encoder.0.weight"] == "GPU:0"
    assert found["encoder.1.weight"] == found["encoder.1.running_mean"] == "GPU:2"
    assert (found["decoder.weight"], found["decoder.bias"], found["scale"]) == ("GPU:1", "GPU:3", "CPU:0")
    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    result = model(torch.ones(3, 4))
    assert where(result) == "GPU:1"
    torch.testing.assert_close(result.detach(), expected)


def test_whole_model_moves_with_its_gradients_and_back() -> None:
    model = Net()
    model(torch.ones(3, 4)).sum().backward()
    sg.place(model, "/gpu:1")
    assert set(devices_of(model).values()) == {"GPU:1"}
    assert {where(parameter.grad) for parameter in model.parameters()} == {"GPU:1"}
    sg.place(model, "/cpu:0")
    assert set(devices_of(model).values()) == {"CPU:0"}
    assert torch.overrides._len_torch_function_stack() == 0


def test_place_refuses_parts_devices_and_things_that_do_not_exist() -> None:
    model = Net()
    with pytest.raises(PlacementError, match=r"no part 'encodr' \(did you mean 'encoder'\?\); its parts are 'encoder'"):
        sg.place(model, {"encodr": "/gpu:0"})
    with pytest.raises(DeviceNotFoundError, match="'/device:GPU:9' does not exist"):
        sg.place(model, {"encoder": "/gpu:0", "decoder": "/gpu:9"})
    with pytest.raises(DeviceTypeError, match="place takes a torch module, got Tensor"):
        sg.place(torch.ones(2), "/gpu:0")  # type: ignore[type-var]
    assert set(devices_of(model).values()) == {"CPU:0"}


def test_shared_parameter_is_in_one_place() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    with pytest.raises(
        PlacementError, match=r"'a.weight' and 'b.weight' are one tensor .* /device:GPU:0 and /device:GPU:1"
    ):
        sg.place(model, {"a": "/gpu:0", "b": "/gpu:1"})
    sg.place(model, "/gpu:1")
    assert set(devices_of(model).values()) == {"GPU:1"}


def test_layers_of_keras_are_known_by_name() -> None:
    keras = pytest.importorskip("keras")
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(8, name="encoder"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(2, name="decoder"),
        ]
    )
    expected = model(torch.ones(3, 4)).detach()
    sg.place(model, {"encoder": "/gpu:0", "norm": "/gpu:1", "decoder": "/gpu:1", "decoder/bias": "/gpu:2"})
    found = {"/".join(each.path.split("/")[-2:]): where(each.value) for each in model.variables}
    assert (found["encoder/kernel"], found["norm/moving_mean"]) == ("GPU:0", "GPU:1")
    assert (found["decoder/kernel"], found["decoder/bias"]) == ("GPU:1", "GPU:2")
    result = model(torch.ones(3, 4))
    assert where(result) == "GPU:2"  # Keras adds the bias by itself, where that is
    assert torch.equal(result.cpu(), expected)
    with pytest.raises(
        PlacementError, match=r"no part 'decodr' .did you mean 'decoder'.*; its parts are 'encoder', 'norm'"
    ):
        sg.place(model, {"decodr": "/gpu:0"})
    sg.place(model, "/cpu:0")
    assert {where(each.value) for each in model.variables} == {"CPU:0"}


def test_variables_are_spread_by_their_size() -> None:
    spread = sg.spread_variables(["/gpu:0", "/gpu:1"])
    with sg.device(spread):
        first = nn.Linear(4, 8)  # weight to one, bias to the other, which takes the next weight, too
        second = nn.Linear(8, 2)
    assert [where(each) for each in (first.weight, first.bias, second.weight, second.bias)] == [
        *("GPU:0", "GPU:1", "GPU:1", "GPU:1")
    ]
    assert sorted(spread.num_bytes.values()) == [104, 128]
    second(first(torch.ones(3, 4))).sum().backward()
    with sg.Graph() as graph, sg.device(sg.spread_variables(["/job:ps/task:0", "/job:ps/task:1"])):
        for name, size in (("a", 4), ("b", 1), ("c", 2)):
            sg.get_variable(name, [size])
    assert [str(node.spec) for node in graph.variables] == ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:1"]
    for wrong in ([], ["/gpu:0", "cuda:0"], [None]):
        with pytest.raises((DeviceConfigurationError, DeviceTypeError)):
            sg.spread_variables(wrong)
