"""Large segments of a flat vector that are summed over machines in the memory in which they came.

For a replica that is alone on its machine: nobody else there has to see its gradients, so that they need no place
in shared memory. A window that lies within one such segment is sent as it is. Of a window that has other segments
too, a copy travels, and the segment's part of the sum is copied back.
"""

from collections.abc import Sequence
from typing import final

import torch

from stratagem.collectives.collective import is_finite
from stratagem.processes.region import Region


@final
class SegmentsInPlace:
    """The segments that are, those of which no more is copied so than if all of each were copied once.

    Args:
        segments: Where each segment starts and how many elements it has; none if no segment may be summed in place.
        small: Up to how many elements a segment never is.
        width: How many elements a window has.
        total: Memory for the sum of all segments. What no sum will be made in is given back to the system.
        flat: The elements in it.
    """

    def __init__(
        self, segments: Sequence[tuple[int, int]], small: int, width: int, total: Region, flat: torch.Tensor
    ) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self._segments = segments
        self._windows = list(torch.split(flat, width)) if len(flat) else []
        self._chosen: set[int] = set()
        self._inside: dict[int, int] = {}  # the segment in which a window lies
        self._edges: dict[int, list[tuple[int, int, int]]] = {}  # of other windows: a segment, where its piece lies
        for number, (offset, numel) in enumerate(segments):
            if numel > small:
                self._choose(number, offset, offset + numel, width, total)

    def _choose(self, segment: int, first: int, last: int, width: int, total: Region) -> None:
        inner = range(-(-first // width), last // width)
        num_inner = len(inner) * width
        if 2 * num_inner < last - first:  # the rest travels as a copy, and comes back
            return
        self._chosen.add(segment)
        self._inside |= dict.fromkeys(inner, segment)
        itemsize = self._windows[0].itemsize
        total.give_back(inner.start * width * itemsize, inner.stop * width * itemsize)
        for begin, end in ((first, inner.start * width), (inner.stop * width, last)):
            if begin < end:
                self._edges.setdefault(begin // width, []).append((segment, begin, end))

    def __contains__(self, segment: int) -> bool:
        return segment in self._chosen

    def put(self, segment: int, row: torch.Tensor) -> bool:
        """Takes the elements of a segment in memory that nobody else has; tells whether they are finite."""
        self.rows[segment] = row
        return is_finite(row)

    def take_rest(self, vectors: Sequence[torch.Tensor | None], placed: torch.Tensor) -> bool:
        """Takes copies of segments that have not been put here before, zeros for those that are not there.

        Args:
            vectors: All segments.
            placed: Stands for one that was put here.

        Returns:
            Whether they are finite.
        """
        finite = True
        for segment in self._chosen:
            vector = vectors[segment]
            if vector is None:
                self.rows[segment] = torch.zeros(self._segments[segment][1], dtype=self._windows[0].dtype)
            elif vector is not placed:
                finite &= self.put(segment, vector.clone())
        return finite

    def row_to_send(self, window: int) -> torch.Tensor:
        """What of a window is summed over the machines, in place."""
        if window in self._inside:
            segment = self._inside[window]
            start = window * len(self._windows[0]) - self._segments[segment][0]
            return self.rows[segment][start : start + len(self._windows[window])]
        self._copy_edges(window, back=False)
        return self._windows[window]

    def bring_back(self) -> None:
        """Copies from the sums of windows what belongs to segments that are here."""
        for window in self._edges:
            self._copy_edges(window, back=True)

    def _copy_edges(self, window: int, *, back: bool) -> None:
        start = window * len(self._windows[0])
        for segment, first, last in self._edges.get(window, ()):
            offset = self._segments[segment][0]
            own, shown = self.rows[segment][first - offset : last - offset], self._windows[window]
            parts = own, shown[first - start : last - start]
            target, source = parts if back else reversed(parts)
            target.copy_(source)

    def let_go(self) -> dict[int, torch.Tensor]:
        """Leaves the segments to whoever has them; returns them."""
        rows, self.rows = self.rows, {}
        return rows

    def windows_elsewhere(self) -> dict[int, torch.Tensor]:
        """The windows, by number, whose sums are made in the memory of all segments."""
        return {number: each for number, each in enumerate(self._windows) if number not in self._inside}
