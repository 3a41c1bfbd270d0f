import pytest

from stratagem.devices.simulated import Simulation, check_fit, read_variable
from stratagem.errors import DeviceConfigurationError, EnvironmentVariableError, UnknownDeviceError
from tests.fakes import GIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("", {}),
        ("gpu:4", {"GPU": Simulation("GPU", 4)}),
        ("cuda:4", {"GPU": Simulation("GPU", 4)}),
        ("gpu:2:512", {"GPU": Simulation("GPU", 2, 512)}),
        (" gpu:2 , xpu:1 ", {"GPU": Simulation("GPU", 2), "XPU": Simulation("XPU", 1)}),
    ],
)
def test_variable_is_read(text: str | None, expected: dict[str, Simulation]) -> None:
    assert read_variable(text, 8 * GIB) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu", "'gpu' is not KIND:COUNT"),
        ("4", "'4' is not KIND:COUNT"),
        ("gpu:four", "'gpu:four' is not KIND:COUNT"),
        ("gpu:1.5", "'gpu:1.5' is not KIND:COUNT"),
        ("gpu:0", "whole number from 1 up, got 0"),
        ("gpu:-2", "whole number from 1 up, got -2"),
        ("gpx:2", "Did you mean 'gpu'?"),
        ("gpu:2:0", "number of MiB from 1 up, got 0"),
        ("gpu:2:3:4", "is not KIND:COUNT"),
        ("cpu:4", "a CPU is divided, not simulated"),
        ("gpu:2,cuda:3", "gives GPU twice"),
        ("gpu:2:5000", "this machine has 8 GiB"),
        ("gpu:99999", "less than 1 MiB each"),
    ],
)
def test_variable_says_what_is_wrong_with_it(text: str, words: str) -> None:
    with pytest.raises(EnvironmentVariableError) as caught:
        read_variable(text, 8 * GIB)
    assert f"STRATAGEM_SIMULATE={text!r}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2"])
def test_simulation_refuses_a_count_that_is_not_one(count: object) -> None:
    with pytest.raises(DeviceConfigurationError, match=f"whole number from 1 up, got {count!r}"):
        Simulation("GPU", count)  # type: ignore[arg-type]


def test_simulation_refuses_an_unknown_kind() -> None:
    with pytest.raises(UnknownDeviceError, match="unknown kind of device 'TPUX'"):
        Simulation("TPUX", 1)


def test_simulated_memory_is_an_even_share_by_default() -> None:
    assert Simulation("GPU", 4).details(8 * GIB, 8).total_memory_bytes == 2 * GIB
    assert Simulation("GPU", 4).details(8 * GIB, 8).num_cores == 2


def test_simulated_memory_must_fit_into_the_machine() -> None:
    with pytest.raises(DeviceConfigurationError, match=r"4 simulated GPUs of 3 GiB bring .* to 12 GiB, .* has 8 GiB"):
        check_fit([Simulation("GPU", 4, 3072)], 8 * GIB)
    with pytest.raises(DeviceConfigurationError, match=r"2 simulated XPUs of 3 GiB bring .* to 12 GiB, .* has 8 GiB"):
        check_fit([Simulation("GPU", 2, 3072), Simulation("XPU", 2, 3072)], 8 * GIB)
    with pytest.raises(DeviceConfigurationError, match="less than 1 MiB each"):
        check_fit([Simulation("GPU", 10_000)], 8 * GIB)
