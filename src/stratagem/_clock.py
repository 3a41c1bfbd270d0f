"""Tells for how long something has lasted, by a clock that stands still while this process does.

Who waits for another process must not count the time during which it was stopped itself (Ctrl-Z and `fg`, SIGSTOP):
what came meanwhile is still to be read. Limits on silence and on waits are counted here; what users see as times of
day, and limits on meeting somebody for the first time, are not.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, final

_LOOKS: Final = 8


@final
class Clock:
    """The seconds since it was made during which this process ran.

    Args:
        look_s: How often somebody reads it. Where two readings are more than twice as far apart, the process stood
            still in between, and only so much is counted.
        monotonic: The clock that never stands still.
    """

    def __init__(self, look_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most_s = 2 * look_s
        self._monotonic = monotonic
        self._last_s = monotonic()
        self._now_s = 0.0

    def now_s(self) -> float:
        """Reads the clock."""
        now_s = self._monotonic()
        self._now_s += min(now_s - self._last_s, self._most_s)
        self._last_s = now_s
        return self._now_s


@contextlib.asynccontextmanager
async def timeout(limit_s: float) -> AsyncIterator[None]:
    """The same as `asyncio.timeout`, by this clock.

    Raises:
        TimeoutError: The block has lasted longer.
    """
    loop, look_s = asyncio.get_running_loop(), limit_s / _LOOKS
    clock = Clock(look_s)
    async with asyncio.timeout(None) as limit:
        next_look: asyncio.TimerHandle

        def look() -> None:
            nonlocal next_look
            left_s = limit_s - clock.now_s()
            if left_s > 0:
                next_look = loop.call_later(min(left_s, look_s), look)
            else:
                limit.reschedule(loop.time())

        next_look = loop.call_later(look_s, look)
        try:
            yield
        finally:
            next_look.cancel()
