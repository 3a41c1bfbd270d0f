"""Sums one flat vector over the replicas of a machine: the fast path of gradients.

The vector is exchanged in windows that fit into the processors' cache: each replica shows the others
its part of a window in shared memory, except what it sums itself; each sums its own part in the order
of the replicas, so that two runs agree to the last bit. The sum lies once in shared memory and is
everyone's. Replicas see it through a private mapping: what one does to its gradients afterwards
(clipping, scaling) only it sees.
"""

import cmath
from collections.abc import Sequence
from typing import final

import torch

from stratagem.collectives.signals import Signals
from stratagem.replicas.memory import PAGE_BYTES, Region

_WINDOW_BYTES = 8 * 2**20
_NUM_BUFFERS = 2  # while one window is summed, the next is shown
_BLOCK = 128 * 1024  # elements: what is summed stays in the cache for the next pass
_LOW_PRECISION = (torch.float16, torch.bfloat16)

# A piece of a segment: the segment's number, and where the piece starts and ends in the vector.
Piece = tuple[int, int, int]


@final
class Exchange:
    """Slots and a sum for one flat vector made of segments (one for each parameter).

    Args:
        slots: Memory in which windows are shown: `num_slot_bytes`.
        total: Memory for the sum: one vector.
        dtype: Of the elements.
        segments: Where each segment starts and how many elements it has, in order.
        num_elements: The length of the vector.
        signals: The meeting point.
        window_bytes: How much of the vector is exchanged at a time.
    """

    def __init__(
        self,
        slots: Region,
        total: Region,
        dtype: torch.dtype,
        segments: Sequence[tuple[int, int]],
        num_elements: int,
        signals: Signals,
        window_bytes: int = _WINDOW_BYTES,
    ) -> None:
        self._segments = list(segments)
        self._signals = signals
        self._total = total
        rank, size = signals.rank, signals.size
        width = _window(num_elements, dtype, window_bytes)
        count = _NUM_BUFFERS * size * width
        self._slots = slots.shared(dtype, 0, count).view(_NUM_BUFFERS, size, width)
        self._presence = slots.shared(torch.uint8, count * dtype.itemsize, size * len(segments)).view(size, -1).numpy()
        self._sum = total.shared(dtype, 0, num_elements)
        self.sum = total.private(dtype, 0, num_elements)
        self._windows: list[tuple[int, list[Piece], list[Piece]]] = []  # start, pieces shown, pieces summed here
        for start in range(0, num_elements, width):
            length = min(width, num_elements - start)
            first, last = (start + bound for bound in chunk_of(rank, size, length))
            shown = [*self._pieces(start, first), *self._pieces(last, start + length)]
            self._windows.append((start, shown, self._pieces(first, last)))

    @staticmethod
    def num_slot_bytes(
        num_elements: int, num_segments: int, dtype: torch.dtype, size: int, window_bytes: int = _WINDOW_BYTES
    ) -> int:
        """How much memory the slots need."""
        width = _window(num_elements, dtype, window_bytes)
        return size * (_NUM_BUFFERS * dtype.itemsize * width + num_segments) + PAGE_BYTES

    def present_in(self) -> list[list[int]]:
        """For each segment the replicas that had it, in the last sum."""
        return [[int(rank) for rank in column.nonzero()[0]] for column in self._presence.T]

    def forget(self) -> None:
        """Gives up what this replica changed in the last sum, before the next one is made."""
        self._total.drop(self._total.written_pages())

    def add_up(self, vectors: Sequence[torch.Tensor | None]) -> tuple[list[bool], bool]:
        """Sums the vectors of all replicas. The sum is whole after the next barrier.

        Args:
            vectors: This replica's segments, flat; `None` where it has none.
        Returns:
            For each segment whether anybody had it, and whether what was summed here is finite.
        """
        rank = self._signals.rank
        self._presence[rank] = [vector is not None for vector in vectors]
        finite = True
        for number, (start, shown, summed) in enumerate(self._windows):
            slots = self._slots[number % _NUM_BUFFERS]
            self._show(vectors, shown, slots[rank], start)
            # Whoever passes has summed the window before this one: its buffer is free for the next.
            self._signals.barrier()
            finite &= self._sum_up(vectors, summed, slots, start)
        return [bool(each) for each in self._presence.max(axis=0)], finite

    def _show(
        self, vectors: Sequence[torch.Tensor | None], pieces: Sequence[Piece], slot: torch.Tensor, start: int
    ) -> None:
        for number, first, last in pieces:
            vector, offset = vectors[number], self._segments[number][0]
            if vector is not None:
                slot[first - start : last - start].copy_(vector[first - offset : last - offset])

    def _sum_up(
        self,
        vectors: Sequence[torch.Tensor | None],
        pieces: Sequence[Piece],
        slots: torch.Tensor,
        start: int,
    ) -> bool:
        finite = True
        for number, first, last in pieces:
            vector, offset = vectors[number], self._segments[number][0]
            parts = []
            for rank in range(self._signals.size):
                if not self._presence[rank, number]:
                    continue
                if rank == self._signals.rank and vector is not None:
                    parts.append(vector[first - offset : last - offset])
                else:
                    parts.append(slots[rank, first - start : last - start])
            if parts:
                finite &= _add(parts, self._sum[first:last])
        return finite

    def _pieces(self, first: int, last: int) -> list[Piece]:
        """The pieces of segments in a range of the vector."""
        bounds = [(max(first, offset), min(last, offset + numel)) for offset, numel in self._segments]
        return [(number, start, end) for number, (start, end) in enumerate(bounds) if start < end]


def _window(num_elements: int, dtype: torch.dtype, window_bytes: int) -> int:
    """How many elements a window has."""
    return max(1, min(num_elements, window_bytes // dtype.itemsize))


def chunk_of(rank: int, size: int, num_elements: int) -> tuple[int, int]:
    """The part of a vector that a replica sums and updates: whole cache lines, evenly."""
    bounds = [num_elements * each // size // 1024 * 1024 for each in range(size)] + [num_elements]
    return bounds[rank], bounds[rank + 1]


def _add(parts: Sequence[torch.Tensor], target: torch.Tensor) -> bool:
    """Sums parts in order, block by block; tells whether the sum is finite."""
    total = 0.0
    for start in range(0, len(target), _BLOCK):
        block = target[start : start + _BLOCK]
        first, *others = (part[start : start + _BLOCK] for part in parts)
        if not others:
            block.copy_(first)
        elif block.dtype in _LOW_PRECISION:
            wide = first.float()
            for other in others:
                wide.add_(other)
            block.copy_(wide)
        else:
            torch.add(first, others[0], out=block)
            for other in others[1:]:
                block.add_(other)
        total += block.sum().item()
    # One number shows whether any is not finite; only then is it worth looking at each.
    return cmath.isfinite(total) or bool(target.isfinite().all())
