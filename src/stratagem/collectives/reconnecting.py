"""Connects the replicas of one strategy by torch.distributed, for sums that go on beside the computation.

Owns the life of that connection in one replica. Torch's waits know neither that another replica has
failed nor that it has died: while one lasts, the signals are asked, as in every other wait. What a
failure has left half done is undone by cutting the connection and making a new one.

Replicas that share no memory, each on a machine of its own, exchange everything over it.
"""

from collections.abc import Callable
from typing import Any, final

import torch

from stratagem.collectives.collective import Collective
from stratagem.collectives.signals import PeerAborted, Signals
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.errors import CollectiveError

_START_TIMEOUT_S = 60.0
# Whether others are late is for the signals to judge; a connection that is lost is an error at once.
_EXCHANGE_TIMEOUT_S = 24 * 3600.0

# What a collective is told so that it finds the others under a name that is new: a store, an address.
Meet = Callable[[str], dict[str, Any]]


@final
class TorchLink:
    """One replica's connection to the others.

    Args:
        rank: Which replica.
        size: How many there are.
        device: Where it computes.
        signals: Where all meet.
        meet: Where replicas meet that share no memory; others meet in a file.
    """

    def __init__(self, rank: int, size: int, device: torch.device, signals: Signals, meet: Meet | None = None) -> None:
        self._rank, self._size, self._device, self._signals = rank, size, device, signals
        self._meet = meet
        self._collective: TorchDistributed | None = None
        self._talk: TorchDistributed | None = None
        self._spoiled = False

    @property
    def connected(self) -> bool:
        return self._collective is not None

    @property
    def talk(self) -> TorchDistributed:
        """For what is no sum: replicas that miss a gradient have begun fewer sums than others when they say so."""
        if self._talk is None:
            raise CollectiveError("the replicas are not connected; this is for code inside strategy.run")
        return self._talk

    def connect(self, path: str) -> None:
        """Meets the others in a file that is not there yet, or under a name that is new; all come at once."""
        collective = self._new(path)
        talk = self._new(f"{path}/talk") if self._meet is not None else None
        try:
            collective.start()
            # The first sum is what connects NCCL, which waits for all; now all are sure to come.
            collective.start_all_reduce(torch.zeros(1, dtype=torch.float32, device=self._device)).wait()
            if talk is not None:
                talk.start()
        except BaseException:
            self._signals.abort()
            raise
        self._collective, self._talk, self._spoiled = collective, talk, False

    def _new(self, path: str) -> TorchDistributed:
        return TorchDistributed(
            self._rank,
            self._size,
            **(self._meet(path) if self._meet is not None else {"path": path}),
            timeout_s=_EXCHANGE_TIMEOUT_S,
            start_timeout_s=_START_TIMEOUT_S,
            attend=self._attend,
        )

    def disconnect(self) -> None:
        """Cuts the connection, which ends what other replicas have under way; all do so at once."""
        open_ = [each for each in (self._collective, self._talk) if each is not None]
        if self._meet is not None:
            for each in open_:
                each.cut()  # a machine that is gone does not hang up
            self._signals.reset()
        for each in open_:
            each.close()
        self._collective = self._talk = None

    def spoil(self) -> None:
        """Forbids sums until the next connection: this replica has begun some that others may not."""
        self._spoiled = True

    def start_sum(self, flat: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        """Begins to sum a flat tensor over the replicas, in place; the result waits for the sum.

        Args:
            flat: The tensor.
            dtype: The type as which it travels; by default its own.
        """
        if self._collective is None or self._spoiled:
            raise CollectiveError(
                "an earlier backward pass failed halfway, when replicas had begun to sum its gradients; let its error "
                "end the run"
            )
        carrier = flat if dtype is None else flat.to(dtype)
        pending = self._collective.start_all_reduce(carrier)

        def wait_for_sum() -> torch.Tensor:
            pending.wait()
            return flat if carrier is flat else flat.copy_(carrier)

        return wait_for_sum

    def _attend(self, waited_s: float) -> None:
        """While torch waits: what the signals do while they wait."""
        signals = self._signals
        if signals.aborted:
            raise PeerAborted("another replica has failed")
        others = [rank for rank in range(self._size) if rank != self._rank]
        signals.attend(waited_s, others)


@final
class OverLink(Collective):
    """The collective of replicas that share no memory: that of their link, which a failure replaces."""

    def __init__(self, link: TorchLink, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._link = link

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._link.talk.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        return self._link.talk.broadcast(tensor, root)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._link.talk.all_gather(tensor)

    def barrier(self) -> None:
        self._link.talk.barrier()

    def close(self) -> None:
        """The link is closed by who has made it."""
