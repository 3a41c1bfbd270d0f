"""TensorFlow's guide "Use a GPU", and what notes on it tell people to try; the products are the guide's."""

import gc
import inspect
from collections.abc import Callable, Iterator

import pytest
import torch

import stratagem as sg
from stratagem.devices.device import MIB
from stratagem.devices.inventory import Inventory
from stratagem.errors import DeviceNotFoundError, DevicesInUseError

A, B = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
PRODUCT = [[22.0, 28.0], [49.0, 64.0]]
GPU = "/job:localhost/replica:0/task:0/device:GPU:"
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture(autouse=True)
def three_gpus(inventory: Inventory) -> Iterator[None]:
    inventory.simulate("GPU", 3, memory_limit=64)
    yield
    sg.config.set_log_device_placement(False)
    sg.config.set_soft_device_placement(False)
    gc.collect()


def overview() -> None:
    assert len(sg.config.list_physical_devices("GPU")) == 3
    assert sg.config.list_physical_devices("TPU") == []


def logging_device_placement(printed: Callable[[], str]) -> None:
    sg.config.set_log_device_placement(True)
    with sg.device("/GPU:0"):
        a, b = torch.tensor(A), torch.tensor(B)
        c = a @ b
    assert c.tolist() == PRODUCT
    assert f"MatMul: {GPU}0" in printed()


def manual_device_placement(printed: Callable[[], str]) -> None:
    sg.config.set_log_device_placement(True)
    with sg.device("/CPU:0"):
        a, b = torch.tensor(A), torch.tensor(B)
    with sg.device("/GPU:1"):
        c = a @ b
    assert c.tolist() == PRODUCT
    lines = printed()
    assert f"Const: {CPU}" in lines
    assert f"MatMul: {GPU}1" in lines


def limiting_to_the_first_gpu() -> None:
    gpus = sg.config.list_physical_devices("GPU")
    sg.config.set_visible_devices(gpus[0], "GPU")
    assert [len(gpus), len(sg.config.list_logical_devices("GPU"))] == [3, 1]


def growth_cannot_be_set_once_devices_are_used() -> None:
    for gpu in sg.config.list_physical_devices("GPU"):
        sg.config.set_memory_growth(gpu, True)
    with sg.device("/gpu:0"), pytest.raises(DevicesInUseError):
        sg.config.set_memory_growth("/physical_device:GPU:0", False)


def one_gig_of_the_first_gpu_and_no_more() -> None:
    limit = sg.config.LogicalDeviceConfiguration(memory_limit=32)
    sg.config.set_logical_device_configuration("/physical_device:GPU:0", [limit])
    strategy = sg.OneDeviceStrategy("/gpu:0")
    assert int(strategy.run(lambda: torch.ones(16 * MIB // 4).numel())) == 4 * MIB
    with pytest.raises(sg.OutOfMemoryError, match=r"/device:GPU:0.* 48 MiB.* its limit is 32 MiB"):
        strategy.run(lambda: torch.ones(48 * MIB // 4))
    strategy.close()


def a_gpu_that_is_missing_is_an_error_and_then_a_fallback() -> None:
    with pytest.raises(DeviceNotFoundError, match="GPU:5"), sg.device("/device:GPU:5"):
        torch.tensor(A)
    sg.config.set_soft_device_placement(True)
    with pytest.warns(sg.errors.PlacementWarning), sg.device("/device:GPU:5"):
        assert (torch.tensor(A) @ torch.tensor(B)).tolist() == PRODUCT


def virtual_gpus_compute_one_after_the_other() -> None:
    parts = [sg.config.LogicalDeviceConfiguration(memory_limit=32)] * 2
    sg.config.set_visible_devices("/physical_device:GPU:0", "GPU")
    sg.config.set_logical_device_configuration("/physical_device:GPU:0", parts)
    gpus = sg.config.list_logical_devices("GPU")
    assert [gpu.name for gpu in gpus] == ["/device:GPU:0", "/device:GPU:1"]
    products = []
    for gpu in gpus:
        with sg.device(gpu.name):
            products.append(torch.tensor(A) @ torch.tensor(B))
    with sg.device("/CPU:0"):
        total = torch.stack(products).sum(0)
    assert total.tolist() == [[44.0, 56.0], [98.0, 128.0]]
    assert sg.device_of(total).name == "/device:CPU:0"


def variables_on_three_gpus_with_a_session(printed: Callable[[], str]) -> None:
    with sg.Graph() as graph:
        products = []
        for number, name in enumerate(("/gpu:0", "/gpu:1", "/gpu:2")):
            with sg.device(name):
                a = sg.get_variable(f"a_{number}", initializer=torch.tensor(A))
                b = sg.get_variable(f"b_{number}", initializer=torch.tensor(B))
                products.append(a @ b)
        with sg.device("/cpu:0"):
            total = sg.add_n(products)
        init = sg.global_variables_initializer()
    with sg.Session(graph, config=sg.SessionConfig(log_device_placement=True)) as session:
        session.run(init)
        assert session.run(total).tolist() == [[66.0, 84.0], [147.0, 192.0]]
    lines = printed()
    assert all(f"{GPU}{number}" in lines for number in range(3))


PROGRAMS: list[Callable[..., None]] = [
    overview,
    logging_device_placement,
    manual_device_placement,
    limiting_to_the_first_gpu,
    growth_cannot_be_set_once_devices_are_used,
    one_gig_of_the_first_gpu_and_no_more,
    a_gpu_that_is_missing_is_an_error_and_then_a_fallback,
    virtual_gpus_compute_one_after_the_other,
    variables_on_three_gpus_with_a_session,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_program(program: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    takes_output = bool(inspect.signature(program).parameters)
    program(*([lambda: "".join(capfd.readouterr())] if takes_output else []))
