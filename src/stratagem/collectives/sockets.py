"""Connects processes by sockets, each with each, and moves bytes over them: all at once, never waiting for one alone.

Whoever connects proves that it knows a secret that the others know; what then travels is neither
signed nor encrypted, as with gloo and NCCL.
"""

import contextlib
import errno
import hmac
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from stratagem.errors import CollectiveError

_SLICE_S: Final = 0.1
_HANDSHAKE_S: Final = 2.0
_BUFFER_BYTES: Final = 4 * 2**20
_HELLO: Final = struct.Struct(">4sI32s")
_MAGIC: Final = b"SGMX"
_PROOF_BYTES: Final = 32
_MOST_AT_ONCE: Final = 2**20

Sign = Callable[[bytes], bytes]
Attend = Callable[[float], None]


def connect_all(
    rank: int,
    size: int,
    store: Any,
    *,
    address: str,
    sign: Sign,
    timeout_s: float,
    attend: Attend = lambda _: None,
) -> dict[int, socket.socket]:
    """Connects this process with all others; returns when all are there.

    Args:
        rank: Which process this is.
        size: How many there are.
        store: Where each says at which address it waits (`set` and `get`, which waits).
        address: The address of this machine that the others reach.
        sign: Makes 32 bytes of a message that only somebody with the common secret can make.
        timeout_s: How long to wait for the others.
        attend: Called after each slice of waiting with the seconds waited so far; may raise.

    Raises:
        CollectiveError: Some did not come in time.
    """
    found: dict[int, socket.socket] = {}
    start = time.monotonic()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family, backlog=size) as listener:
            listener.settimeout(_SLICE_S)
            store.set(f"sockets/{rank}", f"{address} {listener.getsockname()[1]}")
            for other in range(rank):
                host, port = _text(store.get(f"sockets/{other}")).split()
                found[other] = _call(rank, other, host, int(port), sign)
            while len(found) < size - 1:
                attend(time.monotonic() - start)
                missing = [each for each in range(size) if each != rank and each not in found]
                if time.monotonic() - start > timeout_s:
                    raise CollectiveError(
                        f"process {rank} waited {timeout_s:g} s for processes {', '.join(map(str, missing))} to connect"
                    )
                with contextlib.suppress(OSError, ValueError):  # nobody, or a stranger
                    other, connection = _answer(listener, rank, sign)
                    if other not in missing:
                        connection.close()
                        continue
                    found[other] = connection
    except BaseException as error:
        for connection in found.values():
            connection.close()
        if isinstance(error, OSError):
            raise CollectiveError(f"process {rank} could not connect: {error}") from error
        raise
    for connection in found.values():
        _prepare(connection)
    return found


def _call(rank: int, other: int, host: str, port: int, sign: Sign) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_HANDSHAKE_S * 5)
    try:
        own = _HELLO.pack(_MAGIC, rank, secrets.token_bytes(32))
        connection.sendall(own)
        theirs = _read(connection, _HELLO.size)
        connection.sendall(sign(b"sockets call" + own + theirs))
        proof = _read(connection, _PROOF_BYTES)
        if theirs[:8] != _HELLO.pack(_MAGIC, other, b"")[:8] or not hmac.compare_digest(
            proof, sign(b"sockets answer" + own + theirs)
        ):
            raise CollectiveError(f"{host}:{port} is not process {other} of this cluster")
    except BaseException:
        connection.close()
        raise
    return connection


def _answer(listener: socket.socket, rank: int, sign: Sign) -> tuple[int, socket.socket]:
    connection, _ = listener.accept()
    try:
        connection.settimeout(_HANDSHAKE_S)
        theirs = _read(connection, _HELLO.size)
        magic, other, _ = _HELLO.unpack(theirs)
        if magic != _MAGIC:
            raise ValueError("a stranger")
        own = _HELLO.pack(_MAGIC, rank, secrets.token_bytes(32))
        connection.sendall(own)
        if not hmac.compare_digest(_read(connection, _PROOF_BYTES), sign(b"sockets call" + theirs + own)):
            raise ValueError("a stranger")
        connection.sendall(sign(b"sockets answer" + theirs + own))
    except BaseException:
        connection.close()
        raise
    return other, connection


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    connection.setblocking(False)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the other side has hung up")
        data += more
    return data


def _view(data: Any) -> memoryview:
    """The bytes of a buffer; an empty one cannot be cast."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


@final
class Sockets:
    """Connected sockets, by the rank of the other side; used by one thread at a time.

    Args:
        connections: As `connect_all` gave them; they are closed with this.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = dict(connections)
        self._unsent: dict[int, deque[memoryview]] = {rank: deque() for rank in self._connections}
        self._poll = select.poll()
        for each in self._connections.values():
            self._poll.register(each, select.POLLIN)

    def put(self, rank: int, data: Any) -> None:
        """Takes bytes to send, which must not change until the next `flush`."""
        if view := _view(data):
            self._unsent[rank].append(view)

    def fill(self, wanted: Mapping[int, Any], attend: Attend) -> None:
        """Fills a buffer from each of some others, and sends meanwhile what is to be sent.

        Raises:
            CollectiveError: A connection has ended.
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
        """Gives the sockets back."""
        for each in self._connections.values():
            each.close()
        self._connections = {}

    def _move(self, wanted: dict[int, memoryview], attend: Attend, *, until_sent: bool) -> None:
        start = time.monotonic()
        while wanted or (until_sent and any(self._unsent.values())):
            moved = False
            for rank, connection in self._connections.items():
                try:
                    moved |= self._send(rank, connection)
                    if rank in wanted:
                        moved |= self._receive(rank, connection, wanted)
                except OSError as error:
                    name = errno.errorcode.get(error.errno or 0, "")
                    raise CollectiveError(f"the connection to replica {rank} has ended ({name or error})") from None
            if not moved and not self._wait(wanted):
                attend(time.monotonic() - start)

    def _wait(self, wanted: Mapping[int, memoryview]) -> bool:
        """Whether within a slice of time there is something to do."""
        for rank, connection in self._connections.items():
            events = select.POLLIN * (rank in wanted) | select.POLLOUT * bool(self._unsent[rank])
            self._poll.modify(connection, events)
        return bool(self._poll.poll(1000 * _SLICE_S))

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
