"""Decides whether a training that has lost a process is started again.

Owns the count and the words; what a restart does is the Estimator's.
"""

import time
import traceback
from collections.abc import Callable
from typing import NamedTuple, final

from stratagem.errors import LostError
from stratagem.training.estimator.run_config import FROM_CHECKPOINT, RunConfig

PERIOD_S = 600.0


class _Loss(NamedTuple):
    at_s: float
    error: LostError


@final
class Restarts:
    """The restarts of one training.

    Args:
        config: Whether there may be any, and how many in ten minutes.
        clock: Tells the time.
    """

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = config.max_restarts if config.restart == FROM_CHECKPOINT else 0
        self._clock = clock
        self._began_s = clock()
        self._losses: list[_Loss] = []

    def num_left_after(self, error: LostError) -> int:
        """Notes a loss; how many restarts may follow the one that it leads to.

        Raises:
            LostError: There may be none; the first of those that led here, with a list of them.
        """
        if not self._max:
            raise error
        # The models of a session that is over must not stay in memory with its error.
        traceback.clear_frames(error.__traceback__)
        now_s = self._clock()
        self._losses = [each for each in self._losses if now_s - each.at_s <= PERIOD_S] + [_Loss(now_s, error)]
        num_left = self._max - len(self._losses)
        if num_left >= 0:
            return num_left
        first = self._losses[0].error
        lines = [
            f"  {each.at_s - self._began_s:.0f} s: {type(each.error).__name__}: {each.error}" for each in self._losses
        ]
        restarts = "1 restart" if self._max == 1 else f"{self._max} restarts"
        first.add_note("\n".join([f"gave up after {restarts} in {PERIOD_S:.0f} s:", *lines]))
        raise first from None
