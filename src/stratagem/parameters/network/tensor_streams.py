"""Turns tensors into a stream of bytes and back, in pieces of which none is larger than a frame.

Large tensors are read and written in place; small ones share a piece. The receiver has its tensors
before the first byte comes, and takes the stream in its order and to its end, nothing else.
"""

from collections.abc import Iterator, Sequence
from typing import Final, final

import torch

from stratagem.errors import ProtocolError
from stratagem.parameters.network.encryption import FrameOpener
from stratagem.parameters.network.frames import CHUNK_BYTES, Bytes, Header

_SMALL_BYTES: Final = 64 * 2**10


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, which must lie in one piece in the memory of the host."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with these values that lies in one piece in the memory of the host: itself, or a copy."""
    return tensor.detach().to("cpu").contiguous()


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, Bytes]]:
    """The stream of some tensors: where each piece begins, and its bytes."""
    offset = 0
    waiting = bytearray()
    for tensor in tensors:
        view = as_bytes(tensor)
        if waiting and (view.nbytes > _SMALL_BYTES or len(waiting) + view.nbytes > CHUNK_BYTES):
            yield offset, waiting
            offset += len(waiting)
            waiting = bytearray()
        if view.nbytes <= _SMALL_BYTES:
            waiting += view
            continue
        for start in range(0, view.nbytes, CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            yield offset, piece
            offset += piece.nbytes
    if waiting:
        yield offset, waiting


@final
class Inflow:
    """Tensors that are being received.

    Args:
        tensors: Where the stream goes, each in one piece in the memory of the host.
        in_use: Whether they may be looked at at any time: only what is known to be from the other side goes there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, in_use: bool = False) -> None:
        self.tensors = tensors
        self._in_use = in_use
        self._targets = [view for each in tensors if (view := as_bytes(each)).nbytes]
        self._place = self._within = self._received = 0

    @property
    def is_complete(self) -> bool:
        """Whether all has come."""
        return self._place == len(self._targets)

    def take(self, opener: FrameOpener, frame: Bytes, header: Header) -> None:
        """Puts the next bytes of the stream where they belong.

        Raises:
            ProtocolError: They are not the next ones, too many, or not from the other side.
        """
        if header.offset != self._received or not 0 < header.length <= self._left_for(header.length):
            raise ProtocolError(
                f"{header.length} bytes came for byte {header.offset} of a stream that is at {self._received}"
            )
        target = self._targets[self._place]
        if not self._in_use and self._within + header.length <= target.nbytes:
            with target[self._within : self._within + header.length] as here:
                opener.open_into(frame, header, here)
            self._advance(header.length)
            return
        content = opener.open_aside(frame, header)
        while content:
            target = self._targets[self._place]
            count = min(len(content), target.nbytes - self._within)
            target[self._within : self._within + count] = content[:count]
            content = content[count:]
            self._advance(count)

    def _left_for(self, wanted: int) -> int:
        """How many more bytes may come, up to those wanted."""
        left = -self._within
        for target in self._targets[self._place :]:
            left += target.nbytes
            if left >= wanted:
                return wanted
        return left

    def _advance(self, count: int) -> None:
        self._received += count
        self._within += count
        if self._within == self._targets[self._place].nbytes:
            self._place, self._within = self._place + 1, 0
