"""Every kind of device is one row of a table, and a kind that only torch knows of needs none."""

import contextlib

import pytest
import torch

import stratagem as sg
from stratagem.devices import kind_table
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.inventory import Inventory
from stratagem.errors import DeviceConfigurationError, DeviceError, DeviceNotFoundError
from stratagem.placement.torch_functions import FunctionKind, kind_of
from tests.cluster import nursery
from tests.fakes import FakeTorchCuda


def test_table_has_every_kind_once() -> None:
    assert kind_table.names()[:6] == ("CPU", "GPU", "TPU", "XPU", "HPU", "MPS")
    spellings = [spelling for row in kind_table.rows() for spelling in row.spellings]
    assert len(spellings) == len(set(spellings))
    assert kind_table.by_preference()[-1] == "CPU"
    assert all(row.spellings[0].upper() == row.name for row in kind_table.rows())


@pytest.mark.parametrize("kind", kind_table.names()[1:])
def test_every_kind_answers_on_any_machine(inventory: Inventory, kind: str) -> None:
    found = kind_table.accelerator_of(kind)
    assert found is not None
    assert found.kind == kind
    assert len(sg.config.list_physical_devices(kind)) == found.count()
    assert kind_table.row_of(kind).torch_type == found.torch_type


@pytest.mark.parametrize(
    ("kind", "why"),
    [("TPU", "through torch_tpu or torch_xla, and neither is installed"), ("HPU", "through habana_frameworks")],
)
def test_missing_package_is_named(inventory: Inventory, kind: str, why: str) -> None:
    if inventory.physical(kind):
        pytest.skip(f"this machine has a {kind}")
    with pytest.raises(DeviceNotFoundError, match=f"this machine has no visible {kind}. .*{why}"):
        inventory.resolve(f"{kind.lower()}:0")


def test_methods_of_tensors_that_copy_to_an_accelerator_are_known() -> None:
    for function in (torch.Tensor.cuda, torch.Tensor.xpu):
        assert kind_of(function) is FunctionKind.TO_ACCELERATOR
    assert kind_of(torch.Tensor.sum) is FunctionKind.COMPUTE


def test_torch_knows_the_types_that_have_mixed_precision() -> None:
    assert {"cpu", "cuda", "xpu", "mps", "hpu"} <= set(kind_table.autocast_types())
    for each in kind_table.autocast_types():
        torch.is_autocast_enabled(each)


class _Bare:
    """A vendor's module that has next to nothing, as that of TPUs."""

    def device_count(self) -> int:
        return 2

    def device(self, index: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_accelerator_that_torch_cannot_limit_is_not_divided() -> None:
    bare = TorchAccelerator("TPU", "meta", _Bare(), limit_call=None)
    inventory = Inventory(accelerators=[bare])
    part = sg.config.LogicalDeviceConfiguration
    for parts in ([part(memory_limit=64)], [part(), part()], [part(memory_fraction=0.5)]):
        with pytest.raises(DeviceConfigurationError, match=r"memory of a TPU cannot be limited.*use the device whole"):
            inventory.configure("tpu:0", parts)
    inventory.configure("tpu:0", [part()])
    with pytest.raises(DeviceConfigurationError, match="memory of a TPU cannot be limited"):
        bare.limit_memory(0, 0.5)
    with pytest.raises(DeviceConfigurationError, match="torch does not tell how much is free"):
        bare.reserve(0, None)
    with pytest.raises(DeviceError, match="torch does not tell how much memory is in use on meta:0"):
        bare.memory_info(0)
    assert bare.memory_fraction(0) == 1
    assert (bare.details(0).device_name, bare.details(0).total_memory_bytes) == ("TPU", 0)
    assert [each.name for each in inventory.logical("TPU")] == ["/device:TPU:0", "/device:TPU:1"]


def test_module_after_the_model_of_cuda_has_limits() -> None:
    fake = FakeTorchCuda(1)
    own = TorchAccelerator("GPU", "meta", fake)
    assert own.limits_memory
    own.limit_memory(0, 0.5)
    assert own.memory_fraction(0) == 0.5


def test_kinds_have_their_backends_of_torch_distributed() -> None:
    backends = {row.name: row.group.name for row in kind_table.rows() if row.group is not None}
    assert backends == {"GPU": "nccl", "TPU": "tpu_dist", "XPU": "xccl", "HPU": "hccl"}
    assert kind_table.of_torch_type("meta") is None


def test_out_of_memory_is_named_where_torch_does_not_tell_what_is_in_use() -> None:
    inventory = Inventory(accelerators=[TorchAccelerator("TPU", "meta", _Bare(), limit_call=None)])
    with (
        pytest.raises(sg.OutOfMemoryError, match=r"on /device:TPU:1: asked for 1 GiB .*of all that it has"),
        sg.devices.serve("tpu:1", inventory=inventory),
    ):
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_backend_of_a_vendor_is_found_without_a_row(forked_tasks: None) -> None:
    done = nursery.run(["-W", "error", "-m", "tests.devices.vendor_program"], 100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all of it works"


@pytest.mark.slow
def test_name_in_the_private_slot_without_devices_is_no_kind_that_has_any(forked_tasks: None) -> None:
    program = (
        "import torch, stratagem as sg\n"
        "torch.utils.rename_privateuse1_backend('mine')\n"
        "print(len(sg.config.list_physical_devices()), sg.config.list_physical_devices('mine'))\n"
    )
    done = nursery.run(["-W", "error", "-c", program], 50)
    assert done.stdout.strip() == "1 []", done.stderr
