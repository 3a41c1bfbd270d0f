"""What a program may choose for its training with parameter servers of a cluster, checked and put for servers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, final

from stratagem._checks import require_seconds, require_seconds_if_given
from stratagem.errors import StrategyError
from stratagem.parameters.consistency import Async, BoundedStaleness, Consistency, RateOf, Synchronous
from stratagem.parameters.network.compression import Compression
from stratagem.parameters.network.server.pacing import Pacing
from stratagem.parameters.partitioning import Partitioner

OF_CLUSTERS: Final = ("compression", "variable_partitioner", "join_timeout_s", "heartbeat_timeout_s", "shares_memory")
"""What has no meaning on one machine."""

# Beyond that a rule for staleness gives what it gives for the last.
_NUM_RATES: Final = 128


@final
@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """What all tasks of a training agree on, and how each behaves.

    Args:
        max_ahead: How many pushes a task may be ahead of the slowest; `None` for any.
        rates: The factors of the learning rate of a push, by its staleness; none for 1.
        backup_workers: Of synchronous steps: how many gradients may be missing; `None` where no steps are shared.
        variable_partitioner: Cuts large variables; by default none is cut.
        compression: How gradients are made smaller on the wire.
        on_nonfinite: What a gradient that is not finite does to its step: `skip` or `raise`.
        join_timeout_s: How long to wait for servers and chief.
        stall_timeout_s: How long a task waits for others that it may not be ahead of.
        heartbeat_timeout_s: How long a task that its machine answers for may give no sign of life; by default what
            `stratagem run --heartbeat-timeout` says, or 30 s.
        shares_memory: Whether servers on this machine get and give tensors through memory, not in frames.
        verbose: Whether to print the staleness of this task's pushes at the end.
    """

    max_ahead: int | None = None
    rates: tuple[float, ...] = ()
    backup_workers: int | None = None
    variable_partitioner: Partitioner | None = None
    compression: Compression | None = None
    on_nonfinite: str = "skip"
    join_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    heartbeat_timeout_s: float | None = None
    shares_memory: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        require_seconds(join_timeout_s=self.join_timeout_s, stall_timeout_s=self.stall_timeout_s)
        require_seconds_if_given(heartbeat_timeout_s=self.heartbeat_timeout_s)
        if self.on_nonfinite not in ("skip", "raise"):
            raise StrategyError(f"on_nonfinite is 'skip' or 'raise' between machines, got {self.on_nonfinite!r}")

    @classmethod
    def of(cls, *, consistency: Consistency | None = None, **options: Any) -> "ClusterOptions":
        """Those that a program gave to `ParameterServerStrategy`.

        Raises:
            StrategyError: One of them has no meaning in a task of a cluster.
        """
        of_consistency = ("max_ahead", "rates", "backup_workers")
        known = [each.name for each in dataclasses.fields(cls) if each.name not in of_consistency]
        if wrong := next((name for name in options if name not in known), None):
            raise StrategyError(
                f"{wrong} goes with num_workers=; a task of a cluster takes consistency, {', '.join(known)}"
            )
        if consistency is not None and not isinstance(consistency, Async | BoundedStaleness | Synchronous):
            raise StrategyError(
                f"consistency is Async(), BoundedStaleness(k) or Synchronous(backup_workers=b), got {consistency!r}"
            )
        partitioner = options.get("variable_partitioner")
        if partitioner is not None and not callable(getattr(partitioner, "num_parts", None)):
            raise StrategyError(
                f"variable_partitioner is a MinSizePartitioner, MaxSizePartitioner or FixedShardsPartitioner, got "
                f"{partitioner!r}"
            )
        if isinstance(options.get("compression"), str):
            options["compression"] = Compression(options["compression"])
        rates = () if consistency is None or isinstance(consistency, Synchronous) else _rates(consistency.rate_of)
        bound = consistency.max_staleness if isinstance(consistency, BoundedStaleness) else None
        backups = consistency.backup_workers if isinstance(consistency, Synchronous) else None
        return cls(bound, rates, backups, **options)

    def pacing(self, members: Sequence[int]) -> Pacing:
        """The same for servers, given which tasks train, by number.

        Raises:
            StrategyError: There would be none whose gradients count.
        """
        if self.backup_workers is None:
            return Pacing(self.max_ahead, None, tuple(members), self.stall_timeout_s, self.rates)
        num_workers = len(members)
        if self.backup_workers >= num_workers:
            raise StrategyError(
                f"backup_workers={self.backup_workers} leaves none of {num_workers} workers whose gradients count; "
                f"have more workers"
            )
        return Pacing(None, num_workers - self.backup_workers, tuple(members), self.stall_timeout_s)


def _rates(rate_of: RateOf | None) -> tuple[float, ...]:
    """What a rule gives: no code is sent to parameter servers, but numbers are."""
    rates = tuple(float(rate_of(staleness)) for staleness in range(_NUM_RATES)) if rate_of is not None else ()
    for staleness, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate >= 0):
            raise StrategyError(f"rate_of gives a number from 0 up, got {rate} for a staleness of {staleness}")
    return rates
