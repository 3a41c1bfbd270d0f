"""Parameter servers that listen on loopback, each in a thread of this process, with a token of their own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.conftest import no_starter, token_file
from tests.parameters.network.cluster import Cluster

__all__ = ["no_starter", "token_file"]


@pytest.fixture
def new_cluster(token_file: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters of workers and running servers, which end with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Cluster(**options))
