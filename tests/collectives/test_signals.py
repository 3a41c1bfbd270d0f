"""How replicas of one machine wait for each other, in real processes."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stratagem.collectives.signals import PeerAborted, Signals
from stratagem.processes.region import Region
from tests.collectives.harness import Replicas, meeting_point, shared, started

SIZE = 4
SLEEP_S = 1.0


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with started(SIZE) as processes:
        yield processes


@pytest.fixture
def region() -> Region:
    (control,) = shared(Signals.num_bytes(SIZE))
    Signals(control, 0, SIZE).reset()
    return control


def test_barrier_shows_what_all_wrote_before_it(replicas: Replicas, region: Region) -> None:
    def count(rank: int, size: int, region: Region) -> list[list[int]]:
        signals = meeting_point(region, rank, size)
        seen = []
        for turn in range(300):
            signals.put_flag(turn % 2, turn * 10 + rank)
            signals.barrier()
            seen.append(signals.flags(turn % 2))
        return seen

    wanted = [[turn * 10 + rank for rank in range(SIZE)] for turn in range(300)]
    assert replicas.run(SIZE, count, region) == [wanted] * SIZE


def test_exchange_flag_gives_everyone_the_number_of_everyone(replicas: Replicas, region: Region) -> None:
    def exchange(rank: int, size: int, region: Region) -> list[int]:
        return meeting_point(region, rank, size).exchange_flag(3, -(2**40) - rank)

    assert replicas.run(SIZE, exchange, region) == [[-(2**40) - rank for rank in range(SIZE)]] * SIZE


def test_notes_arrive_whole_or_cut_to_the_space_there_is(replicas: Replicas, region: Region) -> None:
    def write(rank: int, size: int, region: Region) -> list[list[str]]:
        signals = meeting_point(region, rank, size)
        read = []
        for text in (f"long {'x' * 1000}", f"größe {rank}", ""):
            signals.put_note(text)
            signals.barrier()
            read.append(signals.notes())
            signals.barrier()
        return read

    for long, short, empty in replicas.run(SIZE, write, region):
        assert [len(note) for note in long] == [511] * SIZE
        assert short == [f"größe {rank}" for rank in range(SIZE)]
        assert empty == [""] * SIZE


def test_those_who_wait_use_next_to_no_processor_time(replicas: Replicas, region: Region) -> None:
    def wait_for_the_last(rank: int, size: int, region: Region) -> float:
        signals = meeting_point(region, rank, size)
        signals.barrier()
        if rank == size - 1:
            time.sleep(SLEEP_S)  # the fault itself: a replica that keeps the others waiting
        before = time.process_time()
        signals.barrier()
        return time.process_time() - before

    used_s = replicas.run(SIZE, wait_for_the_last, region)
    assert max(used_s) < 0.1 * SLEEP_S, used_s


def test_attend_is_called_during_the_wait_with_who_is_missing(replicas: Replicas, region: Region) -> None:
    def look_after_the_world(rank: int, size: int, region: Region) -> list[Any]:
        calls: list[Any] = []
        signals = meeting_point(region, rank, size)

        def attend(waited_s: float, missing: list[int]) -> None:
            calls.append((waited_s, missing))
            signals.put_flag(5, len(calls))

        if rank == 0:
            while signals.flags(5)[1] < 3:  # it comes when the other has been attended to three times
                os.sched_yield()
        else:
            signals.attend = attend
        signals.barrier()
        return calls

    _, calls = replicas.run(2, look_after_the_world, region)
    assert len(calls) >= 3
    assert {tuple(missing) for _, missing in calls} == {(0,)}
    assert [waited_s for waited_s, _ in calls] == sorted(waited_s for waited_s, _ in calls)


def test_error_of_attend_ends_the_wait(region: Region) -> None:
    class GoneError(Exception):
        pass

    def report(waited_s: float, missing: list[int]) -> None:
        raise GoneError(missing)

    with pytest.raises(GoneError, match=r"\[1\]"):
        Signals(region, 0, 2, report).barrier()


def test_abort_wakes_all_who_wait_and_lasts_until_reset(replicas: Replicas, region: Region) -> None:
    def wait_or_abort(rank: int, size: int, region: Region) -> list[str]:
        signals = meeting_point(region, rank, size)
        said = []
        if rank == size - 1:
            while signals.flags(1)[:rank] != [1] * rank:  # until all others have waited for a while
                os.sched_yield()
            signals.abort()
        else:
            signals.attend = lambda *_: signals.put_flag(1, 1)
        for _ in range(2):
            try:
                signals.barrier()
                said.append("went on")
            except PeerAborted as error:
                said.append(str(error))
        return [*said, str(signals.aborted)]

    for said in replicas.run(SIZE, wait_or_abort, region):
        assert said == ["another replica has failed", "another replica has failed", "True"]
    Signals(region, 0, SIZE).reset()
    test_barrier_shows_what_all_wrote_before_it(replicas, region)


def test_a_replica_that_is_alone_never_waits(region: Region) -> None:
    signals = Signals(region, 0, 1)
    signals.barrier()
    assert signals.exchange_flag(0, 7) == [7]


def test_barrier_works_while_all_cores_are_busy(replicas: Replicas, region: Region) -> None:
    def work_unevenly(rank: int, size: int, region: Region) -> list[float]:
        signals = meeting_point(region, rank, size)
        board = torch.zeros(0)
        for turn in range(20):
            if turn % size == rank:
                board = torch.ones(200, 200) @ torch.ones(200, 200)
            signals.barrier()
        return board[0, :1].tolist()

    assert replicas.run(SIZE, work_unevenly, region) == [[200.0]] * SIZE
