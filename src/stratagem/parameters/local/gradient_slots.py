"""Synchronous steps of workers that push by themselves: the first gradients of a step count, the rest are dropped.

Each worker puts its gradients into a slot of its own. The one that completes a step applies their mean;
the others wait until it is done. Who comes later finds the step closed, and goes on.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from stratagem.errors import StrategyError
from stratagem.parameters.local.board import Board
from stratagem.parameters.local.locks import Locks
from stratagem.parameters.rounds import mean_of
from stratagem.processes.region import Region

PER_RUN = 1 << 32  # rounds of one run follow each other: more than any makes, so that none is taken for one of the next
_ALIGN_BYTES = 64
_LOOK_S = 2e-4


class Round(NamedTuple):
    """One synchronous step, as one worker takes part in it.

    Args:
        number: They rise.
        num_needed: How many gradients complete it.
        weight: How many examples this worker has.
        share: What part that is of those of all workers.
    """

    number: int
    num_needed: int
    weight: int
    share: float = 1.0

    def following(self) -> "Round":
        """The round of the next update in the same run."""
        return self._replace(number=self.number + 1)


@final
class GradientSlots:
    """The gradients of all workers for one optimizer, in shared memory.

    Args:
        region: The memory.
        forms: Shape and dtype of the gradient of each parameter.
        num_workers: How many slots.
        board: Who has come.
        locks: Those of the machine.
        lock: Which of them keeps those apart who come at the same time.
    """

    def __init__(
        self,
        region: Region,
        forms: Sequence[tuple[tuple[int, ...], torch.dtype]],
        num_workers: int,
        board: Board,
        locks: Locks,
        lock: int,
    ) -> None:
        self._parts = (region, list(forms), num_workers, board, locks, lock)
        self._board, self._locks, self._lock = board, locks, lock
        self._slots: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        offset = 0
        for _ in range(num_workers):
            own = []
            for shape, dtype in forms:
                numel = torch.Size(shape).numel()
                flag = region.shared(torch.int64, offset, 1)
                own.append((flag, region.shared(dtype, offset + _ALIGN_BYTES, numel).view(shape)))
                offset += _ALIGN_BYTES + _aligned(numel * dtype.itemsize)
            self._slots.append(own)

    @classmethod
    def create(
        cls, parameters: Sequence[torch.Tensor], num_workers: int, board: Board, locks: Locks, lock: int
    ) -> "GradientSlots":
        """New slots for the gradients of some parameters."""
        forms = [(tuple(each.shape), each.dtype) for each in parameters]
        size = sum(_ALIGN_BYTES + _aligned(each.nbytes) for each in parameters)
        return cls(Region.create(size * num_workers), forms, num_workers, board, locks, lock)

    def put(self, worker: int, own: Round, gradients: Sequence[torch.Tensor | None]) -> None:
        """Fills a worker's slot for a round; who has no gradients leaves it empty."""
        for (flag, slot), gradient in zip(self._slots[worker], gradients, strict=True):
            flag.fill_(0 if gradient is None else own.number)  # what lies there from an earlier round never counts
            if gradient is not None:
                slot.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def arrive(self, worker: int, own: Round, apply: Callable[..., None]) -> bool:
        """Takes part in a round with what is in the worker's slot; whether to wait for others.

        Args:
            worker: Who has come.
            own: The round, and its weight in it.
            apply: Applies the mean of the gradients, and closes the round by its number.
        """
        board = self._board
        with self._locks.held(self._lock):
            if board.closed_round >= own.number:
                board.num_dropped[worker] += 1
                return False
            board.weight[worker], board.arrived[worker] = own.weight, own.number
            there = [each for each in range(len(self._slots)) if board.arrived[each] == own.number]
            if len(there) < own.num_needed:
                return True
            apply(self._mean(there, own.number), own.number)
            return False

    def wait(self, own: Round, until: float) -> None:
        """Waits until a round is closed, or raises when the time is up (`time.monotonic`)."""
        while self._board.closed_round < own.number:
            if time.monotonic() > until:
                num_there = int((self._board.arrived[: len(self._slots)] == own.number).sum())
                raise StrategyError(
                    f"update {own.number % PER_RUN + 1} of a step needs {own.num_needed} workers, {num_there} came in "
                    f"time; call optimizer.step() equally often in all workers, or raise stall_timeout_s"
                )
            time.sleep(_LOOK_S)

    def _mean(self, workers: Sequence[int], round_number: int) -> list[torch.Tensor | None]:
        """The mean gradients over all examples, by the place of the parameter."""
        given = []
        for worker in workers:
            own = {place: slot for place, (flag, slot) in enumerate(self._slots[worker]) if flag == round_number}
            given.append((own, max(0, int(self._board.weight[worker]))))
        means = mean_of(given)
        return [means.get(place) for place in range(len(self._slots[0]))]

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientSlots, self._parts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
