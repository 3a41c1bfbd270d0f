"""The clock that stands still while this process does, scripted and in a process that is really stopped."""

import asyncio
import signal
import time
from contextlib import closing

import pytest

from stratagem import _clock
from stratagem._clock import Clock
from tests.cluster.tasks import TaskProcess

WAITING = {"waiting": True}


def test_clock_counts_two_looks_at_most_at_once() -> None:
    now = [100.0]
    clock = Clock(0.25, lambda: now[0])
    read = []
    for elapsed_s in (0.0, 0.25, 0.5, 0.75, 1000.0, 0.125):
        now[0] += elapsed_s
        read.append(clock.now_s())
    assert read == [0.0, 0.25, 0.75, 1.25, 1.75, 1.875]


def test_timeout_ends_what_lasts_too_long_and_nothing_else() -> None:
    async def wait() -> str:
        async with _clock.timeout(60.0):
            await asyncio.sleep(0)
        async with _clock.timeout(0.05):
            await asyncio.get_running_loop().create_future()
        return "unreachable"

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


@pytest.mark.parametrize("wait", ["wait_in_slices", "wait_with_timeout"])
def test_wait_does_not_count_the_time_of_a_stop(forked_tasks: None, wait: str) -> None:
    with closing(TaskProcess(program="tests.waiting_program")) as process:
        process.send(f"{wait}(limit_s=2.0)")
        assert process.answer() == WAITING
        process.signal(signal.SIGSTOP)
        while process.has_answered():
            assert process.answer() == WAITING
        time.sleep(3.0)  # the fault itself: longer than the wait may last
        process.signal(signal.SIGCONT)
        for _ in range(3):
            assert process.answer() == WAITING
        process.send("what is waited for")
        while (answer := process.answer()) == WAITING:
            pass
        assert answer == {"value": "it came"}
