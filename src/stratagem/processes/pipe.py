"""Carries objects between the controller and its own children, over the pipe that each inherited.

Large tensors travel in anonymous shared memory that the receiver maps; `packing` makes the bytes.
"""

import contextlib
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, final

from stratagem.processes.message_memory import Outgoing, padded
from stratagem.processes.packing import Packed, pack, unpack

_HEAD = struct.Struct("<QIQ")  # length of the packed object, number of buffers, bytes in shared memory
_LENGTH = struct.Struct("<Q")
_LARGE_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 253  # as many as the kernel lets one message carry


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
        small = [buffer for buffer in packed.buffers if len(buffer) < _LARGE_BYTES]
        large = [buffer for buffer in packed.buffers if len(buffer) >= _LARGE_BYTES]
        region = Outgoing(large)
        lengths = b"".join(_LENGTH.pack(len(buffer)) for buffer in packed.buffers)
        head = _HEAD.pack(len(packed.data), len(packed.buffers), region.num_bytes) + lengths + packed.data
        descriptors = [each.descriptor for each in packed.regions] + [region.descriptor] * (region.num_bytes > 0)
        try:
            with self._sending:
                if descriptors:
                    sent = socket.send_fds(self._socket, [head], descriptors)
                    head = head[sent:]
                self._socket.sendall(head)
                for buffer in small:
                    self._socket.sendall(buffer)
        finally:
            region.close()

    def receive(self) -> Any:
        """Waits for the next object. Raises `EOFError` when the other side is gone."""
        first, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MAX_DESCRIPTORS)
        if not first:
            raise EOFError("the other end of the pipe is closed")
        num_packed, num_buffers, num_shared_bytes = _HEAD.unpack(first + self._read(_HEAD.size - len(first)))
        lengths = [_LENGTH.unpack(self._read(_LENGTH.size))[0] for _ in range(num_buffers)]
        data = self._read(num_packed)
        shared = memoryview(b"")
        if num_shared_bytes:
            descriptor = descriptors.pop()
            shared = memoryview(mmap.mmap(descriptor, num_shared_bytes, mmap.MAP_PRIVATE))
            os.close(descriptor)
        buffers: list[memoryview | bytearray] = []
        for length in lengths:
            if length >= _LARGE_BYTES:
                buffers.append(shared[:length])
                shared = shared[padded(length) :]
            else:
                buffers.append(self._read(length))
        return unpack(data, buffers, self._resolve, descriptors, keeps_classes=self._keeps_classes)

    def shut(self) -> None:
        """Tells the other side that nothing more will come; never blocks."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError("the other end of the pipe closed in the middle of a message")
            view = view[received:]
        return data
