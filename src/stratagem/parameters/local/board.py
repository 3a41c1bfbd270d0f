"""Numbers that all workers of one machine and the main program see: versions, who does what, staleness.

Each number has one writer at a time, or is changed under a lock that the user of the board holds.
Owns nothing but their places in shared memory.
"""

from typing import final

import numpy as np
import torch

from stratagem.processes.region import Region

MAX_WORKERS = 256
MAX_SHARDS = 64
MAX_TARGETS = 1024
NUM_BUCKETS = 64  # of the histogram; the last counts all that is staler

_NUM_COMMON = 16
_NUM_PER_WORKER = 16


@final
class _Common:
    """One of the numbers that are not of a worker."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, board: "Board", _: type) -> int:
        return int(board.common[self._place])

    def __set__(self, board: "Board", value: int) -> None:
        board.common[self._place] = value


@final
class Board:
    """The numbers, as arrays of int64 over shared memory.

    Args:
        region: The memory; zeros at first.
    """

    version = _Common(0)  # how many pushes have been applied
    state_version = _Common(1)  # changes when the state of an optimizer comes to be, or is replaced
    closed_round = _Common(2)  # the last step of synchronous training that has been applied
    # How often the main program has changed values; no pushes, so that they make nobody's push staler.
    num_writes = _Common(3)

    def __init__(self, region: Region) -> None:
        self.region = region
        sizes = (_NUM_COMMON, MAX_SHARDS, 4 * MAX_TARGETS, MAX_WORKERS * _NUM_PER_WORKER, MAX_WORKERS * NUM_BUCKETS)
        # NumPy: a single number costs it a tenth of what it costs torch, and these are read in every step.
        flat = region.shared(torch.int64, 0, sum(sizes)).numpy()
        self.common, self.dirty, targets, workers, histogram = np.split(flat, np.cumsum(sizes)[:-1])
        self.targets = targets.reshape(MAX_TARGETS, 4)  # how it was saved, from where, to where; its changes, counted
        fields = workers.reshape(_NUM_PER_WORKER, MAX_WORKERS)
        self.pushing, self.committed = fields[0], fields[1]  # the push under way; the last that is done
        self.in_flight = fields[2]  # 1 + the version that its step was pulled from; 0 when it is in no step
        self.arrived, self.weight = fields[3], fields[4]  # the round that it has given gradients for; its examples
        self.num_dropped = fields[5]  # its parts of rounds that went on without it
        self.call, self.call_start = fields[6], fields[7]  # which call it is in; its last push before that
        self.histogram = histogram.reshape(MAX_WORKERS, NUM_BUCKETS)  # of the staleness of pushes, by worker

    @classmethod
    def create(cls) -> "Board":
        """A new board, all zeros."""
        numbers = _NUM_COMMON + MAX_SHARDS + 4 * MAX_TARGETS + MAX_WORKERS * (_NUM_PER_WORKER + NUM_BUCKETS)
        return cls(Region.create(8 * numbers))

    def __reduce__(self) -> tuple[type["Board"], tuple[Region]]:
        return Board, (self.region,)
