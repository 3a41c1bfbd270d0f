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
class Board:
    """The numbers, as arrays of int64 over shared memory.

    Args:
        region: The memory; zeros at first.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        sizes = (_NUM_COMMON, MAX_SHARDS, 4 * MAX_TARGETS, MAX_WORKERS * _NUM_PER_WORKER, MAX_WORKERS * NUM_BUCKETS)
        # NumPy: a single number costs it a tenth of what it costs torch, and these are read in every step.
        flat = region.shared(torch.int64, 0, sum(sizes)).numpy()
        self._common, self.dirty, targets, workers, histogram = np.split(flat, np.cumsum(sizes)[:-1])
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

    @property
    def version(self) -> int:
        """How many pushes have been applied."""
        return int(self._common[0])

    @version.setter
    def version(self, value: int) -> None:
        self._common[0] = value

    @property
    def num_writes(self) -> int:
        """How often the main program has changed values; no pushes, so that they make nobody's push staler."""
        return int(self._common[3])

    @num_writes.setter
    def num_writes(self, value: int) -> None:
        self._common[3] = value

    @property
    def state_version(self) -> int:
        """Changes when the state of an optimizer comes to be, or is replaced."""
        return int(self._common[1])

    @state_version.setter
    def state_version(self, value: int) -> None:
        self._common[1] = value

    @property
    def closed_round(self) -> int:
        """The last step of synchronous training that has been applied."""
        return int(self._common[2])

    @closed_round.setter
    def closed_round(self, value: int) -> None:
        self._common[2] = value

    def __reduce__(self) -> tuple[type["Board"], tuple[Region]]:
        return Board, (self.region,)
