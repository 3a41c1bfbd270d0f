"""The connection between two tasks, against everything that a network and its people can do to it."""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.cluster import channel as channels
from stratagem.cluster import token as tokens
from stratagem.cluster.channel import Channel, ClosedError, SilentError
from stratagem.cluster.membership import member_messages
from stratagem.cluster.membership.member_messages import MessageKind
from stratagem.cluster.token import Token
from stratagem.errors import HandshakeError, ProtocolError
from tests.cluster.meddling import Change, Direction, cut, flip, meddler

REFUSALS = (HandshakeError, ProtocolError, ClosedError, ConnectionError)
PATIENCE_S = 20.0


@pytest.fixture
def server(token_file: Path) -> Iterator[sg.Server]:
    with sg.Server.create_local_server() as made:
        yield made


def port_of(server: sg.Server) -> int:
    return int(server.target.rpartition(":")[2])


async def ping(host: str, port: int, token: Token) -> dict[str, Any]:
    """Asks a task who it is."""
    async with asyncio.timeout(PATIENCE_S):
        channel = await channels.connect(host, port, token)
        try:
            channel.send(MessageKind.PING)
            kind, body = await channel.receive()
        finally:
            channel.abort()
    assert kind == MessageKind.PONG
    return body


def is_served(server: sg.Server) -> bool:
    return bool(asyncio.run(ping("127.0.0.1", port_of(server), tokens.load()))["task"] == "local/0")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_tasks_talk_by_ipv4_by_ipv6_and_by_name(token_file: Path, host: str) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as free:
        port = free.getsockname()[1]
    with sg.Server({"worker": [f"{host}:{port}"]}):
        assert asyncio.run(ping(host.strip("[]"), port, tokens.load()))["address"] == f"{host}:{port}"


def test_other_token_is_refused_on_both_sides(
    server: sg.Server, token_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens.create(tmp_path / "other")
    with caplog.at_level(logging.DEBUG), pytest.raises(HandshakeError) as caught:
        asyncio.run(ping("127.0.0.1", port_of(server), tokens.load(tmp_path / "other")))
    assert f"has another token than this task, which took its own from {str(tmp_path / 'other')!r}" in str(caught.value)
    assert server.num_refused == 1
    assert "an unknown program has another token" in caplog.text
    for path in (tmp_path / "other", token_file):
        assert path.read_text().strip() not in str(caught.value) + caplog.text
    assert is_served(server)


def changes(there: bytes, back: bytes) -> Iterator[tuple[str, Change, Change]]:
    for position in range(len(there)):
        yield f"flip there {position}", flip(position, position % 8), bytes
        yield f"cut there {position}", cut(position), bytes
    for position in range(len(back)):
        yield f"flip back {position}", bytes, flip(position, position % 8)
        yield f"cut back {position}", bytes, cut(position)


def test_no_byte_can_be_changed_or_cut_off(server: sg.Server, token_file: Path) -> None:
    async def meddle() -> list[str]:
        there, back = Direction(), Direction()
        async with meddler(port_of(server), there, back) as port:
            honest = await ping("127.0.0.1", port, tokens.load())
        assert honest["task"] == "local/0"
        assert len(there.passed) == 37 + 32 + 44 + 2
        accepted = []
        for name, change, change_back in changes(there.passed, back.passed):
            directions = Direction(change, len(there.passed)), Direction(change_back, len(back.passed))
            async with meddler(port_of(server), *directions) as port:
                with contextlib.suppress(*REFUSALS):
                    await ping("127.0.0.1", port, tokens.load())
                    accepted.append(name)
        return accepted

    assert asyncio.run(meddle()) == []
    assert is_served(server)


@contextlib.contextmanager
def raw(server: sg.Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=PATIENCE_S) as connection:
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it says before."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64,
        b"\x80\x04\x95" + b"\xff" * 80,
        b"\xff" * 4096,
        b"STGM\x02" + b"n" * 32 + b"p" * 32,
        b"STGM\x01" + b"n" * 32 + b"p" * 32,
        b"STGM\x01" + b"n" * 32 + b"p" * 32 + struct.pack(">4sBBHI", b"STGM", 1, 1, 0, 2**32 - 1),
    ],
)
def test_stranger_is_told_nothing_and_cut_off(server: sg.Server, first: bytes) -> None:
    with raw(server) as connection:
        connection.sendall(first)
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                said += piece
    # The greeting, which is the same for all but for its 32 random bytes.
    assert said[:5] == b"STGM\x01"
    assert len(said) == 37
    assert server.num_refused == 1
    assert is_served(server)


def test_replayed_and_reflected_connections_are_refused(server: sg.Server, token_file: Path) -> None:
    async def record() -> tuple[bytes, bytes]:
        there, back = Direction(), Direction()
        async with meddler(port_of(server), there, back) as port:
            await ping("127.0.0.1", port, tokens.load())
        return bytes(there.passed), bytes(back.passed)

    there, back = asyncio.run(record())
    for words in (there, back):
        with raw(server) as connection:
            connection.sendall(words)
            assert is_closed(connection)
    with raw(server) as connection:
        greeting = connection.recv(37)
        connection.sendall(greeting + back[37:69])
        assert is_closed(connection)
    assert server.num_refused == 3
    assert is_served(server)


async def talk_after(port: int, *pieces: bytes) -> None:
    """Says something raw on a connection that has been authenticated; returns when the other side ends it."""
    channel = await channels.connect("127.0.0.1", port, tokens.load())
    try:
        for piece in pieces:
            channel._writer.write(piece)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await channel.receive()
    except (ClosedError, ProtocolError):
        return
    finally:
        channel.abort()


@pytest.mark.parametrize("length", [2**20 + 1, 2**31, 2**32 - 1])
def test_absurd_length_is_refused_before_anything_is_read(server: sg.Server, length: int) -> None:
    # Neither the code nor the body ever comes: if the server waited for them, this would too.
    header = struct.pack(">4sBBHI", b"STGM", 1, MessageKind.PING, 0, length)
    asyncio.run(talk_after(port_of(server), header))
    assert server.num_refused == 1


@pytest.mark.parametrize(
    ("kind", "encoded"),
    [
        (99, b"{}"),
        (0, b"{}"),
        (MessageKind.PING, b"[]"),
        (MessageKind.PING, b'{"a": 1}'),
        (MessageKind.PING, b"\xff\xfe"),
        (MessageKind.PING, b"\x80\x04\x95."),
        (MessageKind.PING, b"[" * 50_000),
        (MessageKind.STOP, b'{"why": "a", "why": "b"}'),
        (MessageKind.STOP, b'{"why": NaN}'),
        (MessageKind.STOP, b'{"why": 5}'),
        (MessageKind.STOP, b'{"why": "' + b"x" * 5000 + b'"}'),
    ],
)
def test_message_that_breaks_a_rule_is_refused_even_with_the_token(
    server: sg.Server, kind: int, encoded: bytes
) -> None:
    async def send() -> None:
        channel = await channels.connect("127.0.0.1", port_of(server), tokens.load())
        header = struct.pack(">4sBBHI", b"STGM", 1, kind, 0, len(encoded))
        code = channels._code(channel._key_out, 0, header, encoded)
        channel._writer.write(header + code + encoded)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ClosedError):
                await channel.receive()
        channel.abort()

    asyncio.run(send())
    assert server.num_refused == 1
    assert not server._told.is_set()
    assert is_served(server)


async def pair(token: Token) -> tuple[Channel, Channel]:
    """Two ends of one connection."""
    accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(await channels.accept(reader, writer, token))

    listener = await asyncio.start_server(take, "127.0.0.1", 0)
    there = await channels.connect("127.0.0.1", listener.sockets[0].getsockname()[1], token)
    listener.close()
    return there, await accepted


def test_message_that_comes_twice_or_comes_back_is_refused(token_file: Path) -> None:
    async def repeat(*, back: bool) -> None:
        there, here = await pair(tokens.load())
        written: list[bytes] = []
        original = there._writer.write
        there._writer.write = lambda piece: written.append(piece) or original(piece)  # type: ignore[assignment, func-returns-value]
        there.send(MessageKind.STOP, {"why": "once"})
        assert await here.receive() == (MessageKind.STOP, {"why": "once"})
        (here if back else there)._writer.write(written[0])
        with pytest.raises(ProtocolError, match="changed on its way, or is not the next one"):
            await (there if back else here).receive()
        there.abort()
        here.abort()

    for back in (False, True):
        asyncio.run(repeat(back=back))


def test_reader_that_never_reads_is_dropped(token_file: Path) -> None:
    def send_much(channel: Channel) -> None:
        for _ in range(10_000):
            channel.send(MessageKind.HERE, {"tasks": ["x" * 60] * 10_000})

    async def flood() -> None:
        there, here = await pair(tokens.load())
        with pytest.raises(ClosedError, match="does not read"):
            send_much(there)
        here.abort()

    asyncio.run(flood())


@contextlib.contextmanager
def holder(answer: bytes | None) -> Iterator[int]:
    """Somebody else who listens: says something to everybody, nothing (None), or hangs up at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    if answer is None:
                        taken.append(connection)
                        continue
                    with connection:
                        connection.sendall(answer)
                        # With what came unread, the answer might get lost on its way.
                        while answer and connection.recv(4096):
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


def test_program_that_speaks_another_protocol_is_named_as_such(token_file: Path) -> None:
    with holder(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, pytest.raises(HandshakeError) as caught:
        asyncio.run(ping("127.0.0.1", port, tokens.load()))
    assert str(caught.value) == f"127.0.0.1:{port} is not a stratagem task: it speaks another protocol"


def test_program_of_another_version_is_named_as_such(token_file: Path) -> None:
    with holder(b"STGM\x07" + b"n" * 32) as port, pytest.raises(HandshakeError, match="speaks version 7 of"):
        asyncio.run(ping("127.0.0.1", port, tokens.load()))


def test_program_that_says_nothing_is_given_up(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_S", 0.2)
    with holder(None) as port, pytest.raises(SilentError, match="it did not answer within"):
        asyncio.run(ping("127.0.0.1", port, tokens.load()))


def test_program_that_hangs_up_at_once_may_be_about_to_start(token_file: Path) -> None:
    with holder(b"") as port, pytest.raises(ConnectionResetError):
        asyncio.run(ping("127.0.0.1", port, tokens.load()))


def test_idle_strangers_keep_nobody_out(server: sg.Server) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw(server)) for _ in range(300)]
        assert is_served(server)
        assert len(server._strangers) <= 64
        # The first ones had to make room for those after them.
        assert is_closed(idle[0])


def test_idle_strangers_are_cut_off_in_time(server: sg.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_S", 0.2)
    with raw(server) as silent, raw(server) as slow:
        slow.sendall(b"STGM\x01" + b"n" * 32)
        assert is_closed(silent)
        assert is_closed(slow)
    assert server.num_refused == 2


@settings(deadline=None)
@given(st.sampled_from(MessageKind), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_clear_error(kind: MessageKind, encoded: bytes) -> None:
    try:
        body = member_messages.decode(kind, encoded)
    except ProtocolError:
        return
    assert member_messages.decode(kind, member_messages.encode(kind, body)) == body


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(MessageKind), st.data())
def test_fields_that_do_not_fit_are_refused(kind: MessageKind, data: st.DataObject) -> None:
    names = list(member_messages._FIELDS[kind])
    body = {name: data.draw(values) for name in names}
    try:
        encoded = member_messages.encode(kind, body)
    except ProtocolError:
        return
    assert member_messages.decode(kind, encoded) == body
    with pytest.raises(ProtocolError):
        member_messages.encode(kind, body | {"another": 1})
