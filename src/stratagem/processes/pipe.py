"""Carries objects between the controller and its own children, over the pipe that each inherited.

Large tensors travel in anonymous shared memory that the receiver maps; `packing` makes the bytes.
"""

import array
import contextlib
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, final

from stratagem.processes.packing import ALIGN, Packed, pack, unpack
from stratagem.processes.region import mapped

_HEAD = struct.Struct("<QIQ")  # length of the packed object, number of buffers, bytes in shared memory
_LENGTH = struct.Struct("<Q")
_LARGE_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 253  # as many as the kernel lets one message carry
_ROOM_FOR_DESCRIPTORS = socket.CMSG_LEN(_MAX_DESCRIPTORS * array.array("i").itemsize)
_MAX_PIECES = 512  # likewise: pieces of memory in one call; it allows twice as many


@final
class Wire:
    """One end of the pipe between the controller and a child.

    Args:
        sock: A connected stream socket; the wire owns it from now on.
        reference: Gives the name of an object that both sides have, or `None`.
        resolve: Gives the object of such a name on this side.
        keeps_classes: Whether classes that this side already has stay as they are when they come
            back: the controller's do, a child takes over what the controller changed in them.
    """

    def __init__(
        self,
        sock: socket.socket,
        reference: Callable[[Any], Any] = lambda _: None,
        resolve: Callable[[Any], Any] | None = None,
        *,
        keeps_classes: bool = False,
    ) -> None:
        self._socket = sock
        self._reference = reference
        self._resolve = resolve
        self._keeps_classes = keeps_classes
        self._sending = threading.Lock()  # threads of a replica may print

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Sends any object; blocks until the other side has room for it."""
        self.send_packed(pack(message, self._reference))

    def send_packed(self, packed: "Packed") -> None:
        """Sends what `pack` made; the same may go to several children."""
        if not packed.buffers and not packed.regions:
            with self._sending:
                self._send_all([memoryview(_HEAD.pack(len(packed.data), 0, 0) + packed.data)], [])
            return
        small = [buffer for buffer in packed.buffers if len(buffer) < _LARGE_BYTES]
        large = [buffer for buffer in packed.buffers if len(buffer) >= _LARGE_BYTES]
        region = _Outgoing(large)
        lengths = b"".join(_LENGTH.pack(len(buffer)) for buffer in packed.buffers)
        head = _HEAD.pack(len(packed.data), len(packed.buffers), region.num_bytes) + lengths + packed.data
        descriptors = [each.descriptor for each in packed.regions] + [region.descriptor] * (region.num_bytes > 0)
        try:
            with self._sending:
                self._send_all([memoryview(head), *small], descriptors)
        finally:
            region.close()

    def receive(self) -> Any:
        """Waits for the next object. Raises `EOFError` when the other side is gone."""
        first, carried, _, _ = self._socket.recvmsg(_HEAD.size, _ROOM_FOR_DESCRIPTORS)
        if not first:
            raise EOFError("the other end of the pipe is closed")
        descriptors = _descriptors_in(carried) if carried else []
        if len(first) < _HEAD.size:
            first += self._read(_HEAD.size - len(first))
        num_packed, num_buffers, num_shared_bytes = _HEAD.unpack(first)
        body = memoryview(self._read(num_buffers * _LENGTH.size + num_packed))
        if not num_buffers:
            return unpack(body, (), self._resolve, descriptors, keeps_classes=self._keeps_classes)
        data = body[num_buffers * _LENGTH.size :]
        lengths = [length for (length,) in _LENGTH.iter_unpack(body[: num_buffers * _LENGTH.size])]
        # All that is in the pipe is read before anything can fail that only this message needs.
        small = iter(self._read_each([length for length in lengths if length < _LARGE_BYTES]))
        shared = memoryview(b"")
        if num_shared_bytes:
            shared = _received(descriptors, num_shared_bytes)
        buffers: list[memoryview | bytearray] = []
        for length in lengths:
            if length >= _LARGE_BYTES:
                buffers.append(shared[:length])
                shared = shared[_padded(length) :]
            else:
                buffers.append(next(small))
        return unpack(data, buffers, self._resolve, descriptors, keeps_classes=self._keeps_classes)

    def shut(self) -> None:
        """Tells the other side that nothing more will come; never blocks."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def _send_all(self, pieces: list[memoryview], descriptors: list[int]) -> None:
        """Sends pieces in as few calls as there can be: each would wake the other side, which may need this core."""
        carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        while pieces:
            sent = self._socket.sendmsg(pieces[:_MAX_PIECES], carried)
            if sent == sum(map(len, pieces)):
                return  # as most are
            pieces, carried = _after(pieces, sent), []

    def _read(self, num_bytes: int) -> bytearray:
        made = bytearray(num_bytes)
        room = memoryview(made)
        while room:
            room = room[self._read_into([room]) :]
        return made

    def _read_each(self, lengths: list[int]) -> list[bytearray]:
        """The next bytes, in pieces of these lengths."""
        made = [bytearray(length) for length in lengths]
        rooms = [memoryview(each) for each in made if each]
        while rooms:
            rooms = _after(rooms, self._read_into(rooms[:_MAX_PIECES]))
        return made

    def _read_into(self, rooms: list[memoryview]) -> int:
        received = self._socket.recvmsg_into(rooms)[0]
        if not received:
            raise EOFError("the other end of the pipe closed in the middle of a message")
        return received


def _descriptors_in(carried: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    found = array.array("i")
    for level, kind, data in carried:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _after(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of pieces without their first bytes."""
    for number, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *pieces[number + 1 :]]
        num_bytes -= len(piece)
    return []


@final
class _Outgoing:
    """Large buffers of one message, one after the other in anonymous shared memory."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self.num_bytes = sum(_padded(len(buffer)) for buffer in buffers)
        self.descriptor = -1
        if not self.num_bytes:
            return
        self.descriptor = os.memfd_create("stratagem-message", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.num_bytes)
            offset = 0
            for buffer in buffers:
                self._write(buffer, offset)
                offset += _padded(len(buffer))
        except BaseException:
            self.close()
            raise

    def _write(self, buffer: memoryview, offset: int) -> None:
        # Written, not mapped: a lack of memory is an error, and no page is cleared first.
        while buffer:
            written = os.pwrite(self.descriptor, buffer, offset)
            buffer, offset = buffer[written:], offset + written

    def close(self) -> None:
        """Lets go of the memory; who has received it keeps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _received(descriptors: list[int], num_bytes: int) -> memoryview:
    """The large buffers of a message, whose descriptor came last; if they do not fit, the others are closed, too."""
    descriptor = descriptors.pop()
    try:
        return memoryview(mapped(descriptor, num_bytes, mmap.MAP_PRIVATE))
    except OSError:
        for each in descriptors:
            os.close(each)
        raise
    finally:
        os.close(descriptor)


def _padded(num_bytes: int) -> int:
    """The room that so many bytes take."""
    return -(-num_bytes // ALIGN) * ALIGN
