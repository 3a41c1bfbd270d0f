import pytest
import torch

from stratagem.devices.accelerators import TorchAccelerator
from stratagem.devices.vendors import cuda
from stratagem.devices.vendors.metal import MetalAccelerator
from tests.fakes import GIB, FakeTorchCuda


def accelerator(fake: FakeTorchCuda) -> TorchAccelerator:
    return TorchAccelerator("GPU", "meta", fake)


def test_counting_does_not_wake_the_driver() -> None:
    fake = FakeTorchCuda(2)
    assert accelerator(fake).count() == 2
    assert not fake.initialized


def test_details_come_from_the_properties_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeTorchCuda(1))
    details = cuda.accelerator("GPU").details(0)
    assert details.device_name == "Fake A100"
    assert details.total_memory_bytes == 16 * GIB
    assert details.num_cores == 108
    assert details.compute_capability == (8, 0)


def test_memory_readings_are_those_of_torch() -> None:
    fake = FakeTorchCuda(2)
    fake.allocated[1], fake.peaks[1] = 5, 9
    assert accelerator(fake).memory_info(1) == {"current": 5, "peak": 9}
    accelerator(fake).reset_peak(1)
    assert fake.peaks[1] == 9, "a driver that sleeps has no peak to reset"
    fake.initialized = True
    accelerator(fake).reset_peak(1)
    assert fake.peaks[1] == 5


def test_memory_used_by_all_is_unknown_without_the_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeTorchCuda(1))
    assert cuda.accelerator("GPU").memory_used(0) is None


def test_reserving_takes_all_that_is_free_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real_empty = torch.empty

    def counting_empty(num_bytes: int, **options: object) -> torch.Tensor:
        taken.append(num_bytes)
        return real_empty(num_bytes, **options)

    monkeypatch.setattr(torch, "empty", counting_empty)
    accelerator(FakeTorchCuda(1)).reserve(0, 3 * GIB + 5)
    accelerator(FakeTorchCuda(1)).reserve(0, 99 * GIB)
    accelerator(FakeTorchCuda(1)).reserve(0, None)
    accelerator(FakeTorchCuda(1)).reserve(0, 3 * GIB)
    assert taken[:2] == [3 * GIB, 16 * GIB]
    assert 0.94 * 16 * GIB < taken[2] <= 0.95 * 16 * GIB
    assert 3 * GIB - 4 * 2**20 < taken[3] < 3 * GIB, "the fraction that torch holds may be a byte less"


def test_metal_speaks_to_torch_mps() -> None:
    class FakeMps:
        fraction = 0.0

        def recommended_max_memory(self) -> int:
            return 10 * GIB

        def current_allocated_memory(self) -> int:
            return 3

        def driver_allocated_memory(self) -> int:
            return 8

        def set_per_process_memory_fraction(self, fraction: float) -> None:
            self.fraction = fraction

        def empty_cache(self) -> None:
            pass

    fake = FakeMps()
    metal = MetalAccelerator("MPS", fake)
    assert metal.details(0).total_memory_bytes == 10 * GIB
    assert metal.memory_info(0) == {"current": 3, "peak": 8}
    assert metal.memory_used(0) is None
    metal.limit_memory(0, 0.5)
    assert fake.fraction == 0.5
    with metal.selected(0):
        metal.reset_peak(0)
