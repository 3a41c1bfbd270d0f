"""How gradients are written on the wire: as they are, as rows, or smaller and less exact.

`bf16` keeps 8 bits of each mantissa. `topk` sends the largest elements only; what is left out is added
to the next gradient (error feedback), so that it is late, not lost. Owns sizes on the wire, on both sides.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Final, final

import torch

from stratagem.errors import ParameterError, ProtocolError
from stratagem.parameters.protocol import Piece, Rows

PLAIN: Final = ""
BF16: Final = "bf16"
TOP_K: Final = "topk"
_LEAST_ELEMENTS: Final = 1024  # of smaller tensors nothing is left out


@final
@dataclasses.dataclass(frozen=True)
class Compression:
    """Says how gradients are compressed on their way to parameter servers.

    Args:
        kind: `bf16` sends numbers of half the size; `topk` sends the largest elements only.
        fraction: The part of the elements that `topk` sends.
    Raises:
        ParameterError: `kind` or `fraction` has another value.
    Example:
        >>> Compression("topk", fraction=0.05)
        Compression(kind='topk', fraction=0.05)
    """

    kind: str
    fraction: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in (BF16, TOP_K):
            raise ParameterError(f"gradients are compressed by 'bf16' or 'topk', got {self.kind!r}")
        if not 0 < self.fraction <= 1:
            raise ParameterError(f"fraction is above 0 and at most 1, got {self.fraction!r}")


@final
class Encoder:
    """Writes the gradients of one worker.

    Args:
        compression: How they are made smaller; `None` leaves them as they are.
    """

    def __init__(self, compression: Compression | None) -> None:
        self._compression = compression
        self._left_out: dict[tuple[str, int], torch.Tensor] = {}

    def encode(self, piece: Piece, gradient: torch.Tensor | Rows) -> tuple[int | None, str, list[torch.Tensor]]:
        """How many rows or elements, by which encoding, and the tensors that are sent."""
        if isinstance(gradient, Rows):
            return len(gradient.indices), PLAIN, [gradient.indices, gradient.values]
        if self._compression is None or gradient.dtype != torch.float32:
            return None, PLAIN, [gradient]
        if self._compression.kind == BF16:
            return None, BF16, [gradient.to(torch.bfloat16)]
        if gradient.numel() < _LEAST_ELEMENTS:
            return None, PLAIN, [gradient]
        return self._largest(piece, gradient, self._compression.fraction)

    def _largest(
        self, piece: Piece, gradient: torch.Tensor, fraction: float
    ) -> tuple[int | None, str, list[torch.Tensor]]:
        whole = gradient.reshape(-1).clone()
        before = self._left_out.get((piece.name, piece.first))
        if before is not None:
            whole += before
        count = max(1, math.ceil(fraction * whole.numel()))
        indices = whole.abs().topk(count, sorted=False).indices.sort().values
        values = whole[indices]
        whole[indices] = 0
        self._left_out[piece.name, piece.first] = whole
        return count, TOP_K, [indices, values]


def rooms(piece: Piece, count: int | None, encoding: str) -> list[torch.Tensor]:
    """Memory for a gradient of a piece on its way, of the size that the piece allows.

    Raises:
        ProtocolError: A gradient of this piece cannot be so.
    """
    dtype = piece.variable.dtype
    if encoding == PLAIN and count is None:
        return [torch.empty(piece.shape, dtype=dtype)]
    if encoding == BF16 and count is None and dtype == torch.float32:
        return [torch.empty(piece.shape, dtype=torch.bfloat16)]
    most = math.prod(piece.shape) if encoding == TOP_K else piece.shape[0] if piece.shape else 0
    if (
        count is None
        or count > most
        or encoding not in (PLAIN, TOP_K)
        or (encoding == TOP_K and dtype != torch.float32)
    ):
        raise ProtocolError(f"{piece.name!r} has no gradient of {count} rows by {encoding!r}")
    form = (count,) if encoding == TOP_K else (count, *piece.shape[1:])
    return [torch.empty(count, dtype=torch.int64), torch.empty(form, dtype=dtype)]


def decoded(piece: Piece, count: int | None, encoding: str, tensors: Iterator[torch.Tensor]) -> torch.Tensor | Rows:
    """The gradient that has come.

    Raises:
        ParameterError: It names elements that are not there.
    """
    if encoding == BF16:
        return next(tensors).to(torch.float32)
    if count is None:
        return next(tensors)
    indices, values = next(tensors), next(tensors)
    if encoding == PLAIN:
        return Rows(indices, values)
    num_elements = math.prod(piece.shape)
    if count and not 0 <= int(indices.min()) <= int(indices.max()) < num_elements:
        raise ParameterError(f"a gradient of {piece.name!r} names elements that it does not have")
    return torch.zeros(num_elements).index_put_((indices,), values).view(piece.shape)
