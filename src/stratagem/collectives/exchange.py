"""Sums one flat vector over the replicas of a machine: the fast path of gradients.

Each replica publishes its vector in a slot of shared memory, except the chunk that it sums itself;
each sums its own chunk in the order of the replicas, so that two runs agree to the last bit; the sum
lies once in shared memory and is everyone's. Replicas see it through a private mapping: what one
does to its gradients afterwards (clipping, scaling) only it sees.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from stratagem.collectives.signals import Signals
from stratagem.replicas.memory import PAGE_BYTES, Region

_BLOCK = 128 * 1024  # elements: what is summed stays in the cache for the next pass
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@final
class Exchange:
    """Slots and a sum for one flat vector made of segments (one for each parameter).

    Args:
        slots: Memory for a vector of each replica: `num_slot_bytes`.
        total: Memory for the sum: one vector.
        dtype: Of the elements.
        segments: Where each segment starts and how many elements it has, in order.
        num_elements: The length of the vector.
        signals: The meeting point.
    """

    def __init__(
        self,
        slots: Region,
        total: Region,
        dtype: torch.dtype,
        segments: Sequence[tuple[int, int]],
        num_elements: int,
        signals: Signals,
    ) -> None:
        self.dtype = dtype
        self.segments = list(segments)
        self.num_elements = num_elements
        self._signals = signals
        self._total = total
        size, width = signals.size, dtype.itemsize * self.num_elements
        self._slots = [slots.shared(dtype, rank * width, self.num_elements) for rank in range(size)]
        self._presence = slots.shared(torch.uint8, size * width, size * len(segments)).view(size, -1).numpy()
        self._sum = total.shared(dtype, 0, self.num_elements)
        self.sum = total.private(dtype, 0, self.num_elements)
        self.chunk = chunk_of(signals.rank, signals.size, self.num_elements)

    @staticmethod
    def num_slot_bytes(num_elements: int, num_segments: int, dtype: torch.dtype, size: int) -> int:
        """How much memory the slots need."""
        return size * (dtype.itemsize * num_elements + num_segments) + PAGE_BYTES

    def slot(self) -> torch.Tensor:
        """This replica's own slot: a vector that is built here need not be copied."""
        return self._slots[self._signals.rank]

    def present_in(self) -> list[list[int]]:
        """For each segment the replicas that had it, as of the last barrier."""
        return [[int(rank) for rank in column.nonzero()[0]] for column in self._presence.T]

    def forget(self) -> None:
        """Gives up what this replica changed in the last sum, before the next one is made."""
        self._total.drop(self._total.written_pages())

    def publish(self, vectors: Sequence[torch.Tensor | None]) -> None:
        """Shows the others this replica's segments, flat; `None` where it has none."""
        rank, (start, end) = self._signals.rank, self.chunk
        slot = self._slots[rank]
        for number, ((offset, numel), vector) in enumerate(zip(self.segments, vectors, strict=True)):
            self._presence[rank, number] = vector is not None
            if vector is None or vector.data_ptr() == slot.data_ptr() + offset * self.dtype.itemsize:
                continue
            before, after = max(0, min(start - offset, numel)), max(0, min(end - offset, numel))
            if before:
                slot[offset : offset + before].copy_(vector[:before])
            if after < numel:
                slot[offset + after : offset + numel].copy_(vector[after:])

    def reduce(self, vectors: Sequence[torch.Tensor | None], counted: Sequence[bool]) -> tuple[list[bool], bool]:
        """Sums this replica's chunk. Call between two barriers.

        Args:
            vectors: What this replica published.
            counted: Which replicas count; the others' vectors are left out, whatever they hold.
        Returns:
            For each segment whether anybody had it, and whether this chunk is finite.
        """
        rank, (start, end) = self._signals.rank, self.chunk
        ranks = [each for each, counts in enumerate(counted) if counts]
        present: np.ndarray = np.asarray(self._presence[ranks].any(axis=0))
        finite = True
        for number, (offset, numel) in enumerate(self.segments):
            first, last = max(start, offset), min(end, offset + numel)
            if first >= last or not present[number]:
                continue
            parts = [
                vectors[number][first - offset : last - offset] if each == rank else self._slots[each][first:last]  # type: ignore[index]
                for each in ranks
                if self._presence[each, number]
            ]
            finite &= _add(parts, self._sum[first:last])
        return [bool(each) for each in present], finite


def chunk_of(rank: int, size: int, num_elements: int) -> tuple[int, int]:
    """The part of a vector that a replica sums and updates: whole cache lines, evenly."""
    bounds = [num_elements * each // size // 1024 * 1024 for each in range(size)] + [num_elements]
    return bounds[rank], bounds[rank + 1]


def _add(parts: Sequence[torch.Tensor], target: torch.Tensor) -> bool:
    """Sums parts in order, block by block; tells whether the sum is finite."""
    finite = True
    for start in range(0, len(target), _BLOCK):
        block = target[start : start + _BLOCK]
        first, *others = (part[start : start + _BLOCK] for part in parts)
        if not others:
            block.copy_(first)
        elif block.dtype in _LOW_PRECISION:
            total = first.float()
            for other in others:
                total.add_(other)
            block.copy_(total)
        else:
            torch.add(first, others[0], out=block)
            for other in others[1:]:
                block.add_(other)
        # One number shows whether any is not finite; only then is it worth looking at each.
        if not block.sum().isfinite() and not block.isfinite().all():
            finite = False
    return finite
