"""Waits for its next line and says so again and again, in a process of its own that a test may stop."""

import asyncio
import select
import sys

from stratagem import _clock
from stratagem.collectives import waiting
from tests.cluster.task_program import main


def wait_in_slices(limit_s: float) -> str:
    """As replicas wait for each other."""

    def attend(waited_s: float) -> None:
        _say_that_it_waits()
        if waited_s > limit_s:
            raise TimeoutError(f"waited {waited_s} s")

    waiting.wait_in_slices(lambda slice_s: bool(select.select([sys.stdin], [], [], slice_s)[0]), attend)
    sys.stdin.readline()
    return "it came"


def wait_with_timeout(limit_s: float) -> str:
    """As tasks wait for messages."""

    async def say_so() -> None:
        while True:
            await asyncio.sleep(0.1)
            _say_that_it_waits()

    async def wait() -> None:
        came = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), came.set)
        saying = asyncio.create_task(say_so())
        async with _clock.timeout(limit_s):
            await came.wait()
        saying.cancel()

    asyncio.run(wait())
    sys.stdin.readline()
    return "it came"


def _say_that_it_waits() -> None:
    print('{"waiting": true}', flush=True)


if __name__ == "__main__":
    main(globals())
