"""Connects processes by sockets, each with each: who calls and who answers prove that they know a secret.

A process calls those before it and answers those after it. Strangers that call are kept waiting beside
the others, some at a time and not for long, so that nobody is held up by them.
"""

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from stratagem.errors import CollectiveError, StratagemError

_SLICE_S: Final = 0.1
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.05
_HANDSHAKE_S: Final = 2.0
_MOST_STRANGERS: Final = 256
_BACKLOG: Final = 1024
_HELLO: Final = struct.Struct(">4sI32s")
_MAGIC: Final = b"SGMX"
_PROOF_BYTES: Final = 32

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
    names: Sequence[str] | None = None,
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
        names: What to call the processes in errors.

    Raises:
        CollectiveError: Some did not come in time.
    """
    names = names or [f"process {each}" for each in range(size)]
    wait = _Wait(timeout_s, attend)
    found: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Everybody's own: who has read it in the store is of this cluster, not of another one with the same secret.
    number = secrets.token_hex(16)
    try:
        with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listener:
            store.set(f"sockets/{rank}", f"{address} {listener.getsockname()[1]} {number}")
            for other in range(rank):
                host, port, theirs = _told(store, other, names)
                call = _Dial(rank, other, (host, int(port)), theirs, sign, names)
                found[other] = call.until_answered(wait)
            with contextlib.closing(_Reception(listener, rank, number, sign)) as reception:
                while missing := [each for each in range(rank + 1, size) if each not in found]:
                    if wait.is_over():
                        raise CollectiveError(
                            f"{names[rank]} waited {timeout_s:g} s for {', '.join(names[each] for each in missing)} to "
                            f"connect with it at {address}; let connections to all ports pass between the machines"
                        )
                    found.update(reception.answer(missing))
    except BaseException as error:
        for connection in found.values():
            connection.close()
        if isinstance(error, OSError) and not isinstance(error, StratagemError):
            raise CollectiveError(f"{names[rank]} cannot listen at {address}: {error}") from error
        raise
    for connection in found.values():
        connection.setblocking(False)
    return found


@final
class _Wait:
    """How long has been waited for the others, and may be."""

    def __init__(self, timeout_s: float, attend: Attend) -> None:
        self._start = time.monotonic()
        self._timeout_s = timeout_s
        self._attend = attend

    def is_over(self) -> bool:
        """Whether the time is up; lets somebody look after the world."""
        waited_s = time.monotonic() - self._start
        self._attend(waited_s)
        return waited_s > self._timeout_s


@final
class _Dial:
    """Connects this process with one that listens, as often as needed."""

    def __init__(
        self, rank: int, other: int, place: tuple[str, int], number: str, sign: Sign, names: Sequence[str]
    ) -> None:
        self._rank, self._other = rank, other
        self._place, self._number = place, number
        self._sign = sign
        self._names = names

    def until_answered(self, wait: _Wait) -> socket.socket:
        why = ""
        while not wait.is_over():
            try:
                return self._once(wait)
            except StratagemError:
                raise
            except OSError as error:  # the network, or too many strangers at the other end
                why = str(error)
            time.sleep(_PAUSE_S)
        raise CollectiveError(
            f"{self._names[self._rank]} could not connect with {self._names[self._other]} at {self._where} ({why}); "
            f"let connections to all ports pass between the machines"
        )

    @property
    def _where(self) -> str:
        host, port = self._place
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _once(self, wait: _Wait) -> socket.socket:
        connection = socket.create_connection(self._place, timeout=_CONNECT_S)
        try:
            own = _HELLO.pack(_MAGIC, self._rank, secrets.token_bytes(32))
            connection.sendall(own)
            connection.settimeout(_SLICE_S)
            theirs = _read(connection, _HELLO.size, wait)
            said = self._number.encode() + own + theirs
            connection.sendall(self._sign(b"sockets call" + said))
            proof = _read(connection, _PROOF_BYTES, wait)
            if theirs[:8] != _HELLO.pack(_MAGIC, self._other, b"")[:8] or not hmac.compare_digest(
                proof, self._sign(b"sockets answer" + said)
            ):
                raise CollectiveError(f"{self._where} is not {self._names[self._other]} of this cluster")
        except BaseException:
            connection.close()
            raise
        return connection


def _read(connection: socket.socket, num_bytes: int, wait: _Wait) -> bytes:
    data = b""
    while len(data) < num_bytes:
        try:
            more = connection.recv(num_bytes - len(data))
        except TimeoutError:
            if wait.is_over():
                raise TimeoutError("no answer") from None
            continue
        if not more:
            raise ConnectionResetError("the other side has hung up")
        data += more
    return data


@final
class _Reception:
    """Answers those who call, many at once; closed with all who have not proven who they are.

    Args:
        listener: Where they call.
        rank: Which process this is.
        number: What only those know who were told where to call.
        sign: As of `connect_all`.
    """

    def __init__(self, listener: socket.socket, rank: int, number: str, sign: Sign) -> None:
        self._listener = listener
        self._rank, self._number, self._sign = rank, number, sign
        self._strangers: dict[int, _Stranger] = {}  # the oldest first
        self._poll = select.poll()
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)

    def answer(self, expected: Sequence[int]) -> dict[int, socket.socket]:
        """Waits for a slice of time; who has proven to be one of those expected."""
        found: dict[int, socket.socket] = {}
        for number, _ in self._poll.poll(1000 * _SLICE_S):
            if number == self._listener.fileno():
                self._let_in()
            elif (stranger := self._strangers.get(number)) is not None:
                try:
                    other = stranger.hear()
                except (OSError, ValueError):
                    self._turn_away(number)
                    continue
                if other is not None and other in expected and other not in found:
                    del self._strangers[number]
                    self._poll.unregister(number)
                    found[other] = stranger.connection
                elif other is not None:
                    self._turn_away(number)
        for number in [each for each, stranger in self._strangers.items() if time.monotonic() > stranger.until]:
            self._turn_away(number)
        return found

    def close(self) -> None:
        for number in list(self._strangers):
            self._turn_away(number)

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no more files: some have to go first
            time.sleep(_SLICE_S)
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        connection.setblocking(False)
        self._strangers[connection.fileno()] = _Stranger(connection, self._rank, self._number, self._sign)
        self._poll.register(connection, select.POLLIN)

    def _turn_away(self, number: int) -> None:
        self._poll.unregister(number)
        self._strangers.pop(number).connection.close()


@final
class _Stranger:
    """Who has called, and has not proven to be anybody."""

    def __init__(self, connection: socket.socket, rank: int, number: str, sign: Sign) -> None:
        self.connection = connection
        self.until = time.monotonic() + _HANDSHAKE_S
        self._own = _HELLO.pack(_MAGIC, rank, secrets.token_bytes(32))
        self._number = number.encode()
        self._sign = sign
        self._said = b""

    def hear(self) -> int | None:
        """Reads what has come, and answers; which process it is, once that is proven.

        Raises:
            ValueError: It is none of them.
            OSError: It has hung up.
        """
        more = self.connection.recv(_HELLO.size + _PROOF_BYTES - len(self._said))
        if not more:
            raise ConnectionResetError("the other side has hung up")
        had, self._said = len(self._said), self._said + more
        if len(self._said) < _HELLO.size:
            return None
        hello, proof = self._said[: _HELLO.size], self._said[_HELLO.size :]
        magic, other, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise ValueError("a stranger")
        if had < _HELLO.size:
            self.connection.send(self._own)
        if len(proof) < _PROOF_BYTES:
            return None
        said = self._number + hello + self._own
        if not hmac.compare_digest(proof, self._sign(b"sockets call" + said)):
            raise ValueError("a stranger")
        self.connection.send(self._sign(b"sockets answer" + said))
        return int(other)


def _told(store: Any, other: int, names: Sequence[str]) -> list[str]:
    """What another process has said of where it listens."""
    try:
        value: str | bytes = store.get(f"sockets/{other}")
    except TimeoutError as error:
        raise CollectiveError(f"{names[other]} has not said where it can be reached: {error}") from None
    return (value if isinstance(value, str) else value.decode()).split()
