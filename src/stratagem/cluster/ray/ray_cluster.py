"""Describes the workers that Ray is to place: a value, checked when built.

Nothing of Ray is loaded here; it is when the workers are started.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, final

from stratagem._checks import require_seconds
from stratagem.errors import ClusterSpecError

PLACEMENTS: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_CLIENT: Final = "ray://"


@final
@dataclasses.dataclass(frozen=True)
class RayCluster:
    """Workers on the machines of a Ray cluster, driven by one program, which is the first of them.

    Args:
        num_workers: How many, this program included. Each has one replica.
        address: Where Ray is: `host:port` of its head, or `auto` for one on this machine. By default `RAY_ADDRESS`;
            without it a Ray of this machine alone is started, and shut down at the end.
        cpus_per_worker: What Ray reserves for each, and with how many threads it computes.
        gpus_per_worker: The same for GPUs; 1, or less for workers that share one.
        placement: How Ray spreads the workers over its machines: `PACK` on few of them, `SPREAD` over many;
            `STRICT_PACK` and `STRICT_SPREAD` if it must not be otherwise.
        runtime_env: What the workers need besides, as Ray takes it: `{"pip": [...]}`, `{"env_vars": {...}}`.
        placement_timeout_s: How long to wait until Ray has room for all.

    Raises:
        ClusterSpecError: An argument breaks a rule.

    Example:
        >>> RayCluster(num_workers=4, gpus_per_worker=1).worker_resources
        {'CPU': 1, 'GPU': 1}
    """

    num_workers: int
    _: dataclasses.KW_ONLY
    address: str | None = None
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    placement: str = "PACK"
    runtime_env: Mapping[str, Any] | None = None
    placement_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if type(self.num_workers) is not int or self.num_workers < 1:
            raise ClusterSpecError(f"num_workers is a whole number from 1 up, got {self.num_workers!r}")
        if not _is_number(self.cpus_per_worker) or self.cpus_per_worker < 0:
            raise ClusterSpecError(f"cpus_per_worker is a number from 0 up, got {self.cpus_per_worker!r}")
        if not _is_number(self.gpus_per_worker) or not 0 <= self.gpus_per_worker <= 1:
            raise ClusterSpecError(
                f"gpus_per_worker is from 0 to 1, since a worker has one replica, got {self.gpus_per_worker!r}; "
                f"for more GPUs ask for more workers"
            )
        require_seconds(ClusterSpecError, placement_timeout_s=self.placement_timeout_s)
        if self.placement not in PLACEMENTS:
            raise ClusterSpecError(f"placement is one of {', '.join(PLACEMENTS)}, got {self.placement!r}")
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise ClusterSpecError(f"runtime_env is a mapping, such as {{'pip': [...]}}, got {self.runtime_env!r}")
        if self.address is not None and (not isinstance(self.address, str) or not self.address):
            raise ClusterSpecError(f"address is host:port of Ray's head, or 'auto', got {self.address!r}")
        if self.address is not None and self.address.startswith(_CLIENT):
            raise ClusterSpecError(
                f"address {self.address!r} is for programs outside the cluster, and this program is one of the "
                f"workers; run it on a machine of the cluster (ray job submit) with address='auto'"
            )

    @property
    def worker_resources(self) -> dict[str, float]:
        """What Ray reserves for one worker."""
        wanted = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}
        return {kind: amount for kind, amount in wanted.items() if amount}

    @property
    def num_threads(self) -> int:
        """With how many threads each worker computes."""
        return max(1, int(self.cpus_per_worker))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
