"""Exchanges any tensors between the replicas of one machine through shared memory.

Tensors pass through slots of a fixed size, piece by piece. Before the first piece the replicas
compare what they are about to do, so that a mismatch is an error that names both sides.
"""

from typing import final

import torch

from stratagem.collectives.collective import (
    Collective,
    check_calls,
    check_operation,
    check_root,
    combine,
    describe_call,
    flat,
    shapes_of,
)
from stratagem.collectives.signals import Signals
from stratagem.processes.region import Region

_SLOT_BYTES = 2 * 2**20


@final
class SharedMemory(Collective):
    """The collective of replicas that share memory.

    Args:
        region: Slots for all: `num_bytes(size)`.
        signals: The meeting point.
    """

    def __init__(self, region: Region, signals: Signals) -> None:
        super().__init__(signals.rank, signals.size)
        self._signals = signals
        self._slots = [region.shared(torch.uint8, rank * _SLOT_BYTES, _SLOT_BYTES) for rank in range(self.size)]

    @staticmethod
    def num_bytes(size: int) -> int:
        """How much shared memory the slots need."""
        return size * _SLOT_BYTES

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_operation(tensor, op)
        source = flat(tensor)
        target = torch.empty_like(source)
        self._agree(describe_call(f"all_reduce({op!r})", tensor))
        # Each replica reduces its own part of a piece, then all take every part.
        for start, end in _pieces(source):
            piece = end - start
            bounds = [piece * rank // self.size for rank in range(self.size + 1)]
            slots = [slot[: piece * source.itemsize].view(source.dtype) for slot in self._slots]
            slots[self.rank].copy_(source[start:end])
            self._signals.barrier()
            first, last = bounds[self.rank], bounds[self.rank + 1]
            if first < last:
                slots[self.rank][first:last] = combine([slot[first:last] for slot in slots], op)
            self._signals.barrier()
            for rank, slot in enumerate(slots):
                target[start + bounds[rank] : start + bounds[rank + 1]] = slot[bounds[rank] : bounds[rank + 1]]
            self._signals.barrier()
        return target.view(tensor.shape)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_root(root, self.size)
        self._agree(describe_call(f"broadcast(root={root})", tensor))
        target = flat(tensor).clone()
        for start, end in _pieces(target):
            slot = self._slots[root][: (end - start) * target.itemsize].view(target.dtype)
            if self.rank == root:
                slot.copy_(target[start:end])
            self._signals.barrier()
            target[start:end] = slot
            self._signals.barrier()
        return target.view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        source = flat(tensor)
        shapes = shapes_of(self._agree(describe_call("all_gather", tensor), any_shape=True))
        targets = [torch.empty(shape, dtype=tensor.dtype, device=tensor.device) for shape in shapes]
        longest = max(targets, key=torch.numel).flatten()
        for start, end in _pieces(longest):
            own = source[start:end]
            self._slots[self.rank][: own.nbytes].view(own.dtype).copy_(own)
            self._signals.barrier()
            for target, slot in zip(targets, self._slots, strict=True):
                part = target.view(-1)[start:end]
                part.copy_(slot[: part.nbytes].view(part.dtype))
            self._signals.barrier()
        return targets

    def barrier(self) -> None:
        # A bare barrier would also meet replicas that have begun another exchange, and part from them.
        self._agree(describe_call("barrier"))

    def close(self) -> None:
        self._slots.clear()

    def _agree(self, call: str, *, any_shape: bool = False) -> list[str]:
        """Tells the others what this replica is about to do; returns what all of them are."""
        self._signals.put_note(call)
        self._signals.barrier()
        calls = self._signals.notes()
        self._signals.barrier()
        check_calls(calls, any_shape=any_shape)
        return calls


def _pieces(row: torch.Tensor) -> list[tuple[int, int]]:
    step = _SLOT_BYTES // row.itemsize
    return [(start, min(start + step, row.numel())) for start in range(0, row.numel(), step)]
