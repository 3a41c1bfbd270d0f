"""Strict devices are devices of torch's own: what torch's programs do on a GPU, they do there, or say what is wrong."""

import os

import pytest

from tests.devices.strict import in_a_program, torch_cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def outcomes(forked_tasks: None) -> dict[str, str | None]:
    return in_a_program.outcomes_of(torch_cases, dict(os.environ))


@pytest.mark.parametrize("case", in_a_program.cases_of(torch_cases))
def test_case(case: str, outcomes: dict[str, str | None]) -> None:
    if outcomes[case] is not None:
        pytest.fail(str(outcomes[case]), pytrace=False)
