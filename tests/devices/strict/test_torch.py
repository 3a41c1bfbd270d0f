"""Strict devices are devices of torch's own: what programs do on a GPU, they do there, or say what is wrong."""

import os

import pytest

from tests.devices.strict import in_a_program, strategy_cases, torch_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CASES = [*in_a_program.cases_of(torch_cases), *in_a_program.cases_of(strategy_cases)]


@pytest.fixture(scope="module")
def outcomes(forked_tasks: None) -> dict[str, str | None]:
    environment = dict(os.environ)
    return in_a_program.outcomes_of(torch_cases, environment) | in_a_program.outcomes_of(strategy_cases, environment)


@pytest.mark.parametrize("case", CASES)
def test_program_on_strict_devices(case: str, outcomes: dict[str, str | None]) -> None:
    if outcomes[case] is not None:
        pytest.fail(str(outcomes[case]), pytrace=False)
