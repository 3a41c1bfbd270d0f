"""Talks to all parameter servers of a client, in one thread of its own.

Owns the sockets while the client lives, signs of life, and that one lost server ends everything: no step
runs on half a model. What is asked is the client's.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, final

import zmq

from stratagem.cluster.liveness import Rhythm
from stratagem.errors import ClusterError
from stratagem.parameters.network import zmq_sockets
from stratagem.parameters.network.client.connection import Connection, EndedError, PendingReply

_LOOK_S: Final = 1.0
_LINGER_MS: Final = 1000


@final
class Talk:
    """All connections of a client.

    Args:
        name: Of the task, for messages.
        connections: To each server.
        rhythm: Of signs of life.
        explained: What an error at a server means, given its number.
    """

    def __init__(
        self,
        name: str,
        connections: Sequence[Connection],
        *,
        rhythm: Rhythm,
        explained: Callable[[int, Exception], Exception],
    ) -> None:
        self.context = zmq_sockets.new_context()
        self._name = name
        self._connections = connections
        self._rhythm = rhythm
        self._explained = explained
        self._bell = zmq_sockets.Bell()
        self._thread = threading.Thread(target=self._run, name=f"stratagem-{name}-ps", daemon=True)
        self._asked: list[tuple[int, PendingReply]] = []
        self._lock = threading.Lock()  # never held while anything waits
        self._ending: bool | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Begins to talk, over connections that are open."""
        self._thread.start()

    def ask(self, pendings: Mapping[int, PendingReply]) -> None:
        """Sends requests, each to the server of its number, without waiting."""
        with self._lock:
            self._asked += pendings.items()
        self._bell.ring()

    def settle(self, pendings: Mapping[int, PendingReply]) -> None:
        """Sends requests and waits until all are answered, well or not."""
        self.ask(pendings)
        self.wait(pendings)

    def wait(self, pendings: Mapping[int, PendingReply]) -> None:
        """Waits until all are answered, well or not."""
        for pending in pendings.values():
            while not pending.is_answered.wait(_LOOK_S):
                if not self._thread.is_alive():
                    pending.fail(self._error or ClusterError(f"{self._name} does not talk to its servers"))

    def finish(self, pendings: Mapping[int, PendingReply]) -> None:
        """Sends requests and waits until all are answered.

        Raises:
            Exception: What the first has failed with.
        """
        self.settle(pendings)
        raise_first(pendings.values())

    def close(self, *, is_done: bool) -> None:
        """Takes leave and gives everything back. A second time it does nothing."""
        if self._thread.is_alive():
            self._ending = is_done
            self._bell.ring()
            self._thread.join()
        for connection in self._connections:
            connection.close(_LINGER_MS if self._error is None else 0)
        self.context.term()
        self._bell.close()

    def _run(self) -> None:
        next_beat = time.monotonic()
        while self._ending is None:
            self._wait_for_sockets()
            with self._lock:
                asked, self._asked = self._asked, []
            for number, pending in asked:
                self._connections[number].begin(pending)
            if self._error is not None:
                for connection in self._connections:
                    connection.fail(self._error)
                continue
            now = time.monotonic()
            for number, connection in enumerate(self._connections):
                try:
                    self._attend(connection, beat=now >= next_beat)
                except Exception as error:  # whatever it is, whoever waits must hear of it
                    self._error = self._explained(number, error)
                    self._bell.ring()
                    break
            next_beat = now + self._rhythm.beat_s if now >= next_beat else next_beat
        for connection in self._connections:
            connection.fail(ClusterError(f"{self._name} has left its servers"))
            if self._error is None:
                connection.leave(is_done=self._ending)

    def _attend(self, connection: Connection, *, beat: bool) -> None:
        connection.receive()
        connection.send()
        if beat:
            connection.beat()
        if why := connection.why_lost():
            raise EndedError(why)
        if connection.owes_s > self._rhythm.timeout_s:
            raise EndedError(f"it has stopped in the middle of an answer, {self._rhythm.timeout_s:g} s ago")

    def _wait_for_sockets(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.descriptor, zmq.POLLIN)
        for connection in self._connections if self._error is None else ():
            for place, each in enumerate(connection.sockets):
                wants_out = connection.has_frames and place == 0
                poller.register(each, zmq.POLLIN | zmq.POLLOUT if wants_out else zmq.POLLIN)
        poller.poll(int(250 * self._rhythm.beat_s))
        self._bell.hear()


def raise_first(pendings: Iterable[PendingReply]) -> None:
    """Raises what the first that has failed has failed with."""
    for pending in pendings:
        if pending.error is not None:
            raise pending.error
