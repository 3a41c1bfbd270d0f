"""The contract of strategies on strict devices: what runs on GPUs, without one.

A process has strict devices for life, so that a program of its own runs the suite for each row.
"""

import os
import re
from pathlib import Path

import pytest

from tests.cluster import nursery
from tests.contracts.strategies_under_test import STRICT, STRICT_ROWS

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_tasks")]


_FEWEST = 15  # tests that a row keeps, whatever is left out by nature


@pytest.mark.skipif(STRICT in os.environ, reason="this is that program")
@pytest.mark.parametrize("row", STRICT_ROWS)
def test_strategy_on_strict_devices_keeps_the_contract(row: str) -> None:
    suite = Path(__file__).with_name("test_strategies.py")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist"]
    done = nursery.run(["-m", "pytest", *options, suite], 280, {**os.environ, STRICT: row}, cwd=nursery.ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > _FEWEST
