"""Lets the launchers of one run meet: which machine brings which tasks, who has failed, who is done.

Owns what launchers tell each other, through a store that they share; one machine has that store to
itself. It is the rendezvous that torch's elastic agent asks for; its own would listen on every
interface and load objects that a stranger could have sent.
"""

import time
from collections.abc import Callable, Sequence
from typing import final

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.environment import Offer
from stratagem.cluster.launch.failures import Failure
from stratagem.cluster.launch.plan import Machine
from stratagem.errors import LaunchError

_POLL_S = 0.05
_LOOK_S = 0.25


@final
class Rendezvous(RendezvousHandler):
    """Where the launchers of all machines meet before each start of the tasks.

    Args:
        store: Shared by all launchers.
        machine: Which of them this is.
        offer: What this machine brings.
        interrupts: Ends waiting when the user asks to stop.
        raise_if_lost: Raises when another launcher is gone.
    """

    def __init__(
        self,
        store: Store,
        *,
        machine: Machine,
        offer: Offer,
        interrupts: CtrlC,
        raise_if_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._machine = machine
        self._offer = offer
        self._interrupts = interrupts
        self._raise_if_lost = raise_if_lost
        self._round = 0
        self._trained = False
        self._num_trained = 0
        self._elsewhere: list[Failure] = []
        self._next_look = 0.0
        self.offers: Sequence[Offer] = ()

    # What torch's agent asks

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until every machine has brought its offer for the next start."""
        self._round += 1
        self._trained, self._num_trained, self._elsewhere = False, 0, []
        self._store.set(self._key("offer", self._machine.rank), self._offer.to_json())
        self._store.add(self._key("offers"), 1)
        deadline = time.monotonic() + self._machine.join_timeout_s
        keys = [self._key("offer", rank) for rank in range(self._machine.count)]
        while self._store.add(self._key("offers"), 0) < self._machine.count:
            self._wait(deadline, keys)
        self.offers = [Offer.from_json(text) for text in self._store.multi_get(keys)]
        host, _, port = self.offers[0].master.rpartition(":")
        return RendezvousInfo(
            PrefixStore(f"round {self._round}", self._store),
            self._machine.rank,
            self._machine.count,
            RendezvousStoreInfo(host, int(port)),
        )

    def get_backend(self) -> str:
        return "stratagem"

    def get_run_id(self) -> str:
        return self.offers[0].run_id if self.offers else self._offer.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: a run ends by its tasks."""

    def num_nodes_waiting(self) -> int:
        return 0  # the number of machines is fixed

    def shutdown(self) -> bool:
        return True

    # What launchers tell each other

    def report(self, failure: Failure) -> None:
        """Tells the others that a task of this machine has failed."""
        self._store.set(self._key("failure", self._machine.rank), failure.to_json())
        self._store.add(self._key("failures"), 1)

    def failures_elsewhere(self) -> list[Failure]:
        """What the others have reported since the last start."""
        self._raise_if_lost()
        self._look()
        return self._elsewhere

    def all_trained(self) -> bool:
        """Says that this machine has no training task left; whether that is so everywhere."""
        if not self._trained:
            self._trained = True
            self._num_trained = self._store.add(self._key("trained"), 1)
        self._look()
        return self._num_trained >= self._machine.count

    def part(self, timeout_s: float) -> None:
        """Says that this machine is done; the first one waits for the others, which need its store until then."""
        self._store.add(self._key("done"), 1)
        deadline = time.monotonic() + timeout_s
        while self._machine.rank == 0 and self._store.add(self._key("done"), 0) < self._machine.count:
            if time.monotonic() > deadline:
                return
            self._interrupts.raise_if_asked()
            time.sleep(_POLL_S)

    def _look(self) -> None:
        """Asks what the others have said, now and then: all ask the store of the first machine."""
        if self._machine.count == 1 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        self._num_trained = self._store.add(self._key("trained"), 0)
        if self._store.add(self._key("failures"), 0):
            keys = [self._key("failure", rank) for rank in range(self._machine.count) if rank != self._machine.rank]
            self._elsewhere = [Failure.from_json(self._store.get(key)) for key in keys if self._store.check([key])]

    def _wait(self, deadline: float, keys: list[str]) -> None:
        self._interrupts.raise_if_asked()
        self._raise_if_lost()
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise LaunchError(
                f"machine {', '.join(missing)} of {self._machine.count} has not come to start again after "
                f"{self._machine.join_timeout_s:g} s; its tasks may take long to end. Raise --join-timeout, or lower "
                f"--grace there"
            )
        time.sleep(_POLL_S)

    def _key(self, *parts: str | int) -> str:
        return "/".join(map(str, (self._round, *parts)))
