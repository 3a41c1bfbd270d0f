"""Torch's process groups over the store of a cluster, in real processes."""

import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from stratagem.cluster import Membership
from stratagem.cluster.membership.value_store import ClusterStore
from stratagem.errors import ClusterTimeoutError, TaskLostError
from tests.cluster.tasks import TaskProcess, listening_at, send_begin, workers
from tests.collectives.harness import Replicas, started

c10d: Any = torch.distributed

pytestmark = [pytest.mark.usefixtures("token_file", "fork_server", "forked_tasks"), pytest.mark.slow]


@pytest.fixture
def membership() -> Iterator[Membership]:
    with Membership(workers(1), "worker", 0, join_timeout_s=20) as made:
        yield made


def test_store_has_the_interface_of_torch(membership: Membership) -> None:
    store = ClusterStore(membership, timeout_s=5)
    assert store.timeout == timedelta(seconds=5)
    # Through a prefix, so that it is torch which calls.
    prefixed = c10d.PrefixStore("x", store)
    prefixed.set("k", "v")
    assert prefixed.get("k") == b"v"
    assert (prefixed.add("n", 2), prefixed.add("n", 3)) == (2, 5)
    prefixed.multi_set(["a", "b"], ["1", "2"])
    prefixed.append("a", "0")
    assert prefixed.multi_get(["a", "b"]) == [b"10", b"2"]
    assert prefixed.has_extended_api()
    assert prefixed.check(["a", "b"])
    assert not prefixed.check(["c"])
    prefixed.wait(["a"])
    prefixed.wait(["a", "b"], timedelta(seconds=1))
    assert prefixed.compare_set("c", "", "new") == b"new"
    assert prefixed.compare_set("c", "old", "newer") == b"new"
    assert prefixed.num_keys() == 5
    assert prefixed.delete_key("c")
    assert not prefixed.delete_key("c")
    assert store.num_keys() == 4
    assert membership.get("x/k") == b"v"


def test_store_waits_no_longer_than_told(membership: Membership) -> None:
    store = ClusterStore(membership)
    store.set_timeout(timedelta(milliseconds=100))
    for call in (lambda: store.get("k"), lambda: c10d.PrefixStore("x", store).wait(["k"], timedelta(milliseconds=50))):
        with pytest.raises(ClusterTimeoutError, match="no task has set"):
            call()


def test_store_lives_as_long_as_torch_uses_it(membership: Membership) -> None:
    prefixed = c10d.PrefixStore("x", ClusterStore(membership))
    gc.collect()
    prefixed.set("k", "v")
    assert prefixed.get("k") == b"v"


def test_many_large_values_travel(membership: Membership) -> None:
    store = ClusterStore(membership)
    keys = [str(number) for number in range(20)]
    store.multi_set(keys, [os.urandom(8).hex() * 4096 for _ in keys])
    assert [len(value) for value in store.multi_get(keys)] == [65536] * 20


def connect(store: Any, rank: int, size: int) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=20)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, options)


def all_reduce(rank: int, size: int, cluster: dict[str, list[str]], token_file: str) -> tuple[list[float], set[str]]:
    """The sum over all tasks, and where this process listens meanwhile."""
    before = listening_at(os.getpid())
    with Membership(cluster, "worker", rank, join_timeout_s=20, token_file=token_file) as membership:
        group = connect(ClusterStore(membership), rank, size)
        tensor = torch.arange(3, dtype=torch.float32) + rank
        group.allreduce([tensor]).wait()
        group.barrier().wait()
        at = listening_at(os.getpid()) - before
        group.shutdown()
        membership.raise_if_lost()
    return tensor.tolist(), at


@pytest.fixture(scope="module")
def processes(fork_server: None) -> Iterator[Replicas]:
    with started(3) as made:
        yield made


@pytest.mark.parametrize("size", [2, 3])
def test_process_groups_of_gloo_work_over_it(processes: Replicas, token_file: Path, size: int) -> None:
    cluster = workers(size)
    outcomes = processes.run(size, all_reduce, cluster, str(token_file))
    total = float(sum(range(size)))
    assert [numbers for numbers, _ in outcomes] == [[total, total + size, total + 2 * size]] * size
    places = set().union(*(at for _, at in outcomes))
    assert {place.partition(":")[0] for place in places} == {"0100007f"}  # nobody listens anywhere but on loopback
    port = int(cluster["worker"][0].rpartition(":")[2])
    assert f"0100007f:{port:04x}" in outcomes[0][1]


def test_group_that_waits_for_a_task_hears_that_it_died() -> None:
    cluster = workers(2)
    other = TaskProcess()
    try:
        send_begin(other, cluster, 1)
        with Membership(cluster, "worker", 0, join_timeout_s=20) as membership:
            assert other.value() == "joined"
            other.kill()
            with pytest.raises(TaskLostError, match=r"worker/1 \(127.0.0.1:\d+, pid \d+ on .*\) was lost"):
                connect(ClusterStore(membership), 0, 2)
    finally:
        other.close()
