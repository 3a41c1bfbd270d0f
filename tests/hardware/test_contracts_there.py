"""The contracts of strategies, collectives and Keras on real accelerators: the suites that strict devices keep too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.strategies_under_test import STRICT
from tests.hardware import target

KIND = target.kind_here()
NUM_DEVICES = target.num_real(KIND)
CONTRACTS = Path(__file__).parents[1] / "contracts"

# For each suite and row, how many devices it takes.
ROWS = [
    *(("test_strategies.py", row, 2) for row in ("strict mirrored 2", "strict mirrored 2 to one")),
    *(("test_strategies.py", row, 2) for row in ("strict central storage 2", "strict local sgd 2")),
    *(("test_strategies.py", row, 2) for row in ("strict parameter server 2", "strict 2 workers of 1")),
    ("test_strategies.py", "strict one device", 2),  # the second one
    ("test_strategies.py", "strict 2 workers of 2", 4),
    ("test_collectives.py", "strict GPUs", 2),
    ("test_keras.py", "strict mirrored 2", 2),
]


@pytest.mark.hardware
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.skipif(KIND is None, reason="this machine has no accelerator")
@pytest.mark.parametrize(("suite", "row", "num_devices"), ROWS)
def test_contract_holds_on_hardware(suite: str, row: str, num_devices: int) -> None:
    if num_devices > NUM_DEVICES:
        pytest.skip(f"needs {num_devices} {KIND}s, this machine has {NUM_DEVICES}")
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CONTRACTS / suite)],
        env={**target.ENVIRONMENT, **target.EXACT, STRICT: row, target.VARIABLE: str(KIND)},
        cwd=CONTRACTS.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 5
