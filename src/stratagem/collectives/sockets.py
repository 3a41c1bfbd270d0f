"""Moves bytes over sockets to and from many processes: all at once, never waiting for one alone.

What travels is neither signed nor encrypted, as with gloo and NCCL; who takes part has proven it
(`calling`). A process that was forked from this one lets go of the sockets: it must not keep a
connection open when this process has died.
"""

import contextlib
import errno
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final

from stratagem._clock import Clock
from stratagem.cluster.liveness import unconfirmed_s
from stratagem.errors import CollectiveError

_SLICE_S: Final = 0.1
_MOST_AT_ONCE: Final = 2**20
# Longer than a network may be cut without harm, and than it then takes until lost packets are sent again.
_CUT_OFF_S: Final = 10.0
_KEEP_ALIVE_S: Final = 2
_MOST_PROBES: Final = 127  # it is for whoever waits to judge, not for the system
# Linux: see `cluster/channel`.
_TCP_THIN_LINEAR_TIMEOUTS: Final = 16

Attend = Callable[[float], None]

# Those that are open; a forked process is told of them by the system, not by a caller.
_open: "weakref.WeakSet[Sockets]" = weakref.WeakSet()


class CutOffError(CollectiveError):
    """The machine of another process does not confirm any more what it is sent."""


@final
class Sockets:
    """Connected sockets, by the rank of the other side; used by one thread at a time.

    Args:
        connections: As `connect_all` gave them; they are closed with this.
        names: What to call each rank in errors.
    """

    def __init__(self, connections: Mapping[int, socket.socket], names: Sequence[str] | None = None) -> None:
        self._connections = dict(connections)
        self._names = names
        self._unsent: dict[int, deque[memoryview]] = {rank: deque() for rank in self._connections}
        for each in self._connections.values():
            _prepare(each)
        _open.add(self)

    def name(self, rank: int) -> str:
        """What to call a process in errors."""
        return self._names[rank] if self._names is not None else f"replica {rank}"

    def put(self, rank: int, data: Any) -> None:
        """Takes bytes to send, which must not change until the next `flush`."""
        if view := _view(data):
            self._unsent[rank].append(view)

    def fill(self, wanted: Mapping[int, Any], attend: Attend) -> None:
        """Fills a buffer from each of some others, and sends meanwhile what is to be sent.

        Raises:
            CollectiveError: A connection has ended.
            CutOffError: It has not, but nothing gets through any more.
        """
        self._move({rank: view for rank, data in wanted.items() if (view := _view(data))}, attend, until_sent=False)

    def flush(self, attend: Attend) -> None:
        """Sends all that is to be sent."""
        self._move({}, attend, until_sent=True)

    def cut(self) -> None:
        """Ends all connections, also while a thread waits for one."""
        for each in self._connections.values():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the sockets back; in a forked process, without touching the connections behind them."""
        for each in self._connections.values():
            each.close()
        for unsent in self._unsent.values():
            unsent.clear()
        self._connections = {}
        _open.discard(self)

    def _move(self, wanted: dict[int, memoryview], attend: Attend, *, until_sent: bool) -> None:
        clock = Clock(_SLICE_S)
        while wanted or (until_sent and any(self._unsent.values())):
            moved = False
            for rank, connection in self._connections.items():
                try:
                    moved |= self._send(rank, connection)
                    if rank in wanted:
                        moved |= self._receive(rank, connection, wanted)
                except OSError as error:
                    name = errno.errorcode.get(error.errno or 0, "")
                    raise CollectiveError(f"the connection to {self.name(rank)} has ended ({name or error})") from None
            if not moved and not self._wait(wanted):
                self._look(rank for rank in self._connections if rank in wanted or self._unsent[rank])
                attend(clock.now_s())

    def _wait(self, wanted: Mapping[int, memoryview]) -> bool:
        """Whether within a slice of time there is something to do."""
        poll = select.poll()
        for rank, connection in self._connections.items():
            # Only of whom something is wanted: the end of another connection would be news again and again.
            if events := select.POLLIN * (rank in wanted) | select.POLLOUT * bool(self._unsent[rank]):
                poll.register(connection, events)
        return bool(poll.poll(1000 * _SLICE_S))

    def _look(self, ranks: Iterable[int]) -> None:
        """Whether what is sent to others still arrives, after a slice of time in which nothing moved."""
        for rank in ranks:
            if unconfirmed_s(self._connections[rank]) > _CUT_OFF_S:
                raise CutOffError(
                    f"the machine of {self.name(rank)} has not answered this one for {_CUT_OFF_S:g} s; the network "
                    f"between them is cut"
                )

    def _send(self, rank: int, connection: socket.socket) -> bool:
        unsent = self._unsent[rank]
        if not unsent:
            return False
        try:
            num_sent = connection.send(unsent[0][:_MOST_AT_ONCE])
        except BlockingIOError:
            return False
        rest = unsent[0][num_sent:]
        if len(rest):
            unsent[0] = rest
        else:
            unsent.popleft()
        return True

    def _receive(self, rank: int, connection: socket.socket, wanted: dict[int, memoryview]) -> bool:
        try:
            num_received = connection.recv_into(wanted[rank])
        except BlockingIOError:
            return False
        if not num_received:
            raise ConnectionResetError(errno.ECONNRESET, "the other side has hung up")
        rest = wanted.pop(rank)[num_received:]
        if len(rest):
            wanted[rank] = rest
        return True


def _prepare(connection: socket.socket) -> None:
    """Sets what is not the system's to choose; sizes of buffers are, which it suits to the network."""
    connection.setblocking(False)
    with contextlib.suppress(OSError):  # an end that came before is for whoever uses it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (_TCP_THIN_LINEAR_TIMEOUTS, 1),
            (socket.TCP_KEEPIDLE, _KEEP_ALIVE_S),
            (socket.TCP_KEEPINTVL, _KEEP_ALIVE_S),
            (socket.TCP_KEEPCNT, _MOST_PROBES),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _view(data: Any) -> memoryview:
    """The bytes of a buffer; an empty one cannot be cast."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _close_all() -> None:
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_all)
