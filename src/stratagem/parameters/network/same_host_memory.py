"""Memory that a worker and a parameter server of one machine share, so that tensors need not travel between them.

The worker makes it, without a name; the server opens it through the worker's entry in `/proc`, and believes that it is
the same memory only when it finds there what the worker has said over the sealed connection. On another machine it
does not, and tensors travel in frames. Where each variable lies follows from the plan, on both sides alike.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from hmac import compare_digest
from typing import Any, Final, final

import torch

from stratagem.devices.host import Host
from stratagem.errors import ProtocolError
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.compression import PLAIN
from stratagem.parameters.protocol import Piece

SHARED: Final = "shared"
"""What a server answers that has found the memory."""

_NAME: Final = "stratagem-parameters"
_PROOF_BYTES: Final = 32
_HEADER_BYTES: Final = 4096  # whatever the size of a page is
_ALIGN_BYTES: Final = 64
# Who has mapped it must not be killed for touching what is no longer there.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@final
class Nearby:
    """The memory, mapped in this process: room for a gradient and a value of each variable that is not sparse.

    Args:
        mapping: All of it.
        pieces: Those of the shard.
    """

    def __init__(self, mapping: mmap.mmap, pieces: Sequence[Piece]) -> None:
        self._mapping = mapping
        self.gradients: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.is_used = False
        offset = _HEADER_BYTES
        for views in (self.gradients, self.values):
            for piece in _dense(pieces):
                views[piece.name] = _view(mapping, piece, offset)
                offset += _aligned(views[piece.name].nbytes)

    @classmethod
    def made(cls, pieces: Sequence[Piece], stack: contextlib.ExitStack) -> "tuple[Nearby, Body] | None":
        """New memory, and what to tell the server; `None` if there is no use in it.

        Args:
            pieces: Those of the shard.
            stack: Closed when the server has answered.
        """
        if not any(piece.shape and 0 not in piece.shape for piece in _dense(pieces)):
            return None
        num_bytes, proof = _num_bytes(pieces), secrets.token_bytes(_PROOF_BYTES)
        free_bytes = Host().available_memory_bytes()
        if free_bytes is not None and num_bytes > free_bytes:
            return None
        try:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        stack.callback(os.close, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED)
        except OSError:  # not that much memory is free
            return None
        mapping[:_PROOF_BYTES] = proof
        said = {"pid": os.getpid(), "descriptor": descriptor, "num_bytes": num_bytes, "proof": proof.hex()}
        return cls(mapping, pieces), said

    @classmethod
    def found(cls, said: Body, pieces: Sequence[Piece]) -> "Nearby | None":
        """The memory that a worker speaks of; `None` if it is not on this machine.

        Raises:
            ProtocolError: It is not what it must be.
        """
        if said["num_bytes"] != _num_bytes(pieces):
            raise ProtocolError(f"shared memory has {_num_bytes(pieces)} bytes here, got {said['num_bytes']}")
        path = f"/proc/{said['pid']}/fd/{said['descriptor']}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != _SEALS or os.fstat(descriptor).st_size != _num_bytes(
                pieces
            ):
                return None
            mapping = mmap.mmap(descriptor, _num_bytes(pieces), mmap.MAP_SHARED)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        if not compare_digest(mapping[:_PROOF_BYTES].hex(), said["proof"]):
            mapping.close()
            return None
        return cls(mapping, pieces)

    def has_room_for(self, described: Sequence[Sequence[Any]]) -> bool:
        """Whether gradients, as a push describes them, can be put here: all are whole, and nothing else is here."""
        return not self.is_used and all(
            count is None and encoding == PLAIN and name in self.gradients for name, count, encoding in described
        )

    def put(self, described: Sequence[Sequence[Any]], gradients: Sequence[torch.Tensor]) -> None:
        """Copies the gradients of a push to their places."""
        self.is_used = True
        for (name, _, _), gradient in zip(described, gradients, strict=True):
            self.gradients[name].copy_(gradient)


def _dense(pieces: Sequence[Piece]) -> list[Piece]:
    return [piece for piece in pieces if not piece.variable.sparse]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _num_bytes(pieces: Sequence[Piece]) -> int:
    sizes = (torch.Size(piece.shape).numel() * piece.variable.dtype.itemsize for piece in _dense(pieces))
    return _HEADER_BYTES + 2 * sum(map(_aligned, sizes))


def _view(mapping: mmap.mmap, piece: Piece, offset: int) -> torch.Tensor:
    count = torch.Size(piece.shape).numel()
    if not count:
        return torch.empty(piece.shape, dtype=piece.variable.dtype)
    return torch.frombuffer(mapping, dtype=piece.variable.dtype, offset=offset, count=count).view(piece.shape)
