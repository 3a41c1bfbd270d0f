"""The contracts of strategies, collectives, Keras and placement on strict devices: what runs on GPUs, without one.

A process has strict devices for life, so that a program of its own runs the suite for each row.
"""

import os
import re
from pathlib import Path

import pytest

from tests.cluster import nursery
from tests.contracts.strategies_under_test import STRICT, STRICT_ROWS

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_tasks")]


# Every row keeps the contract of strategies. These differ from others in who starts replicas, how many there are or
# how sums travel, which the same rows on the CPU show in each run.
_SELDOM = (
    *("strict one device", "strict mirrored 2 to one", "strict local sgd 2", "strict parameter server 2"),
    "strict 2 workers of 2",
)
_FEWEST = {
    "test_strategies.py": 15,
    "test_exchange_dtype.py": 5,
    "test_keras.py": 10,
    "test_collectives.py": 15,
    "../placement": 75,
    "../foreign/test_torch_gradients.py": 30,
    "../foreign/test_torch_data.py": 12,
    "../foreign/test_torch_ddp.py": 35,
    "../foreign/test_torch_state.py": 10,
}  # tests that a row keeps, whatever is left out by nature
_CHOSEN = [
    *(
        pytest.param("test_strategies.py", row, marks=[pytest.mark.soak] if row in _SELDOM else [])
        for row in STRICT_ROWS
    ),
    pytest.param("test_exchange_dtype.py", "strict bf16: mirrored 2", marks=pytest.mark.soak),
    pytest.param("test_exchange_dtype.py", "strict bf16: 2 workers of 1", marks=pytest.mark.soak),
    ("test_collectives.py", "3 strict GPUs"),
    ("test_keras.py", "strict mirrored 2"),
    pytest.param("test_keras.py", "strict one device", marks=pytest.mark.soak),
    ("../placement", "scopes"),
    # Programs as others write them; how data comes to replicas is among them.
    ("../foreign/test_torch_gradients.py", "strict mirrored 2"),
    *(
        pytest.param(f"../foreign/{suite}", row, marks=pytest.mark.soak)
        for row, suite in (
            ("strict mirrored 2", "test_torch_data.py"),
            ("strict mirrored 2", "test_torch_ddp.py"),
            ("strict mirrored 2", "test_torch_state.py"),
            ("strict one device", "test_torch_gradients.py"),
            ("strict one device", "test_torch_data.py"),
        )
    ),
]


@pytest.mark.skipif(STRICT in os.environ, reason="this is that program")
@pytest.mark.parametrize(("suite", "row"), _CHOSEN)
def test_strategy_on_strict_devices_keeps_the_contract(suite: str, row: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist"]
    path = (Path(__file__).parent / suite).resolve()
    options += ["-k", "strict"] if "foreign" in suite else []  # there are tests with rows of their own
    done = nursery.run(["-m", "pytest", *options, path], 280, {**os.environ, STRICT: row}, cwd=nursery.ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > _FEWEST[suite]
