"""Strict devices are devices of torch's own: what programs do on a GPU, they do there, or say what is wrong."""

import os

import pytest

from tests.devices.strict import accelerator_cases, in_a_program, strategy_cases, torch_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = (torch_cases, strategy_cases, accelerator_cases)
CASES = [case for program in PROGRAMS for case in in_a_program.cases_of(program)]


@pytest.fixture(scope="module")
def outcomes(forked_tasks: None) -> dict[str, str | None]:
    environment = dict(os.environ)
    found = [in_a_program.outcomes_of(program, environment) for program in PROGRAMS]
    return {case: outcome for each in found for case, outcome in each.items()}


@pytest.mark.parametrize("case", CASES)
def test_program_on_strict_devices(case: str, outcomes: dict[str, str | None]) -> None:
    if outcomes[case] is not None:
        pytest.fail(str(outcomes[case]), pytrace=False)
