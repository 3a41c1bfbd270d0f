"""Defines the frames between a parameter server and its clients: kinds, sizes, bounds.

A frame is a header of fixed size, then its payload, sealed. What breaks a rule is refused before
anything is allocated or decrypted for it. What bodies say is `bodies`' matter, keys are `encryption`'s.
"""

import enum
import struct
from typing import Final, NamedTuple, TypeAlias

from stratagem.errors import ProtocolError

Bytes: TypeAlias = bytes | bytearray | memoryview
"""What can be read as bytes, or written, without a copy."""

MAGIC: Final = b"SGPS"
VERSION: Final = 1
CHUNK_BYTES: Final = 2**19
"""Of tensors: small enough that sealing, the network and opening overlap."""
MOST_PAYLOAD_BYTES: Final = 2**20
SEAL_BYTES: Final = 16
MOST_SHARD_BYTES: Final = 2**44

_HEADER: Final = struct.Struct(">4sBBHQQQI")
HEADER_BYTES: Final = _HEADER.size
MOST_FRAME_BYTES: Final = HEADER_BYTES + MOST_PAYLOAD_BYTES + SEAL_BYTES

_GREETING: Final = struct.Struct(">4sBB32s")
GREETING_BYTES: Final = _GREETING.size
NONCE_BYTES: Final = 32


class FrameKind(enum.IntEnum):
    """What a frame is about."""

    ATTACH = 1
    """A task introduces itself."""
    DEFINE = 2
    """The chief says which variables there are; their values follow."""
    DATA = 3
    """Bytes of tensors, for the request that is under way."""
    PULL = 4
    PUSH = 5
    """Says what a push is; its gradients follow."""
    STATE = 6
    """Asks for everything that a checkpoint keeps."""
    LOAD = 7
    """Says what of a checkpoint follows."""
    HOLD = 8
    """Asks to apply nothing for a moment, so that all shards can be saved alike."""
    DONE = 9
    FAILED = 10
    BEAT = 11
    """A sign of life."""
    LEAVE = 12
    FENCED = 13
    """To a task that was declared lost: it no longer takes part."""
    SHARE = 14
    """Offers memory for tensors, to a server on the same machine."""
    MEET = 15
    """Waits until all tasks that train have come to the same place."""


class Greeting(enum.IntEnum):
    """What is said before both sides know each other."""

    HELLO = 129
    CHALLENGE = 130
    PROOF = 131
    WELCOME = 132
    REFUSED = 133


class Header(NamedTuple):
    """What a frame says of itself.

    Args:
        kind: What it is about.
        sequence: Its number among all frames of its direction.
        request: Which request it belongs to.
        offset: Of data: which byte of the request's tensors, one after the other, is its first.
        length: How many bytes its payload has when it is opened.
    """

    kind: FrameKind
    sequence: int
    request: int
    offset: int
    length: int

    def pack(self) -> bytes:
        """As it travels."""
        return _HEADER.pack(MAGIC, VERSION, self.kind, 0, self.sequence, self.request, self.offset, self.length)


def parse(frame: Bytes) -> Header:
    """The header of a frame, once everything about it has been found to be in order.

    Raises:
        ProtocolError: It is no frame.
    """
    with memoryview(frame) as view:
        num_bytes = view.nbytes
        if not HEADER_BYTES + SEAL_BYTES <= num_bytes <= MOST_FRAME_BYTES:
            raise ProtocolError(f"a frame has {HEADER_BYTES + SEAL_BYTES} to {MOST_FRAME_BYTES} bytes, got {num_bytes}")
        magic, version, number, nothing, sequence, request, offset, length = _HEADER.unpack_from(view)
    if (magic, version, nothing) != (MAGIC, VERSION, 0):
        raise ProtocolError("what came does not begin as a frame does")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise ProtocolError(f"there is no frame of kind {number}") from None
    if num_bytes != HEADER_BYTES + length + SEAL_BYTES:
        raise ProtocolError(f"a frame says that it carries {length} bytes, and has {num_bytes}")
    if offset and (kind != FrameKind.DATA or offset > MOST_SHARD_BYTES):
        raise ProtocolError(f"a {kind.name} frame has no byte {offset}")
    return Header(kind, sequence, request, offset, length)


def greeting(kind: Greeting, content: bytes) -> bytes:
    """A frame of the handshake."""
    return _GREETING.pack(MAGIC, VERSION, kind, content)


def parse_greeting(frame: Bytes) -> tuple[Greeting, bytes]:
    """What a frame of the handshake says.

    Raises:
        ProtocolError: It is none.
    """
    with memoryview(frame) as view:
        if view.nbytes != GREETING_BYTES:
            raise ProtocolError(f"a greeting has {GREETING_BYTES} bytes, got {view.nbytes}")
        magic, version, number, content = _GREETING.unpack_from(view)
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError("what came is no greeting of this protocol")
    try:
        return Greeting(number), content
    except ValueError:
        raise ProtocolError(f"there is no greeting of kind {number}") from None
