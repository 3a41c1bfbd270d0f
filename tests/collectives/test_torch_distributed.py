"""What only the collective of torch.distributed does; what all do is in tests/contracts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.errors import CollectiveError
from tests.collectives.harness import (
    PATIENCE_S,
    Replicas,
    addresses,
    num_threads,
    same_bits,
    seeded,
    sockets,
    started,
)

LOOPBACK = "0100007F"
BUCKETS = (1, 1000, 300_001, 0, 77)


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with started(3) as processes:
        yield processes


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def connected(rank: int, size: int, path: str) -> TorchDistributed:
    collective = TorchDistributed(rank, size, path=path, timeout_s=PATIENCE_S)
    collective.start()
    return collective


def bucket(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    return torch.randn(numel, generator=seeded(numel, rank), dtype=torch.float64).to(dtype)


def look_around(rank: int, size: int, path: str) -> dict[str, Any]:
    before = num_threads(), sockets()
    collective = connected(rank, size, path)
    collective.all_reduce(torch.ones(3))
    collective.start_all_reduce(torch.ones(3)).wait()
    found = {
        "addresses": addresses(),
        "default group": torch.distributed.is_initialized(),
        "more": (num_threads() > before[0], sockets() > before[1]),
    }
    collective.barrier()
    collective.close()
    return {**found, "left": (num_threads() - before[0], sockets() - before[1])}


def test_gloo_is_bound_to_loopback_only(replicas: Replicas, path: str) -> None:
    for found in replicas.run(3, look_around, path):
        assert found["addresses"] == {LOOPBACK}


def test_default_group_of_the_user_is_not_touched(replicas: Replicas, path: str) -> None:
    assert not any(found["default group"] for found in replicas.run(2, look_around, path))


def test_close_leaves_no_socket_or_thread(replicas: Replicas, path: str) -> None:
    # Nor a file: torch removes it only if nobody lets go of the store at the same time, so that it lies in a folder
    # that whoever connects replicas removes (`engine/connecting`).
    for found in replicas.run(3, look_around, path):
        assert found["more"] == (True, True)
        assert found["left"] == (0, set())


def sum_buckets(rank: int, size: int, path: str, dtype: torch.dtype) -> list[torch.Tensor]:
    collective = connected(rank, size, path)
    tensors = [bucket(numel, dtype, rank) for numel in BUCKETS]
    handles = [collective.start_all_reduce(tensor) for tensor in tensors]
    # A call that waits finds its place behind those that are under way.
    one = collective.all_reduce(torch.ones(1))
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    collective.close()
    return [*tensors, one]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_buckets_are_summed_in_place_with_the_same_bits_each_time(
    replicas: Replicas, tmp_path: Path, dtype: torch.dtype
) -> None:
    runs = [replicas.run(3, sum_buckets, str(tmp_path / str(run)), dtype) for run in range(2)]
    for number, numel in enumerate(BUCKETS):
        first = runs[0][0][number]
        exact = torch.stack([bucket(numel, dtype, rank).to(torch.complex128) for rank in range(3)]).sum(0)
        torch.testing.assert_close(first, exact.to(dtype) if dtype.is_complex else exact.real.to(dtype))
        assert all(same_bits(first, result[number]) for run in runs for result in run)
    assert all(result[-1].item() == 3 for run in runs for result in run)


def test_start_all_reduce_returns_before_the_others_have_begun(replicas: Replicas, path: str, tmp_path: Path) -> None:
    # The other replica only begins when it sees this file, which is made after the call has returned.
    def begin_after_the_other(rank: int, size: int, path: str, sign: str) -> list[float]:
        collective = connected(rank, size, path)
        tensor = torch.ones(2)
        if rank == 0:
            handle = collective.start_all_reduce(tensor)
            Path(sign).touch()
        else:
            while not Path(sign).exists():
                os.sched_yield()
            handle = collective.start_all_reduce(tensor)
        handle.wait()
        collective.close()
        return tensor.tolist()

    assert replicas.run(2, begin_after_the_other, path, str(tmp_path / "sign")) == [[2.0, 2.0]] * 2


def test_start_all_reduce_names_both_sides_of_a_mismatch_and_does_no_harm(replicas: Replicas, path: str) -> None:
    def mismatch(rank: int, size: int, path: str) -> tuple[str, list[float]]:
        collective = connected(rank, size, path)
        wrong = collective.start_all_reduce(torch.ones(10 + 1000 * rank))
        right = torch.ones(1)
        handle = collective.start_all_reduce(right)
        try:
            wrong.wait()
            said = "nothing"
        except CollectiveError as error:
            said = str(error)
        handle.wait()
        collective.close()
        return said, right.tolist()

    for said, right in replicas.run(2, mismatch, path):
        assert "replica 0 called start_all_reduce('sum') of float32 with shape (10,)" in said
        assert "replica 1 called start_all_reduce('sum') of float32 with shape (1010,)" in said
        assert right == [2.0]


def test_loss_of_a_replica_is_an_error_that_says_so(replicas: Replicas, path: str) -> None:
    def leave(rank: int, size: int, path: str) -> list[str]:
        collective = connected(rank, size, path)
        collective.barrier()  # both are connected before one of them leaves
        said = []
        if rank == 0:
            handle = collective.start_all_reduce(torch.ones(3))
            for call in (handle.wait, collective.barrier):
                try:
                    call()
                except CollectiveError as error:
                    said.append(str(error))
        collective.close()
        return said

    started_sum, barrier = replicas.run(2, leave, path)[0]
    assert started_sum.startswith("start_all_reduce('sum') of float32 with shape (3,) failed on replica 0")
    assert barrier.startswith("barrier failed on replica 0")
    assert "Another replica is gone, or did not come within 20 s (timeout_s)" in barrier


def test_a_sum_that_had_not_begun_when_the_collective_was_closed_says_so(replicas: Replicas, path: str) -> None:
    def close_early(rank: int, size: int, path: str, sign: str) -> str:
        collective = connected(rank, size, path)
        said = ""
        if rank == 0:
            handles = [collective.start_all_reduce(torch.ones(3)) for _ in range(3)]
            Path(sign).touch()  # the other one goes, which ends what is under way
            collective.close()
            try:
                handles[-1].wait()
            except CollectiveError as error:
                said = str(error)
        while not Path(sign).exists():
            os.sched_yield()
        collective.close()
        return said

    assert "had not begun when its collective was closed" in replicas.run(2, close_early, path, f"{path}.sign")[0]


def test_start_gives_up_and_says_who_is_missing_when_nobody_comes(path: str) -> None:
    collective = TorchDistributed(0, 2, path=path, timeout_s=0.2)
    with pytest.raises(CollectiveError, match=r"replica 0 did not reach all of the 2 replicas within 0\.2 s"):
        collective.start()


def test_calls_before_start_and_after_close_are_refused(path: str) -> None:
    collective = TorchDistributed(0, 1, path=path)
    with pytest.raises(CollectiveError, match=r"call start\(\) first"):
        collective.barrier()
    collective.start()
    assert collective.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    collective.close()
    collective.close()
    with pytest.raises(CollectiveError, match=r"call start\(\) first"):
        collective.start_all_reduce(torch.ones(2))


def test_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(CollectiveError, match=r"has mode drwxr-x---.*chmod 700"):
        TorchDistributed(0, 1, path=tmp_path / "store")
    with pytest.raises(CollectiveError, match="No such file"):
        TorchDistributed(0, 1, path=tmp_path / "absent" / "store")


def test_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(CollectiveError, match="only their user can enter"):
        TorchDistributed(0, 1, path=tmp_path / "link" / "store")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2),
        torch.ones(4)[::2],
        torch.ones(2, dtype=torch.int32),
        torch.ones(2, requires_grad=True),
    ],
    ids=["not flat", "not contiguous", "integers", "with gradient"],
)
def test_start_all_reduce_refuses_what_it_cannot_sum_in_place(path: str, tensor: torch.Tensor) -> None:
    with pytest.raises(CollectiveError, match="use all_reduce for others"):
        TorchDistributed(0, 1, path=path).start_all_reduce(tensor)


def test_tensors_of_other_devices_are_refused(path: str) -> None:
    collective = connected(0, 1, path)
    with pytest.raises(CollectiveError, match="got one on 'meta'; copy it to the CPU first"):
        collective.all_reduce(torch.ones(2, device="meta"))
    collective.close()
