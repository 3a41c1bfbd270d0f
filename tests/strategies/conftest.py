"""What the tests of strategies have in common."""

from collections.abc import Iterator

import pytest

import stratagem as sg


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    """Two replicas, for all tests of a module; those that end their replicas make their own."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=20.0) as made:
        with made.scope():
            pass
        yield made
