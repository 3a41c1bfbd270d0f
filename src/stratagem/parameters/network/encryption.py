"""Seals frames, so that only the other side of one connection can have made, can read and can count them.

AES-256 in Galois/counter mode, with a key for each direction of each connection, made of the cluster's
token and of random numbers of both sides. The number of a frame is its nonce: one that was changed, left
out, repeated, sent back or taken from another connection does not open.
"""

import secrets
from typing import Final, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stratagem.cluster.token import Token
from stratagem.errors import ProtocolError
from stratagem.parameters.network import frames
from stratagem.parameters.network.frames import (
    HEADER_BYTES,
    MOST_FRAME_BYTES,
    NONCE_BYTES,
    SEAL_BYTES,
    Bytes,
    FrameKind,
    Header,
)

_NONCE_OF_CIPHER_BYTES: Final = 12


@final
class Sealer:
    """Makes the frames of one direction.

    Args:
        key: 32 bytes that only both sides know.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._room = memoryview(bytearray(MOST_FRAME_BYTES))

    def seal(self, kind: FrameKind, payload: Bytes, *, request: int = 0, offset: int = 0) -> memoryview:
        """The next frame; it is good until the one after it is made."""
        with memoryview(payload) as view:
            header = Header(kind, self._number, request, offset, view.nbytes).pack()
            frame = self._room[: HEADER_BYTES + view.nbytes + SEAL_BYTES]
            frame[:HEADER_BYTES] = header
            with frame[HEADER_BYTES:] as rest:
                self._cipher.encrypt_into(_nonce(self._number), view, header, rest)
        self._number += 1
        return frame


@final
class FrameOpener:
    """Opens the frames of one direction, in their order.

    Args:
        key: 32 bytes that only both sides know.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._room = memoryview(b"")

    def parse(self, frame: Bytes) -> Header:
        """The header of a frame that is the next one by its own word.

        Raises:
            ProtocolError: It is no frame, or not the next one.
        """
        header = frames.parse(frame)
        if header.sequence != self._number:
            raise ProtocolError(f"frame {header.sequence} came, {self._number} was to come")
        return header

    def open(self, frame: Bytes, header: Header) -> bytes:
        """What a frame carries.

        Raises:
            ProtocolError: It was not made by the other side.
        """
        return bytes(self.open_aside(frame, header))

    def open_aside(self, frame: Bytes, header: Header) -> memoryview:
        """What a frame carries, where nobody else can see it; it is good until the next frame is opened.

        Raises:
            ProtocolError: It was not made by the other side.
        """
        if len(self._room) < header.length:
            self._room = memoryview(bytearray(header.length))
        content = self._room[: header.length]
        self.open_into(frame, header, content)
        return content

    def open_into(self, frame: Bytes, header: Header, target: Bytes) -> None:
        """Puts what a frame carries into memory of exactly that size, which is garbage if this fails.

        Raises:
            ProtocolError: It was not made by the other side.
        """
        with memoryview(frame) as whole, whole[:HEADER_BYTES] as start, whole[HEADER_BYTES:] as rest:
            try:
                self._cipher.decrypt_into(_nonce(self._number), rest, start, target)
            except InvalidTag:
                raise ProtocolError("a frame was changed on its way, or comes from somebody else") from None
        self._number += 1


@final
class Handshake:
    """What both sides of a handshake have said, and what follows from it for who has the token.

    Args:
        token: The secret of the cluster.
        connecting: The random number of the side that connects.
        serving: The random number of the side that serves.
    """

    def __init__(self, token: Token, connecting: bytes, serving: bytes) -> None:
        self._token = token
        self._said = bytes([frames.VERSION]) + connecting + serving

    @property
    def proof(self) -> bytes:
        """By which the side that connects shows that it has the token."""
        return self._token.sign(b"stratagem parameters connects" + self._said)

    @property
    def welcome(self) -> bytes:
        """By which the side that serves shows it."""
        return self._token.sign(b"stratagem parameters serves" + self._said)

    def keys(self) -> tuple[bytes, bytes]:
        """For frames to the side that serves, and for frames from it."""
        return (
            self._token.sign(b"stratagem parameters up" + self._said),
            self._token.sign(b"stratagem parameters down" + self._said),
        )


def new_nonce() -> bytes:
    """A number that nobody has used before."""
    return secrets.token_bytes(NONCE_BYTES)


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_OF_CIPHER_BYTES, "big")
