"""Tells the user which replica the others keep waiting for."""

import statistics
import time
from collections.abc import Sequence
from typing import final

from stratagem._caller import warn_caller
from stratagem.errors import StratagemWarning

_RATIO = 2.0
_LEAST_DIFFERENCE_S = 0.02
_NUM_RUNS = 20
_PERIOD_S = 60.0


@final
class Stragglers:
    """Compares how long replicas compute, and warns, at most once a minute, if one is always far slower."""

    def __init__(self) -> None:
        self._slowest: int | None = None
        self._num_in_a_row = 0
        self._warned_at = -_PERIOD_S

    def note(self, busy_s: Sequence[float], counts: Sequence[int] | None) -> None:
        """Takes in one run.

        Args:
            busy_s: How long each replica computed, without its waits for others.
            counts: How many examples each replica had; those without any are not compared.
        """
        ranks = [rank for rank in range(len(busy_s)) if counts is None or counts[rank]]
        if len(ranks) < 2:
            return
        slowest = max(ranks, key=lambda rank: busy_s[rank])
        others_s = statistics.median(busy_s[rank] for rank in ranks if rank != slowest)
        far = busy_s[slowest] > max(_RATIO * others_s, others_s + _LEAST_DIFFERENCE_S)
        self._num_in_a_row = self._num_in_a_row + 1 if far and slowest == self._slowest else int(far)
        self._slowest = slowest
        if self._num_in_a_row >= _NUM_RUNS and time.monotonic() - self._warned_at >= _PERIOD_S:
            self._warned_at = time.monotonic()
            warn_caller(
                f"replica {slowest} is the slowest: it computes {busy_s[slowest] / max(others_s, 1e-9):.1f} times as "
                f"long as the others, which wait for it in every run; look for other programs on its cores, or for "
                f"work that only it has",
                StratagemWarning,
            )
