"""Connects the replicas of one strategy by torch.distributed, for sums that go on beside the computation.

Owns the life of that connection in one replica. Torch's waits know neither that another replica has
failed nor that it has died: while one lasts, the signals are asked, as in every other wait. What a
failure has left half done is undone by cutting the connection and making a new one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch

from stratagem.collectives.signals import PeerAborted
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.errors import CollectiveError

if TYPE_CHECKING:
    from stratagem.strategies.runtime import Runtime

_START_TIMEOUT_S = 60.0
# Whether others are late is for the signals to judge; a connection that is lost is an error at once.
_EXCHANGE_TIMEOUT_S = 24 * 3600.0


@final
class Link:
    """One replica's connection to the others.

    Args:
        runtime: The replica.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._collective: TorchDistributed | None = None
        self._spoiled = False

    @property
    def connected(self) -> bool:
        return self._collective is not None

    def connect(self, path: str) -> None:
        """Meets the others in a file that is not there yet; all come at once."""
        collective = TorchDistributed(
            self._runtime.rank,
            self._runtime.settings.size,
            path=path,
            timeout_s=_EXCHANGE_TIMEOUT_S,
            start_timeout_s=_START_TIMEOUT_S,
            attend=self._attend,
        )
        try:
            collective.start()
            # The first sum is what connects NCCL, which waits for all; now all are sure to come.
            collective.start_all_reduce(torch.zeros(1, device=self._runtime.device)).wait()
        except BaseException:
            self._runtime.signals.abort()
            raise
        self._collective, self._spoiled = collective, False

    def disconnect(self) -> None:
        """Cuts the connection, which ends what other replicas have under way; all do so at once."""
        if self._collective is not None:
            self._collective.close()
            self._collective = None

    def spoil(self) -> None:
        """Forbids sums until the next connection: this replica has begun some that others may not."""
        self._spoiled = True

    def start_sum(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to sum a flat tensor over the replicas, in place; the result waits for the sum."""
        if self._collective is None or self._spoiled:
            raise CollectiveError(
                "an earlier backward pass failed halfway, when replicas had begun to sum its gradients; let its error "
                "end the run"
            )
        return self._collective.start_sum(flat)

    def _attend(self, waited_s: float) -> None:
        """While torch waits: what the signals do while they wait."""
        signals = self._runtime.signals
        if signals.aborted:
            raise PeerAborted("another replica has failed")
        signals.attend(waited_s, [rank for rank in range(signals.size) if rank != signals.rank])
