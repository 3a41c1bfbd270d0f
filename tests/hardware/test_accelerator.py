"""The cases for accelerators: on real ones where this machine has them (`make test-gpu`), and on strict devices."""

from types import ModuleType

import pytest

from tests.hardware import gpu_cases, in_turn, replica_cases, target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

KIND = target.kind_here()
MODULES = (gpu_cases, replica_cases)
CASES = [(module, case) for module in MODULES for case in in_turn.cases_of(module)]
# What replicas do on strict devices, the contracts of strategies hold as well.
ON_STRICT_DEVICES = [
    pytest.param(module, case, marks=[pytest.mark.soak] if module is replica_cases else []) for module, case in CASES
]
_outcomes: dict[tuple[str, str | None], dict[str, str | None]] = {}


def show(module: ModuleType, case: str, kind: str | None) -> None:
    """Runs all cases of a module with its first, and shows what came of one."""
    key = module.__name__, kind
    if key not in _outcomes:
        _outcomes[key] = in_turn.outcomes_of(module, kind, timeout_s=180 if kind is None else 900)
    outcome = _outcomes[key][case]
    if outcome is not None and outcome.startswith(in_turn.SKIPPED):
        pytest.skip(outcome.removeprefix(in_turn.SKIPPED))
    if outcome is not None:
        pytest.fail(outcome, pytrace=False)


@pytest.mark.hardware
@pytest.mark.skipif(KIND is None, reason="this machine has no accelerator")
@pytest.mark.parametrize(("module", "case"), CASES, ids=[case for _, case in CASES])
def test_on_hardware(module: ModuleType, case: str) -> None:
    show(module, case, KIND)


@pytest.mark.parametrize(("module", "case"), ON_STRICT_DEVICES, ids=[case for _, case in CASES])
def test_on_strict_devices(module: ModuleType, case: str) -> None:
    show(module, case, None)
