"""Strict devices are devices of torch's own: what programs do on a GPU, they do there, or say what is wrong."""

import os

import pytest

from tests.devices.strict import (
    accelerator_cases,
    in_a_program,
    input_cases,
    strategy_cases,
    torch_cases,
    tpu_cases,
    wait_cases,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MODULES = (torch_cases, strategy_cases, accelerator_cases, input_cases, wait_cases, tpu_cases)
CASES = [(module.__name__, case) for module in MODULES for case in in_a_program.cases_of(module)]


@pytest.fixture(scope="module")
def outcomes(forked_tasks: None) -> dict[tuple[str, str], str | None]:
    """What came of the cases, by module and name."""
    return {
        (module.__name__, case): outcome
        for module in MODULES
        for case, outcome in in_a_program.outcomes_of(module, dict(os.environ)).items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_program_on_strict_devices(case: tuple[str, str], outcomes: dict[tuple[str, str], str | None]) -> None:
    if outcomes[case] is not None:
        pytest.fail(str(outcomes[case]), pytrace=False)
