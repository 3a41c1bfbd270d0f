"""Stands between two tasks and changes what they send, as somebody on the network could."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

Change = Callable[[bytes], bytes]


@dataclass
class Direction:
    """What has passed in one direction, and how it is changed on its way.

    Args:
        change: Gets all bytes so far, returns them changed; the same length, or shorter to cut them off.
        expected: How many bytes an honest exchange has; then this direction is closed.
    """

    change: Change = bytes
    expected: int | None = None
    passed: bytearray = field(default_factory=bytearray)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                start = len(self.passed)
                self.passed += piece
                changed = self.change(bytes(self.passed))
                writer.write(changed[start:])
                if len(changed) < len(self.passed) or len(self.passed) == self.expected:
                    break
            writer.write_eof()


@contextlib.asynccontextmanager
async def meddler(port: int, there: Direction, back: Direction) -> AsyncIterator[int]:
    """A port on loopback that leads to another, through the two directions."""
    carriers: set[asyncio.Task[None]] = set()

    async def stand_between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        own = asyncio.current_task()
        assert own is not None
        carriers.add(own)
        try:
            await asyncio.gather(there.carry(reader, onward_writer), back.carry(onward_reader, writer))
        finally:
            for each in (writer, onward_writer):
                each.transport.abort()

    server = await asyncio.start_server(stand_between, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*carriers, return_exceptions=True)


def flip(position: int, bit: int) -> Change:
    def change(passed: bytes) -> bytes:
        changed = bytearray(passed)
        if position < len(changed):
            changed[position] ^= 1 << bit
        return bytes(changed)

    return change


def cut(position: int) -> Change:
    return lambda passed: passed[:position]
