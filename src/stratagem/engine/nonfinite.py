"""Says which replicas had gradients that are not finite, and how often that may happen."""

from collections.abc import Sequence
from typing import final

from stratagem._caller import warn_caller
from stratagem.errors import NonFiniteGradientError, StratagemWarning

_MAX_IN_A_ROW = 10


@final
class NonFinite:
    """Counts the updates in a row that were skipped.

    Args:
        on_nonfinite: What the strategy was told: `raise` lets none pass.
    """

    def __init__(self, on_nonfinite: str) -> None:
        self._on_nonfinite = on_nonfinite
        self._num_in_a_row = 0

    def judge(self, skipped: Sequence[tuple[int, str]], *, updated: bool, run_number: int) -> None:
        """Warns of an update that was skipped in a run, or raises.

        Args:
            skipped: The replicas and parameters to blame; none if nothing was skipped.
            updated: Whether an update was made.
            run_number: Which run it was.
        """
        if not skipped:
            self._num_in_a_row = 0 if updated else self._num_in_a_row
            return
        self._num_in_a_row += 1
        where = "; ".join(f"replica {rank}, first in {label!r}" for rank, label in skipped)
        text = f"non-finite gradient in {where}, run {run_number}; update skipped"
        if self._on_nonfinite == "raise" or self._num_in_a_row >= _MAX_IN_A_ROW:
            raise NonFiniteGradientError(
                f"{text}. It was number {self._num_in_a_row} in a row; lower the learning rate, clip gradients, or "
                f"look at the data of that run"
            )
        warn_caller(f"{text} ({self._num_in_a_row} of {_MAX_IN_A_ROW} allowed in a row)", StratagemWarning)
