"""How replicas connect by sockets: who gets in, who does not, and what happens when one goes."""

import hmac
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from stratagem.collectives.mesh import Mesh
from stratagem.collectives.sockets import Sockets, connect_all
from stratagem.errors import CollectiveError

PATIENCE_S = 20.0


class Store:
    """Values that several threads wait for."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, PATIENCE_S)
            return self._values[key]


def signing(secret: bytes) -> Callable[[bytes], bytes]:
    return lambda message: hmac.digest(secret, message, "sha256")


def connect(rank: int, size: int, store: Store, secret: bytes = b"known", **options: Any) -> dict[int, socket.socket]:
    options = {"timeout_s": PATIENCE_S, **options}
    return connect_all(rank, size, store, address="127.0.0.1", sign=signing(secret), **options)


def meshes(size: int) -> list[Mesh]:
    store = Store()
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(lambda rank: connect(rank, size, store), range(size)))
    return [Mesh(rank, size, Sockets(each)) for rank, each in enumerate(found)]


def test_strangers_are_turned_away_and_the_others_still_connect() -> None:
    store = Store()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(connect, 0, 2, store)
        host, port = store.get("sockets/0").split()
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(80, b"x"))
            with pytest.raises(CollectiveError, match="could not connect"):
                connect(1, 2, store, b"another secret")  # as if it were replica 1
            second = threads.submit(connect, 1, 2, store)
            found = [first.result(PATIENCE_S), second.result(PATIENCE_S)]
    assert [list(each) for each in found] == [[1], [0]]
    for each in found:
        Sockets(each).close()


def test_who_listens_must_know_the_secret_too() -> None:
    store = Store()
    with ThreadPoolExecutor(1) as threads:
        false = threads.submit(connect, 0, 2, store, b"another secret", timeout_s=2.0)
        with pytest.raises(CollectiveError, match="could not connect"):
            connect(1, 2, store)
        with pytest.raises(CollectiveError, match=r"process 0 waited 2 s for processes 1 to connect"):
            false.result(PATIENCE_S)


def test_waiting_ends_when_attend_says_so() -> None:
    def give_up(waited_s: float) -> None:
        if waited_s > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect(0, 2, Store(), attend=give_up)


def test_a_replica_that_goes_ends_the_waits_of_the_others() -> None:
    first, second = meshes(2)
    try:
        wait = first.start_sum(torch.ones(10))
        second.close()
        with pytest.raises(CollectiveError, match="the connection to replica 1 has ended"):
            wait()
        with pytest.raises(CollectiveError, match="the connection to replica 1 has ended"):
            first.exchange("anything", b"")
        with pytest.raises(CollectiveError, match="was closed"):
            second.barrier()
    finally:
        first.close()


@pytest.mark.parametrize("numel", [1, 5000, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sums_under_way_and_words_between_them_keep_their_order(numel: int, dtype: torch.dtype) -> None:
    def work(mesh: Mesh) -> tuple[list[torch.Tensor], list[bytes]]:
        generator = torch.Generator().manual_seed(mesh.rank)
        rows = [torch.randint(-9, 9, (numel,), generator=generator).to(dtype) for _ in range(3)]
        waits = [mesh.start_sum(row) for row in rows]
        told = mesh.exchange("tell", bytes([mesh.rank]) * (mesh.rank + 1))
        return [wait() for wait in waits], told

    everyone = meshes(3)
    try:
        with ThreadPoolExecutor(3) as threads:
            results = list(threads.map(work, everyone))
    finally:
        for mesh in everyone:
            mesh.close()
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for number in range(3):
        expected = sum(torch.randint(-9, 9, (numel,), generator=each) for each in generators)
        for sums, told in results:
            assert torch.equal(sums[number].to(torch.int64), expected)
            assert told == [b"\0", b"\1\1", b"\2\2\2"]


def test_sums_of_large_rows_overlap_with_their_neighbours_only_in_order() -> None:
    """Each sum is announced: another size on one side is told to both, and nothing is mixed up."""

    def work(mesh: Mesh) -> str:
        wait = mesh.start_sum(torch.ones(100_000 + mesh.rank))
        with pytest.raises(CollectiveError) as caught:
            wait()
        assert mesh.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
        return str(caught.value)

    both = meshes(2)
    try:
        with ThreadPoolExecutor(2) as threads:
            messages = list(threads.map(work, both))
    finally:
        for mesh in both:
            mesh.close()
    assert messages[0] == messages[1]
    assert "start_sum of float32 with shape (100000,)" in messages[0]
    assert "start_sum of float32 with shape (100001,)" in messages[0]
