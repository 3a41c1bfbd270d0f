"""Carries messages between two tasks over TCP, each proven to come from somebody who has the token.

Both sides prove that they know the token before anything is read that has a length or a meaning; then
every message carries a code over its direction, its number and its bytes, by keys of this connection.
Nothing is encrypted. What messages say is defined in `member_messages`.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from typing import Final, final

from stratagem.cluster import liveness
from stratagem.cluster.membership import member_messages
from stratagem.cluster.membership.member_messages import Body, MessageKind
from stratagem.cluster.token import Token
from stratagem.errors import HandshakeError, ProtocolError

HANDSHAKE_S: Final = 5.0

_MAGIC: Final = b"STGM"
_VERSION: Final = 1
_HELLO: Final = struct.Struct(">4sB32s")
_HEADER: Final = struct.Struct(">4sBBHI")  # magic, version, kind, nothing, length of the body
_CODE_BYTES: Final = 32
_BYTES: Final = 255  # in the place of a kind: bytes that a message has announced
_MOST_UNSENT_BYTES: Final = 4 * member_messages.MOST_BYTES
# Linux: while little is under way, lost packets are sent again every 0.2 s at first, not ever later,
# so that a connection is back within half a second of the network.
_TCP_THIN_LINEAR_TIMEOUTS: Final = 16


class ClosedError(Exception):
    """The connection has ended; never shown to users as it is.

    Args:
        why: How.
        by_other_side: Whether the other side has closed it.
    """

    def __init__(self, why: str, *, by_other_side: bool = False) -> None:
        super().__init__(why)
        self.by_other_side = by_other_side


class SilentError(HandshakeError):
    """Whoever listens at the address has said nothing at all: no task, or one that has no time yet."""


@final
class Channel:
    """One connection after the handshake; used by one thread, that of its event loop.

    Args:
        reader: What comes in.
        writer: What goes out.
        key_in: Signs what comes in.
        key_out: Signs what goes out.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key_in: bytes, key_out: bytes
    ) -> None:
        self._reader, self._writer = reader, writer
        self._key_in, self._key_out = key_in, key_out
        self._num_in = self._num_out = 0

    @property
    def own_host(self) -> str:
        """The address of this machine that the connection uses."""
        return _plain(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_host(self) -> str:
        """The address of the other machine."""
        return _plain(self._writer.get_extra_info("peername")[0])

    @property
    def unconfirmed_s(self) -> float:
        """For how long the other machine has not confirmed what it is sent; 0 while it does."""
        return liveness.unconfirmed_s(self._writer.get_extra_info("socket"))

    def send(self, kind: MessageKind, body: Body | None = None) -> None:
        """Sends a message, without waiting for it to be read.

        Raises:
            ClosedError: The connection is closed, or the other side has not read for long.
        """
        self._write(kind, member_messages.encode(kind, body or {}))
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            self.abort()
            raise ClosedError("it does not read what it is sent")

    async def send_bytes(self, data: memoryview) -> None:
        """Sends bytes after a message that has announced them, at the pace at which they are read.

        Raises:
            ClosedError: The connection is closed.
        """
        for start in range(0, len(data), member_messages.MOST_BYTES):
            self._write(_BYTES, data[start : start + member_messages.MOST_BYTES])
            try:
                await self._writer.drain()
            except OSError:
                raise ClosedError("it closed the connection", by_other_side=True) from None

    async def receive_bytes(self, into: memoryview) -> None:
        """Fills a buffer with bytes that a message has announced.

        Raises:
            ClosedError: The other side has ended the connection.
            ProtocolError: Something else came, or not as much.
        """
        for start in range(0, len(into), member_messages.MOST_BYTES):
            expected = into[start : start + member_messages.MOST_BYTES]
            number, data = await self._frame()
            if number != _BYTES or len(data) != len(expected):
                raise ProtocolError("something else came than the bytes that were announced")
            expected[:] = data

    async def receive(self) -> tuple[MessageKind, Body]:
        """The next message.

        Raises:
            ClosedError: The other side has ended the connection.
            ProtocolError: What came is no message, or not one from the other side.
        """
        number, encoded = await self._frame()
        try:
            kind = MessageKind(number)
        except ValueError:
            raise ProtocolError(f"there is no message of kind {number}") from None
        return kind, member_messages.decode(kind, encoded)

    def _write(self, number: int, data: bytes | memoryview) -> None:
        header = _HEADER.pack(_MAGIC, _VERSION, number, 0, len(data))
        code = _code(self._key_out, self._num_out, header, data)
        self._num_out += 1
        if self._writer.transport.is_closing():
            raise ClosedError("the connection is closed")
        self._writer.write(b"".join((header, code, data)))

    async def _frame(self) -> tuple[int, bytes]:
        """The next message or piece of bytes, proven to come from the other side."""
        try:
            header = await self._reader.readexactly(_HEADER.size)
            magic, version, number, nothing, length = _HEADER.unpack(header)
            if (magic, version, nothing) != (_MAGIC, _VERSION, 0) or length > member_messages.MOST_BYTES:
                raise ProtocolError("what came does not begin as a message does")
            code = await self._reader.readexactly(_CODE_BYTES)
            encoded = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            raise ClosedError("it closed the connection", by_other_side=True) from None
        except OSError as error:
            raise ClosedError(f"the connection broke: {error.strerror or error}") from None
        if not hmac.compare_digest(code, _code(self._key_in, self._num_in, header, encoded)):
            raise ProtocolError("a message was changed on its way, or is not the next one")
        self._num_in += 1
        return number, encoded

    async def close(self, patience_s: float = 1.0) -> None:
        """Ends the connection when all has been sent, but without waiting for long; nobody may be reading.

        The system throws away what was sent if something that came is left unread, so it is read.
        """
        with contextlib.suppress(OSError):  # also if it takes too long
            async with asyncio.timeout(patience_s):
                self._writer.write_eof()
                while await self._reader.read(_HEADER.size * 1024):
                    pass
        self.abort()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._writer.transport.abort()


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: Token) -> Channel:
    """The side of the listener; tells a stranger nothing but that it speaks this protocol.

    Raises:
        HandshakeError: The other side does not have the token, or was too slow.
    """
    _quicken(writer)
    own = _hello()
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            writer.write(own)
            other = await reader.readexactly(_HELLO.size)
            if other[:5] != own[:5]:
                raise HandshakeError("an unknown program does not speak this protocol")
            proof = await reader.readexactly(_CODE_BYTES)
    except TimeoutError:
        raise HandshakeError("an unknown program did not say who it is") from None
    except (asyncio.IncompleteReadError, OSError):
        raise HandshakeError("an unknown program went away") from None
    said = other + own
    if not hmac.compare_digest(proof, token.sign(b"stratagem connects" + said)):
        raise HandshakeError("an unknown program has another token")
    writer.write(token.sign(b"stratagem listens" + said))
    return Channel(reader, writer, token.sign(b"stratagem in" + said), token.sign(b"stratagem out" + said))


async def connect(host: str, port: int, token: Token) -> Channel:
    """The side that connects.

    Raises:
        OSError: Nobody listens there, or nobody can be reached.
        SilentError: Whoever listens there has said nothing in time.
        HandshakeError: Who listens there is no task, or has another token.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    async with asyncio.timeout(HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        return await _introduce(reader, writer, token, place)
    except BaseException:
        writer.transport.abort()
        raise


async def _introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: Token, place: str) -> Channel:
    _quicken(writer)
    own = _hello()
    proven = False
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            writer.write(own)
            other = await _beginning_with(_MAGIC, reader, place)
            if other[4] != _VERSION:
                raise HandshakeError(
                    f"{place} speaks version {other[4]} of stratagem's protocol, this task version {_VERSION}; "
                    f"install one version everywhere"
                )
            said = own + other
            writer.write(token.sign(b"stratagem connects" + said))
            proven = True
            proof = await reader.readexactly(_CODE_BYTES)
    except TimeoutError:
        raise SilentError(f"{place} is not a stratagem task: it did not answer within {HANDSHAKE_S:g} s") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        if not proven:
            raise ConnectionResetError(f"{place} closed the connection") from None
        raise HandshakeError(_other_token(place, token)) from None
    if not hmac.compare_digest(proof, token.sign(b"stratagem listens" + said)):
        raise HandshakeError(_other_token(place, token))
    return Channel(reader, writer, token.sign(b"stratagem out" + said), token.sign(b"stratagem in" + said))


async def _beginning_with(magic: bytes, reader: asyncio.StreamReader, place: str) -> bytes:
    """The greeting of the other side, or an error as soon as it turns out to be none."""
    got = b""
    while len(got) < _HELLO.size:
        got += (
            await reader.readexactly(1) if len(got) < len(magic) else await reader.readexactly(_HELLO.size - len(got))
        )
        if not (got.startswith(magic) or magic.startswith(got)):
            raise HandshakeError(f"{place} is not a stratagem task: it speaks another protocol")
    return got


def _plain(host: str) -> str:
    """An address as others know it: one of IPv4 that came in through a socket for both is written as such."""
    return host.removeprefix("::ffff:")


def _other_token(place: str, token: Token) -> str:
    return (
        f"{place} has another token than this task, which took its own from {str(token.path)!r}; give all tasks of a "
        f"cluster the same token file"
    )


def _hello() -> bytes:
    return _HELLO.pack(_MAGIC, _VERSION, secrets.token_bytes(32))


def _code(key: bytes, number: int, header: bytes, data: bytes | memoryview) -> bytes:
    code = hmac.new(key, struct.pack(">Q", number) + header, hashlib.sha256)
    code.update(data)
    return code.digest()


def _quicken(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # not on every system; only the speed of recovery depends on it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
