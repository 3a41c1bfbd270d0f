"""Changes to shared memory are whole or undone, whoever is killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from stratagem.parameters.local.board import Board
from stratagem.parameters.local.journal import Journal
from stratagem.parameters.local.locks import Locks
from stratagem.processes.region import PAGE_BYTES, Region

PATIENCE_S = 20.0


class Memory:
    """A vector in shard 0 and a table in shard 1."""

    def __init__(self, *, undoes: bool = True) -> None:
        self.board, self.locks = Board.create(), Locks(Region.create(PAGE_BYTES))
        self.journal = Journal(self.board, self.locks, undoes=undoes)
        vector, table = Region.create(4 * 1000), Region.create(4 * 50 * 4)
        self.vector = self.journal.new_target(0, 0, vector, torch.float32, (1000,))
        self.table = self.journal.new_target(1, 1, table, torch.float32, (50, 4))
        self.journal.targets += [self.vector, self.table]
        self.rows = torch.tensor([3, 40])

    def change(self, worker: int, between: Callable[[], object] = lambda: None) -> None:
        """Adds 1 to a part of the vector and to two rows of the table."""
        plan = [(self.vector, (10, 500)), (self.table, self.rows)]
        with self.journal.writing([0, 1]), self.journal.change([0, 1], worker, plan):
            self.vector.live[10:500] += 1
            between()
            self.table.live[self.rows] += 1

    def assert_changed(self, times: int) -> None:
        """Looks as somebody does who holds the locks."""
        for shard in (0, 1):
            with self.journal.reading(shard):
                pass
        expected = torch.zeros(1000)
        expected[10:500] = times
        assert torch.equal(self.vector.live, expected)
        assert self.table.live.sum() == times * 8
        assert (self.table.live[self.rows] == times).all()


def in_a_fork(function: Callable[[], object]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(PATIENCE_S)
    code = process.exitcode
    process.close()
    return code


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_change_that_is_killed_is_undone_by_whoever_comes_next() -> None:
    memory = Memory()
    memory.change(0)
    assert in_a_fork(lambda: memory.change(1, kill_oneself)) == -signal.SIGKILL
    assert memory.vector.live[10] == 2  # as it was left
    memory.assert_changed(1)
    memory.change(2)
    memory.assert_changed(2)


def test_change_that_is_killed_stays_as_it_is_where_nothing_is_undone() -> None:
    memory = Memory(undoes=False)
    memory.change(0)
    assert in_a_fork(lambda: memory.change(1, kill_oneself)) == -signal.SIGKILL
    for shard in (0, 1):
        with memory.journal.reading(shard):
            pass
    assert (memory.vector.live[10].item(), memory.table.live[3, 0].item()) == (2.0, 1.0)
    assert memory.board.committed[1] == memory.board.pushing[1] == 1  # nobody makes it once more
    assert memory.vector.saved.sum() == 0


def test_change_that_was_declared_done_stays() -> None:
    memory = Memory()

    def die_at_the_end() -> None:
        committed = memory.board.committed

        class Dying:
            def __setitem__(self, worker: int, number: int) -> None:
                committed[worker] = number
                kill_oneself()

        memory.board.committed = Dying()  # type: ignore[assignment]
        memory.change(1)

    assert in_a_fork(die_at_the_end) == -signal.SIGKILL
    assert memory.board.dirty[:2].tolist() == [2, 2]
    memory.assert_changed(1)


def test_change_that_fails_is_undone_at_once() -> None:
    memory = Memory()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        memory.change(0, fail)
    memory.assert_changed(0)
    memory.change(0)
    memory.assert_changed(1)


def test_lock_of_a_dead_process_is_free() -> None:
    memory = Memory()

    def hold_and_die() -> None:
        with memory.locks.held(0):
            kill_oneself()

    assert in_a_fork(hold_and_die) == -signal.SIGKILL
    with memory.locks.held(0):
        pass


@pytest.mark.parametrize("is_shared", [False, True])
def test_who_waits_can_end_the_holder_of_a_lock(is_shared: bool) -> None:
    memory, context = Memory(), multiprocessing.get_context("fork")
    is_held = context.Event()

    def hold() -> None:
        with memory.locks.held(3, shared=is_shared):
            is_held.set()
            time.sleep(PATIENCE_S)

    holder = context.Process(target=hold)
    holder.start()
    assert is_held.wait(PATIENCE_S)
    told: list[int] = []

    def end(process: int, waited_s: float) -> None:
        if process and not told:
            os.kill(process, signal.SIGKILL)
        told.append(process)

    memory.locks.while_waiting = end
    with memory.locks.held(3):
        pass
    assert told[0] == holder.pid
    assert set(told) <= {holder.pid, 0}  # 0 when it has just gone
    holder.join(PATIENCE_S)
    assert holder.exitcode == -signal.SIGKILL
    holder.close()
