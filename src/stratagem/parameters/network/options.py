"""What a program may choose for its training with parameter servers of a cluster, checked and put for servers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, final

from stratagem._checks import require_seconds, require_seconds_if_given
from stratagem.errors import StrategyError
from stratagem.parameters.consistency import Async, Consistency, chosen
from stratagem.parameters.network.compression import Compression
from stratagem.parameters.network.server.pacing import Pacing, RateTable
from stratagem.parameters.partitioning import Partitioner

OF_CLUSTERS: Final = ("compression", "variable_partitioner", "join_timeout_s", "heartbeat_timeout_s", "shares_memory")
"""What has no meaning on one machine."""


@final
@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """What all tasks of a training agree on, and how each behaves.

    Args:
        consistency: How far tasks may be apart; its `rate_of`, if it has one, is a `RateTable`.
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

    consistency: Consistency = dataclasses.field(default_factory=Async)
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
        known = [each.name for each in dataclasses.fields(cls)]
        if wrong := next((name for name in options if name not in known), None):
            raise StrategyError(f"{wrong} works with num_workers= only; a task of a cluster takes {', '.join(known)}")
        consistency = chosen(consistency)
        if consistency.rate_of is not None:
            consistency = dataclasses.replace(consistency, rate_of=RateTable.of(consistency.rate_of))  # type: ignore[type-var]  # one each
        partitioner = options.get("variable_partitioner")
        if partitioner is not None and not callable(getattr(partitioner, "num_parts", None)):
            raise StrategyError(
                f"variable_partitioner is a MinSizePartitioner, MaxSizePartitioner or FixedShardsPartitioner, got "
                f"{partitioner!r}"
            )
        if isinstance(options.get("compression"), str):
            options["compression"] = Compression(options["compression"])
        return cls(consistency, **options)

    def pacing(self, members: Sequence[int]) -> Pacing:
        """The same for servers, given which tasks train, by number.

        Raises:
            StrategyError: There would be none whose gradients count.
        """
        return Pacing(chosen(self.consistency, len(members)), tuple(members), self.stall_timeout_s)
