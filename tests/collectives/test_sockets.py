"""How replicas connect by sockets: who gets in, who does not, and what happens when one goes."""

import contextlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from stratagem.collectives.calling import connect_all
from stratagem.collectives.mesh import _HEAD, _NOTE_BYTES, _SMALL_BYTES, Mesh
from stratagem.collectives.sockets import Sockets
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


def test_strangers_are_turned_away_and_hold_nobody_up() -> None:
    """More of them than are kept waiting: those who say nothing, nonsense, or what they have no right to."""
    store = Store()
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as strangers:
        first = threads.submit(connect, 0, 2, store)
        host, port, _ = store.get("sockets/0").split()
        for number in range(300):
            stranger = strangers.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            if number % 3:
                stranger.sendall((b"GET / HTTP/1.1\r\n\r\n" if number % 3 == 1 else b"SGMX").ljust(72, b"\0"))
        with pytest.raises(CollectiveError, match=r"process 1 could not connect with process 0 at 127\.0\.0\.1:"):
            connect(1, 2, store, b"another secret", timeout_s=0.5)
        elsewhere = Store()
        elsewhere.set("sockets/0", f"{host} {port} {'0' * 32}")
        with pytest.raises(CollectiveError, match="could not connect"):  # of another cluster with the same secret
            connect(1, 2, elsewhere, timeout_s=0.5)
        # Those who say nothing have two seconds; waited for one after the other they would take minutes.
        second = threads.submit(connect, 1, 2, store)
        found = [first.result(PATIENCE_S), second.result(PATIENCE_S)]
    assert [list(each) for each in found] == [[1], [0]]
    for each in found:
        Sockets(each).close()


def test_who_listens_must_know_the_secret_too() -> None:
    store = Store()
    with ThreadPoolExecutor(1) as threads:
        false = threads.submit(connect, 0, 2, store, b"another secret", timeout_s=1.0)
        with pytest.raises(CollectiveError, match="could not connect"):
            connect(1, 2, store, timeout_s=0.5)
        with pytest.raises(CollectiveError, match=r"process 0 waited 1 s for process 1 to connect with it at 127"):
            false.result(PATIENCE_S)


def test_who_answers_without_the_secret_is_not_believed() -> None:
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        store.set("sockets/0", f"127.0.0.1 {listener.getsockname()[1]} {'0' * 32}")
        calling = threads.submit(connect, 1, 2, store)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(40, socket.MSG_WAITALL)[:4] + bytes(36))  # as rank 0
            connection.sendall(connection.recv(32, socket.MSG_WAITALL))  # what it was sent, as its own proof
            with pytest.raises(CollectiveError, match=r"127.0.0.1:\d+ is not process 0 of this cluster"):
                calling.result(PATIENCE_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_ends_when_attend_says_so(rank: int) -> None:
    """For one that does not call, and for one that does not answer."""

    def give_up(waited_s: float) -> None:
        if waited_s > 0.3:
            raise KeyboardInterrupt

    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if rank:
            store.set("sockets/0", f"127.0.0.1 {silent.getsockname()[1]} {'0' * 32}")
        with pytest.raises(KeyboardInterrupt):
            connect(rank, 2, store, attend=give_up)


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


def test_a_wait_for_one_replica_is_attended_when_another_has_gone() -> None:
    """Its reset connection is no news for the wait: neither an end of it, nor a reason to look again and again."""
    first, second, third = meshes(3)
    looks = []

    def attend(waited_s: float) -> None:
        looks.append(waited_s)
        if waited_s > 1.0:
            raise KeyboardInterrupt

    try:
        sockets = third._sockets
        sockets.put(0, bytes(8))
        sockets.flush(attend)
        first._sockets.fill({2: bytearray(8)}, attend)
        sockets._connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        third.close()
        with pytest.raises(KeyboardInterrupt):
            first._sockets.fill({1: bytearray(8)}, attend)
        assert len(looks) <= 15
    finally:
        for mesh in (first, second, third):
            mesh.close()


def test_after_an_exchange_that_was_cut_short_there_is_no_other() -> None:
    def interrupt(waited_s: float) -> None:
        raise KeyboardInterrupt

    first, second = meshes(2)
    try:
        first._attend = interrupt
        with pytest.raises(KeyboardInterrupt):
            first.exchange("anything", b"")  # sent, and no answer waited for
        with pytest.raises(CollectiveError, match="an earlier exchange was cut short: KeyboardInterrupt"):
            first.exchange("anything", b"")
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("size", "message"),
    [(2**63, "there is no memory for 9223372036854775808 bytes"), (9, "sends 9 bytes in place of 8")],
)
def test_sizes_that_cannot_be_are_errors(size: int, message: str) -> None:
    first, second = meshes(2)
    try:
        note = "anything" if size > 9 else "all_reduce('sum') of float32 with shape (2,)"
        second._sockets.put(0, struct.pack("<QQ", 0, size) + note.encode().ljust(496, b"\0"))
        second._sockets.flush(lambda _: None)
        with pytest.raises(CollectiveError, match=message):
            first.exchange("anything", b"") if size > 9 else first.all_reduce(torch.ones(2))
    finally:
        first.close()
        second.close()


def test_a_process_that_is_forked_lets_go_of_the_connections() -> None:
    first, second = meshes(2)
    numbers = [connection.fileno() for connection in first._sockets._connections.values()]
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            closed = 0
            for number in numbers:
                try:
                    os.fstat(number)
                except OSError:
                    closed += 1
            os._exit(closed)
        os._exit(99)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(numbers) == 1
        with ThreadPoolExecutor(2) as threads:  # and has not ended them
            list(threads.map(lambda mesh: mesh.barrier(), (first, second)))
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("numel", [1, 5000, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sums_under_way_and_words_between_them_keep_their_order(numel: int, dtype: torch.dtype) -> None:
    def work(mesh: Mesh) -> tuple[list[torch.Tensor], list[bytes]]:
        generator = torch.Generator().manual_seed(mesh.rank)
        rows = [torch.randint(-9, 9, (numel,), generator=generator).to(dtype) for _ in range(3)]
        waits = [mesh.start_sum(row) for row in rows]
        told = mesh.exchange("tell", bytes([mesh.rank]) * (mesh.rank + 1))
        assert [wait() for wait in waits] == [True] * 3  # they are finite
        return rows, told

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


@pytest.mark.parametrize("numel", [1, 5000, 3_000_001])
def test_sums_that_travel_as_bf16_take_half_the_bytes_and_are_equal_everywhere(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = []
    put = Sockets.put
    monkeypatch.setattr(
        Sockets, "put", lambda self, rank, data: (num_bytes.append(memoryview(data).nbytes), put(self, rank, data))[1]
    )

    def row(rank: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank))

    def work(mesh: Mesh, dtype: torch.dtype | None) -> torch.Tensor:
        own = row(mesh.rank)
        assert mesh.start_sum(own, dtype)()
        return own

    def summed(dtype: torch.dtype | None) -> tuple[list[torch.Tensor], int]:
        num_bytes.clear()
        everyone = meshes(3)
        try:
            with ThreadPoolExecutor(3) as threads:
                sums = list(threads.map(work, everyone, [dtype] * 3))
        finally:
            for mesh in everyone:
                mesh.close()
        return sums, sum(each for each in num_bytes if each != _HEAD.size + _NOTE_BYTES)

    sums, num_narrow = summed(torch.bfloat16)
    expected = sum(row(rank).bfloat16().float() for rank in range(3)).bfloat16().float()
    assert all(torch.equal(each, expected) for each in sums)
    assert 2 * num_narrow == pytest.approx(summed(None)[1], rel=1e-3) or numel * 4 <= _SMALL_BYTES


def test_workers_that_sum_as_different_types_are_told_so() -> None:
    def work(mesh: Mesh) -> str:
        with pytest.raises(CollectiveError) as caught:
            mesh.start_sum(torch.ones(5), torch.bfloat16 if mesh.rank else None)()
        return str(caught.value)

    both = meshes(2)
    try:
        with ThreadPoolExecutor(2) as threads:
            messages = list(threads.map(work, both))
    finally:
        for mesh in both:
            mesh.close()
    assert all("start_sum as torch.bfloat16 of float32" in each for each in messages)


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
