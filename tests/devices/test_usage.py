"""What other processes may know of the devices that this one uses."""

import os
import sys
from types import SimpleNamespace

import pytest

from stratagem import config
from stratagem.devices import usage
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.inventory import Inventory
from stratagem.devices.serving import limited_accelerator
from tests.fakes import GIB, FakeTorchCuda


def test_process_shows_its_devices_and_a_fork_does_not(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.dup(0)  # a lower number than that of what is shown: it serves the listing of descriptors, and is closed
    monkeypatch.setattr(usage, "_this", usage._Told())  # what tests before have shown is beside it
    with usage.shown("/device:GPU:5", 64, 0):
        os.close(free)
        mine = [each for each in usage.of_this_machine() if each.pid == os.getpid()]
        (own,) = [each for each in mine if each.device == "/device:GPU:5"]  # a strategy of an earlier test may be open
        assert (own.program, own.limit_bytes) == (os.getpid(), 64)
        assert own.memory_bytes is not None
        assert 0 < own.memory_bytes <= (own.peak_bytes or 0)
        usage.count("/device:GPU:5", 64, 7, 8)
        assert usage.of_this_program("/device:GPU:5") == {"current": 7, "peak": 8}
        if (pid := os.fork()) == 0:
            code = any(each.pid == os.getpid() for each in usage.of_this_machine())
            usage.count("/device:GPU:6", 64, 1, 2)  # beside what it has of this process
            found = [each.device for each in usage.of_this_machine() if each.pid == os.getpid()]
            os._exit(code or found != ["/device:GPU:6"])
        assert os.waitpid(pid, 0)[1] == 0
    assert usage.of_this_program("/device:GPU:5") is None
    os.close(usage._this.descriptor)


def test_nvidias_library_tells_of_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    asked: list[int] = []
    process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: asked.append(-1),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=asked.append,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [process],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    (found,) = [each for each in usage.of_this_machine() if each.device == "/physical_device:GPU:0"]
    assert (found.pid, found.memory_bytes, asked) == (os.getpid(), GIB, [1, -1])


def test_torch_holds_the_limit_of_an_accelerator_in_the_main_program() -> None:
    fake = FakeTorchCuda(1, total_memory=16 * GIB)
    inventory = Inventory(accelerators=[TorchAccelerator("GPU", "meta", fake)])
    inventory.configure(
        "gpu:0", [config.LogicalDeviceConfiguration(memory_limit=4096), config.LogicalDeviceConfiguration()]
    )
    with limited_accelerator(inventory.resolve("gpu:0"), inventory):
        assert fake.fractions == {0: 0.25}
    assert fake.fractions == {0: 1.0}


def test_tpus_can_be_listed_and_there_are_none() -> None:
    assert config.list_physical_devices("TPU") == config.list_logical_devices("tpu") == []
