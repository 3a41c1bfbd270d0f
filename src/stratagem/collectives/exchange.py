"""Sums one flat vector over the replicas of a machine: the fast path of gradients.

The vector is exchanged in windows that fit into the processors' cache: each replica shows the others
its part of a window in shared memory, except what it sums itself; each sums its own part in the order
of the replicas, so that two runs agree to the last bit. The sum lies once in shared memory and is
everyone's. Replicas see it through a private mapping: what one does to its gradients afterwards
(clipping, scaling) only it sees.
"""

import cmath
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from stratagem.collectives.collective import is_finite
from stratagem.collectives.signals import Signals
from stratagem.processes.region import PAGE_BYTES, Region

_WINDOW_BYTES = 8 * 2**20
_FURTHER_WINDOW_BYTES = 2 * 2**20  # other machines have it while the next one is computed
_NUM_BUFFERS = 2  # while one window is summed, the next is shown
_BLOCK = 128 * 1024  # elements: what is summed stays in the cache for the next pass
_LOW_PRECISION = (torch.float16, torch.bfloat16)

# Begins to sum a flat tensor, in place; the function that it returns waits for the sum.
StartSum = Callable[[torch.Tensor], Callable[[], torch.Tensor]]

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
        further: Whether the sum goes on to other machines, so that what nobody here has counts as zero.
    """

    def __init__(
        self,
        slots: Region,
        total: Region,
        dtype: torch.dtype,
        segments: Sequence[tuple[int, int]],
        num_elements: int,
        signals: Signals,
        window_bytes: int | None = None,
        *,
        further: bool = False,
    ) -> None:
        self._segments = list(segments)
        self._signals = signals
        self._total = total
        self._further = further
        self._between: StartSum | None = None
        self._on_their_way: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        self._num_early = 0
        self._last: int | None = None
        rank, size = signals.rank, signals.size
        window_bytes = window_bytes or (_FURTHER_WINDOW_BYTES if further else _WINDOW_BYTES)
        width = _window(num_elements, dtype, window_bytes)
        count = _NUM_BUFFERS * size * width
        self._slots = slots.shared(dtype, 0, count).view(_NUM_BUFFERS, size, width)
        num_rows = size + 1  # the last is for what anybody has, on any machine
        presence = (
            slots.shared(torch.uint8, count * dtype.itemsize, num_rows * len(segments)).view(num_rows, -1).numpy()
        )
        self._presence, self._anywhere = presence[:size], presence[size]
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
        return size * _NUM_BUFFERS * dtype.itemsize * width + (size + 1) * num_segments + PAGE_BYTES

    def forget(self) -> None:
        """Gives up what this replica changed in the last sum, before the next one is made."""
        self._total.drop(self._total.written_pages())

    def add_up(
        self, vectors: Sequence[torch.Tensor | None], between: "StartSum | None" = None
    ) -> tuple[list[bool], bool]:
        """Sums the vectors of all replicas. The sum is whole after the next barrier.

        Args:
            vectors: This replica's segments, flat; `None` where it has none.
            between: Begins to sum a window over the machines, in place; the result waits for that. Given in one
                replica of each machine, which then calls `finish` after the next barrier.
        Returns:
            For each segment whether anybody had it, and whether what was summed here is finite.
        """
        rank = self._signals.rank
        self._presence[rank] = [vector is not None for vector in vectors]
        finite = True
        self._between, self._last = between, None
        num_early, self._num_early = self._num_early, 0
        rest = range(len(self._windows) - num_early)
        # On their way to other machines the last window is the first: a backward pass gives gradients in that order.
        for turn, number in enumerate(reversed(rest) if self._further else rest):
            start, shown, summed = self._windows[number]
            slots = self._slots[turn % _NUM_BUFFERS]
            self._show(vectors, shown, slots[rank], start)
            # Whoever passes has summed the window before this one: its buffer is free for the next.
            self._signals.barrier()
            if self._last is not None:
                self._send_on(self._last)
            finite &= self._sum_up(vectors, summed, slots, start)
            self._last = number
        return [bool(each) for each in self._presence.max(axis=0)], finite

    def give_up(self) -> bool:
        """Forgets windows that a pass has sent which then failed; tells whether there were any."""
        num_early, self._num_early, self._on_their_way = self._num_early, 0, []
        return num_early > 0

    def next_segments(self) -> range:
        """The segments that the next window to be sent early consists of."""
        number = len(self._windows) - 1 - self._num_early
        # The last to go is never early: elsewhere it goes out after `add_up`, behind windows of other exchanges.
        pieces = self._windows[number][2] if number > 0 else []
        return range(pieces[0][0], pieces[-1][0] + 1) if pieces else range(0)

    def send_early(self, vectors: Mapping[int, torch.Tensor], between: "StartSum") -> None:
        """Begins to sum the next window over the machines, before the others are there.

        For a replica that is alone on its machine. `add_up` takes the rest.
        """
        number = len(self._windows) - 1 - self._num_early
        for segment, first, last in self._windows[number][2]:
            offset = self._segments[segment][0]
            self._sum[first:last].copy_(vectors[segment][first - offset : last - offset])
        self._between = between
        self._num_early += 1
        self._send_on(number)

    def finish(self) -> bool:
        """Waits until all windows are summed over the machines; tells whether the sum is finite."""
        if self._last is not None:
            self._send_on(self._last)
        waiting, self._on_their_way = self._on_their_way, []
        for _, wait in waiting:
            wait()
        return all(is_finite(window) for window, _ in waiting)

    def note_anywhere(self, present: Sequence[int]) -> None:
        """Lets the others of this machine know which segments anybody has, on any machine."""
        self._anywhere[:] = present

    def anywhere(self) -> list[bool]:
        """What was noted before the last barrier."""
        return [bool(each) for each in self._anywhere]

    def _send_on(self, number: int) -> None:
        if self._between is not None:
            start = self._windows[number][0]
            end = self._windows[number + 1][0] if number + 1 < len(self._windows) else len(self._sum)
            window = self._sum[start:end]
            self._on_their_way.append((window, self._between(window)))

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
            elif self._further:
                self._sum[first:last].zero_()
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
    return cmath.isfinite(total) or bool(target.isfinite().all())
