import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.devices.device import DeviceDetails, LogicalDeviceConfiguration, PhysicalDevice
from stratagem.devices.division import divide, split_cores
from stratagem.errors import DeviceConfigurationError, DeviceTypeError
from tests.fakes import GIB

CPU = PhysicalDevice("CPU", 0)
GPU = PhysicalDevice("GPU", 0)
SIMULATED = PhysicalDevice("GPU", 0, simulated=True)
DETAILS = DeviceDetails("any", 8 * GIB)
Part = LogicalDeviceConfiguration


def limits(device: PhysicalDevice, *parts: Part) -> list[int | None]:
    return [share.memory_limit_bytes for share in divide(device, DETAILS, (0, 1), parts)]


def cores(*parts: Part, of: int = 8) -> list[tuple[int, ...]]:
    return [share.cores for share in divide(CPU, DETAILS, tuple(range(of)), parts)]


@given(st.integers(1, 200), st.integers(1, 200))
def test_cores_are_split_evenly_and_all_are_used(num_cores: int, num_shares: int) -> None:
    shares = split_cores(tuple(range(num_cores)), num_shares)
    sizes = {len(share) for share in shares}
    assert len(shares) == num_shares
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert set(itertools.chain(*shares)) == set(range(num_cores))
    if num_shares <= num_cores:
        assert list(itertools.chain(*shares)) == list(range(num_cores))


def test_cpu_is_split_into_shares_of_its_cores() -> None:
    assert cores(Part(), Part(), of=5) == [(0, 1, 2), (3, 4)]
    assert cores(Part(), Part(), Part(), Part(), of=2) == [(0,), (0,), (1,), (1,)]
    assert cores(Part(num_cores=5), Part(), Part(), of=8) == [(0, 1, 2, 3, 4), (5, 6), (7,)]
    assert cores(Part(), Part(num_cores=1), of=4) == [(1, 2, 3), (0,)]
    assert cores(Part(num_cores=1), Part(num_cores=2), of=4) == [(0,), (1, 2)]


def test_undivided_devices_have_everything() -> None:
    assert divide(CPU, DETAILS, (0, 1), None)[0].cores == (0, 1)
    assert limits(CPU, Part()) == [None]
    assert limits(GPU, Part()) == [None]


def test_simulated_device_is_always_limited_to_the_memory_it_has() -> None:
    assert limits(SIMULATED, Part()) == [8 * GIB]


def test_memory_limits_are_mib_or_fractions() -> None:
    assert limits(CPU, Part(memory_limit=512), Part(memory_fraction=0.25)) == [GIB // 2, 2 * GIB]
    assert limits(GPU, Part(memory_fraction=0.4)) == [int(0.4 * 8 * GIB)]
    assert limits(CPU, Part(memory_limit=1.5)) == [3 * 2**19]


def test_gpu_shares_without_a_limit_divide_what_is_left() -> None:
    assert limits(GPU, Part(), Part()) == [4 * GIB, 4 * GIB]
    assert limits(GPU, Part(memory_limit=2048), Part(), Part()) == [2 * GIB, 3 * GIB, 3 * GIB]
    assert limits(CPU, Part(memory_limit=2048), Part()) == [2 * GIB, None]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([Part(memory_limit=65536)], "memory limit 64 GiB for /physical_device:GPU:0 is above its 8 GiB"),
        ([Part(memory_limit=5000)] * 2, "memory limits for /physical_device:GPU:0 add up to 9.8 GiB, it has 8 GiB"),
        ([Part(memory_fraction=0.6)] * 2, "add up to 9.6 GiB, it has 8 GiB"),
        ([Part(memory_limit=8192), Part()], "leave nothing for the shares without a limit"),
        ([], "at least one share, got an empty list; to hide a device use set_visible_devices"),
    ],
)
def test_memory_limits_must_fit(parts: list[Part], words: str) -> None:
    with pytest.raises(DeviceConfigurationError) as caught:
        divide(GPU, DETAILS, (), parts)
    assert words in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert limits(CPU, Part(memory_limit=np.int64(512), num_cores=np.int64(1))) == [GIB // 2]


def test_real_gpu_has_no_cores_to_divide() -> None:
    with pytest.raises(DeviceConfigurationError, match="num_cores is for shares of a CPU"):
        divide(GPU, DETAILS, (), [Part(num_cores=2)])


def test_cores_must_suffice() -> None:
    with pytest.raises(DeviceConfigurationError, match=r"ask for 9 of its 8 cores; ask for fewer"):
        cores(Part(num_cores=9))
    with pytest.raises(DeviceConfigurationError, match="leaves none for the 1 without num_cores"):
        cores(Part(num_cores=8), Part())


@pytest.mark.parametrize("parts", [Part(), "cpu", 2, ["512"], [512], [None]])
def test_parts_must_be_a_list_of_configurations(parts: object) -> None:
    with pytest.raises(DeviceTypeError, match="LogicalDeviceConfiguration, got"):
        divide(CPU, DETAILS, (0,), parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1, 1e-9, True, "512", float("nan"), float("inf"), 10**400])
def test_memory_limit_must_be_positive(limit: object) -> None:
    with pytest.raises(DeviceConfigurationError, match="memory_limit must be a number of MiB from 1 up, got"):
        Part(memory_limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, True, "0.5", float("nan")])
def test_memory_fraction_must_be_a_part_of_one(fraction: object) -> None:
    with pytest.raises(DeviceConfigurationError, match=r"memory_fraction must be above 0 and at most 1, got"):
        Part(memory_fraction=fraction)  # type: ignore[arg-type]


def test_configuration_takes_one_kind_of_limit_and_whole_cores() -> None:
    with pytest.raises(DeviceConfigurationError, match=r"memory_limit=512 or memory_fraction=0\.5, not both"):
        Part(memory_limit=512, memory_fraction=0.5)
    with pytest.raises(DeviceConfigurationError, match=r"num_cores must be a whole number from 1 up, got 1\.5"):
        Part(num_cores=1.5)  # type: ignore[arg-type]
