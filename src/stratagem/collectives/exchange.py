"""Sums one flat vector over the replicas of a machine: the fast path of gradients.

The vector is exchanged in windows that fit into the processors' cache: each replica shows the others
its part of a window in shared memory, except what it sums itself; each sums its own part in the order
of the replicas, so that two runs agree to the last bit. The sum lies once in shared memory and is
everyone's. Replicas see it through a private mapping: what one does to its gradients afterwards
(clipping, scaling) only it sees.

Neighbouring small segments are summed together, in a few operations on long ranges: models have
hundreds of them, and each operation costs more than what it adds.
"""

import cmath
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from stratagem import _torch
from stratagem.collectives.collective import is_finite
from stratagem.collectives.in_place import SegmentsInPlace
from stratagem.collectives.signals import Signals
from stratagem.processes.region import PAGE_BYTES, Region

_WINDOW_BYTES = 8 * 2**20
_FURTHER_WINDOW_BYTES = 2 * 2**20  # other machines have it while the next one is computed
_NUM_BUFFERS = 2  # while one window is summed, the next is shown
_BLOCK = 128 * 1024  # elements: what is summed stays in the cache for the next pass
_SMALL = 32 * 1024
_LOW_PRECISION = (torch.float16, torch.bfloat16)

# Begins to sum a flat tensor, in place; the function that it returns waits for the sum, and tells whether it is finite.
StartSum = Callable[[torch.Tensor], Callable[[], bool]]

# In the place of a vector that lies where its sum will be already.
PLACED = torch.empty(0)

# What was summed: the windows of the sum by number, and the segments that lie elsewhere.
KeptSum = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]

# A piece of a segment: the segment's number, and where the piece starts and ends in the vector.
Piece = tuple[int, int, int]

# The shape and the strides of a segment.
Form = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class _Window:
    """What one replica does with a part of the vector.

    Args:
        start: Where it begins.
        shown: Pieces of large segments that others sum.
        small: Small segments, which are shown whoever sums them.
        cut: Pieces of small segments that begin or end inside one, likewise.
        summed: Runs of neighbouring pieces that this replica sums; a large one is alone.
    """

    start: int
    shown: list[Piece]
    small: list[Piece]
    cut: list[Piece]
    summed: list[list[Piece]]

    @functools.cached_property
    def segments(self) -> range:
        """The segments that this replica sums a part of."""
        return range(self.summed[0][0][0], self.summed[-1][-1][0] + 1) if self.summed else range(0)


@final
class WindowExchange:
    """Slots and a sum for one flat vector made of segments (one for each parameter).

    Args:
        slots: Memory in which windows are shown: `num_slot_bytes`.
        total: Memory for the sum: one vector.
        dtype: Of the elements.
        segments: Where each segment starts and how many elements it has, in order.
        num_elements: The length of the vector.
        signals: The meeting point.
        window_bytes: How much of the vector is exchanged at a time.
        shown_as: The type as which elements are shown to others; by default their own. Sums are made in their own.
        further: Whether the sum goes on to other machines, so that what nobody here has counts as zero.
        forms: How segments look, if small ones are given as they are and not flat.
        small: Up to how many elements a segment is shown whole, and summed together with its neighbours.
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
        shown_as: torch.dtype | None = None,
        further: bool = False,
        forms: Sequence[Form] | None = None,
        small: int = _SMALL,
    ) -> None:
        self._segments = list(segments)
        self._small = small
        self._forms = forms or [((numel,), (1,)) for _, numel in segments]
        self._signals = signals
        self._total = total
        self._further = further
        self._between: StartSum | None = None
        self._on_their_way: list[Callable[[], bool]] = []
        self._num_early = 0
        self._last: int | None = None
        rank, size = signals.rank, signals.size
        window_bytes = window_bytes or (_FURTHER_WINDOW_BYTES if further else _WINDOW_BYTES)
        width = _window(num_elements, dtype, window_bytes)
        count = _NUM_BUFFERS * size * width
        self._shown_as = shown_as or dtype
        self._slots = slots.shared(self._shown_as, 0, count).view(_NUM_BUFFERS, size, width)
        num_rows = size + 1  # the last is for what anybody has, on any machine
        presence = (
            slots.shared(torch.uint8, count * self._shown_as.itemsize, num_rows * len(segments))
            .view(num_rows, -1)
            .numpy()
        )
        self._presence, self._anywhere = presence[:size], presence[size]
        self._sum = total.shared(dtype, 0, num_elements)
        self.sum = total.private(dtype, 0, num_elements)
        self._windows: list[_Window] = []
        for start in range(0, num_elements, width):
            length = min(width, num_elements - start)
            first, last = (start + bound for bound in chunk_of(rank, size, length))
            others = [*self._pieces(start, first), *self._pieces(last, start + length)]
            own = self._pieces(first, last)
            shown = [piece for piece in others if not self.is_small(piece[0])]
            of_small = [piece for piece in [*others, *own] if self.is_small(piece[0])]
            whole = [piece for piece in of_small if self._is_whole(piece)]
            cut = [piece for piece in of_small if not self._is_whole(piece)]
            self._windows.append(_Window(start, shown, whole, cut, self._runs(own)))
        self._is_alone = further and size == 1
        self._in_place = SegmentsInPlace(self._segments if self._is_alone else (), small, width, total, self._sum)
        # Where small pieces are shown, for each window and each of its buffers.
        self._places: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._gaps: dict[int, torch.Tensor] = {}  # what lies between segments that are summed together

    def is_small(self, segment: int) -> bool:
        """Whether a segment is shown whole, so that it may be given in any form."""
        return self._segments[segment][1] <= self._small

    def _runs(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Neighbouring small pieces together, large ones alone."""
        runs: list[list[Piece]] = []
        for piece in pieces:
            if runs and self.is_small(piece[0]) and self.is_small(runs[-1][-1][0]):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return runs

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

    def changed(self) -> list[int]:
        """The segments of the sum that this replica has changed, in whatever way."""
        pages = self._total.written_pages()
        if not len(pages):
            return []
        return [
            number
            for number in self.in_pages(pages)
            if not torch.equal(*(each[self._range(number)].view(torch.uint8) for each in (self.sum, self._sum)))
        ]

    def in_pages(self, pages: np.ndarray) -> list[int]:
        """The segments of which some element lies in any of these pages of the sum."""
        found = []
        for number in range(len(self._segments)):
            first, last = (each // PAGE_BYTES for each in self._bytes(number))
            if np.any((pages >= first) & (pages <= last)):
                found.append(number)
        return found

    def written_pages(self) -> np.ndarray:
        """The pages of the sum that this replica has written to."""
        return self._total.written_pages()

    def leave(self, segments: Iterable[int]) -> None:
        """Leaves the memory in which this replica sees the sum to whoever has parts of it; `sum` lies elsewhere then.

        Args:
            segments: Those that somebody has: they stay as they are.
        """
        self._total.leave(map(self._bytes, segments))
        self.sum = self._total.private(self.sum.dtype, 0, self.sum.numel())

    def _range(self, segment: int) -> slice:
        offset, numel = self._segments[segment]
        return slice(offset, offset + numel)

    def _bytes(self, segment: int) -> tuple[int, int]:
        own = self._range(segment)
        return own.start * self.sum.itemsize, own.stop * self.sum.itemsize

    def add_up(
        self, vectors: Sequence[torch.Tensor | None], between: "StartSum | None" = None
    ) -> tuple[list[bool], bool]:
        """Sums the vectors of all replicas. The sum is whole after the next barrier.

        Args:
            vectors: This replica's segments, flat, small ones in their form; `None` where it has none.
            between: Begins to sum a window over the machines, in place; the result waits for that. Given in one
                replica of each machine, which then calls `finish` after the next barrier.
        Returns:
            For each segment whether anybody had it, and whether what was summed here is finite.
        """
        rank = self._signals.rank
        has_all = type(None) not in set(map(type, vectors))
        self._presence[rank] = has_all or [vector is not None for vector in vectors]
        finite = not self._is_alone or self._in_place.take_rest(vectors, PLACED)
        self._between, self._last = between, None
        num_early, self._num_early = self._num_early, 0
        rest = range(len(self._windows) - num_early)
        # On their way to other machines the last window is the first: a backward pass gives gradients in that order.
        for turn, number in enumerate(reversed(rest) if self._further else rest):
            window, buffer = self._windows[number], turn % _NUM_BUFFERS
            slots = self._slots[buffer]
            self._show(vectors, number, buffer)
            # Whoever passes has summed the window before this one: its buffer is free for the next.
            self._signals.barrier()
            if self._last is not None:
                self._send_on(self._last)
            for run in window.summed:
                finite &= self._sum_run(vectors, run, slots, window.start)
            self._last = number
        return self._presence.max(axis=0).astype(bool).tolist(), finite

    def give_up(self) -> bool:
        """Forgets windows that a pass has sent which then failed; tells whether there were any."""
        num_early, self._num_early, self._on_their_way = self._num_early, 0, []
        self.let_go()
        return num_early > 0

    def is_in_place(self, segment: int) -> bool:
        """Whether a segment is summed in the memory in which it is placed."""
        return segment in self._in_place

    def sums_in_place(self) -> dict[int, torch.Tensor]:
        """The sums of these segments, in their form, after `finish`."""
        return {number: row.as_strided(*self._forms[number]) for number, row in self._in_place.rows.items()}

    def let_go(self) -> None:
        """Leaves the memory of these segments to whoever has been given the sums."""
        if self._is_alone:
            self._in_place.let_go()

    @property
    def can_send_early(self) -> bool:
        """Whether a window may go out before `add_up`: not the last to go, which is the only one of a small vector."""
        return len(self._windows) > 1

    def next_segments(self) -> range:
        """The segments that the next window to be sent early consists of."""
        number = len(self._windows) - 1 - self._num_early
        # The last to go is never early: elsewhere it goes out after `add_up`, behind windows of other exchanges.
        return self._windows[number].segments if number > 0 else range(0)

    def place(self, segment: int, vector: torch.Tensor, *, add: bool = False) -> bool:
        """Puts a large segment where its sum will be, for a replica that is alone on its machine.

        Args:
            segment: Which.
            vector: Its elements, in one row; of a segment that is summed in place, in memory that nobody else has.
            add: Whether they are added to what was put there before.
        Returns:
            Whether it is finite.
        """
        if segment in self._in_place and not add:
            return self._in_place.put(segment, vector)
        place = self._placed(segment)
        return _add([place, vector] if add else [vector], place)

    def taken_back(self, segment: int) -> torch.Tensor:
        """What was put where the sum of a segment will be, in its form and in memory of its own."""
        placed = self._placed(segment)
        own = placed if segment in self._in_place else placed.clone()
        return own.as_strided(*self._forms[segment])

    def _placed(self, segment: int) -> torch.Tensor:
        if segment in self._in_place:
            return self._in_place.rows[segment]
        offset, numel = self._segments[segment]
        return self._sum[offset : offset + numel]

    def send_early(self, vectors: Mapping[int, torch.Tensor], between: "StartSum") -> None:
        """Begins to sum the next window over the machines, before the others are there.

        For a replica that is alone on its machine. `add_up` takes the rest.

        Args:
            vectors: The segments in the window that do not lie in their place.
            between: How machines sum.
        """
        number = len(self._windows) - 1 - self._num_early
        for segment, first, last in (piece for run in self._windows[number].summed for piece in run):
            if (vector := vectors.get(segment)) is not None:
                offset = self._segments[segment][0]
                self._sum[first:last].copy_(vector[first - offset : last - offset])
        self._between = between
        self._num_early += 1
        self._send_on(number)

    def kept_sum(self) -> KeptSum:
        """The sum, which the next one leaves as it is."""
        windows = {number: each.clone() for number, each in self._in_place.windows_elsewhere().items()}
        return windows, self._in_place.let_go()

    def add_kept(self, kept: KeptSum) -> bool:
        """Adds to the sum what it was before; tells whether it is finite."""
        own = self._in_place.windows_elsewhere(), self._in_place.rows
        pairs = [(now[number], before) for now, them in zip(own, kept, strict=True) for number, before in them.items()]
        finite = [is_finite(now.add_(before)) for now, before in pairs]  # all are added, whatever comes of the first
        return all(finite)

    def finish(self) -> bool:
        """Waits until all windows are summed over the machines; tells whether the sum is finite."""
        if self._last is not None:
            self._send_on(self._last)
        waiting, self._on_their_way = self._on_their_way, []
        finite = [wait() for wait in waiting]  # for each, whatever comes of the first
        self._in_place.bring_back()
        return all(finite)

    def note_anywhere(self, present: Sequence[int]) -> None:
        """Lets the others of this machine know which segments anybody has, on any machine."""
        self._anywhere[:] = present

    def anywhere(self) -> list[bool]:
        """What was noted before the last barrier."""
        return [bool(each) for each in self._anywhere]

    def _send_on(self, number: int) -> None:
        if self._between is not None:
            self._on_their_way.append(self._between(self._in_place.row_to_send(number)))

    def _show(self, vectors: Sequence[torch.Tensor | None], number: int, buffer: int) -> None:
        window, slot = self._windows[number], self._slots[buffer, self._signals.rank]
        for segment, first, last in window.shown:
            vector, offset = vectors[segment], self._segments[segment][0]
            if vector is not None:
                slot[first - window.start : last - window.start].copy_(vector[first - offset : last - offset])
        for piece in window.cut:
            if (vector := vectors[piece[0]]) is not None:
                slot[piece[1] - window.start : piece[2] - window.start].copy_(self._cut(vector, piece))
        if not window.small:
            return
        places = self._places.get((number, buffer))
        if places is None:
            places = self._places[number, buffer] = [self._place(piece, slot, window.start) for piece in window.small]
        sources: list[Any] = [vectors[segment] for segment, _, _ in window.small]
        if type(None) in set(map(type, sources)):
            places = [place for place, source in zip(places, sources, strict=True) if source is not None]
            sources = [source for source in sources if source is not None]
        if places:
            _torch.tensors.foreach_copy_(places, sources)

    def _is_whole(self, piece: Piece) -> bool:
        return piece[2] - piece[1] == self._segments[piece[0]][1]

    def _place(self, piece: Piece, slot: torch.Tensor, start: int) -> torch.Tensor:
        """Where a small segment is shown, in its form."""
        segment, first, last = piece
        return slot[first - start : last - start].as_strided(*self._forms[segment])

    def _cut(self, vector: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The part of a small segment that a piece is."""
        segment, first, last = piece
        offset, (shape, stride) = self._segments[segment][0], self._forms[segment]
        if vector.stride() != stride:
            vector = torch.empty_strided(shape, stride, dtype=vector.dtype).copy_(vector)
        return vector.as_strided((last - first,), (1,), vector.storage_offset() + first - offset)

    def _sum_run(
        self, vectors: Sequence[torch.Tensor | None], run: Sequence[Piece], slots: torch.Tensor, start: int
    ) -> bool:
        """Sums neighbouring pieces, together if every replica has all of them; tells whether the sum is finite."""
        if len(run) > 1:
            segments, first, last = [piece[0] for piece in run], run[0][1], run[-1][2]
            if self._presence[:, segments].all():
                parts = [slots[rank, first - start : last - start] for rank in range(self._signals.size)]
                # Between segments lies what earlier windows left: only if the sum is not finite is it worth to look.
                is_finite = _add(parts, self._sum[first:last])
                self._clear_between(run)
                return is_finite or all(bool(self._sum[begin:end].isfinite().all()) for _, begin, end in run)
        is_finite = True
        for piece in run:  # all of them, whatever comes of the first
            is_finite &= self._sum_piece(vectors[piece[0]], piece, slots, start)
        return is_finite

    def _clear_between(self, run: Sequence[Piece]) -> None:
        """Makes what lies between segments zero, so that an update of all of them leaves that alone."""
        if len(self._windows) <= 1:
            return  # nothing else is ever shown there
        key = run[0][1]
        if key not in self._gaps:
            gaps = [torch.arange(one[2], other[1]) for one, other in itertools.pairwise(run)]
            self._gaps[key] = torch.cat(gaps)
        self._sum.index_fill_(0, self._gaps[key], 0)

    def _sum_piece(self, vector: torch.Tensor | None, piece: Piece, slots: torch.Tensor, start: int) -> bool:
        segment, first, last = piece
        if vector is PLACED or (self._is_alone and segment in self._in_place):
            return True  # for now: other machines have yet to add theirs
        offset, parts = self._segments[segment][0], []
        for rank in range(self._signals.size):
            if not self._presence[rank, segment]:
                continue
            if rank == self._signals.rank and vector is not None and not self.is_small(segment):
                parts.append(vector[first - offset : last - offset].to(self._shown_as))  # rounded like the others'
            else:
                parts.append(slots[rank, first - start : last - start])
        if parts:
            return _add(parts, self._sum[first:last])
        if self._further:
            self._sum[first:last].zero_()
        return True

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
        elif first.dtype in _LOW_PRECISION:
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
