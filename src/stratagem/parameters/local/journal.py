"""Makes changes to shared memory whole or undone, also when the process that makes them is killed.

Before a push changes anything, what it will change is saved beside it: ranges of a flat vector, or
some rows of a table. A shard is marked while it is changed. Whoever takes its lock and finds the mark
puts the saved values back, unless the one who left it had already declared the push done.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from stratagem.devices.device import mib
from stratagem.errors import SharedMemoryError
from stratagem.parameters.local.board import MAX_TARGETS, Board
from stratagem.parameters.local.locks import Locks
from stratagem.processes.region import PAGE_BYTES, Region

_WHOLE, _ROWS = 1, 2


@final
class Target:
    """A flat vector or a table in shared memory, and the memory in which its old values are saved.

    Args:
        number: Its place in the journal, the same in all processes.
        shard: Whose lock guards it.
        region: The memory.
        dtype: Of its elements.
        shape: One dimension, or two if rows are saved.
        saved: As large as the memory itself, if it is a vector; for rows only as far as it is written to.
        indices: For rows: which they are.
    """

    def __init__(
        self,
        number: int,
        shard: int,
        region: Region,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        saved: Region,
        indices: Region | None = None,
    ) -> None:
        self._parts = (number, shard, region, dtype, shape, saved, indices)
        self.number, self.shard = number, shard
        numel = torch.Size(shape).numel()
        self.live = region.shared(dtype, 0, numel).view(shape)
        self.saved = saved.shared(dtype, 0, numel).view(shape)
        self._saved_region, self._indices_region = saved, indices
        self.indices = indices.shared(torch.int64, 0, shape[0]) if indices is not None else None
        self._num_reserved = 0

    @classmethod
    def create(
        cls,
        number: int,
        shard: int,
        region: Region,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        *,
        is_saved: bool = True,
    ) -> "Target":
        """A target over memory that exists, with new memory for what is saved, if anything is."""
        if number >= MAX_TARGETS:
            raise SharedMemoryError(
                f"a parameter server has room for {MAX_TARGETS} tables and states of optimizers, and this one would "
                f"be too many; close strategies that you no longer need"
            )
        if len(shape) == 1 and is_saved:
            return cls(number, shard, region, dtype, shape, Region.create(shape[0] * dtype.itemsize))
        saved = _unreserved(torch.Size(shape).numel() * dtype.itemsize)
        indices = _unreserved(8 * shape[0]) if len(shape) > 1 else None
        return cls(number, shard, region, dtype, shape, saved, indices)

    def reserve_rows(self, count: int) -> None:
        """Makes sure that so many rows can be saved: a lack of memory is an error, never a signal."""
        if count <= self._num_reserved or self._indices_region is None:
            return
        row_bytes = self.saved.stride(0) * self.saved.itemsize
        try:
            os.posix_fallocate(self._saved_region.descriptor, 0, count * row_bytes)
            os.posix_fallocate(self._indices_region.descriptor, 0, count * 8)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot reserve {mib(count * (row_bytes + 8))} for an update of {count} rows: {error}; "
                f"use smaller batches"
            ) from error
        self._num_reserved = count

    def __reduce__(self) -> tuple[Any, ...]:
        return Target, self._parts


@final
class Journal:
    """Saves what a push will change, and puts it back if the push does not come to its end.

    Args:
        board: Where the marks are.
        locks: One for each shard.
        undoes: Whether it does; else nothing is saved, and a push that does not come to its end stays as it is.
    """

    def __init__(self, board: Board, locks: Locks, *, undoes: bool = True) -> None:
        self._board = board
        self._locks = locks
        self._undoes = undoes
        self.targets: list[Target] = []

    def new_target(self, number: int, shard: int, region: Region, dtype: torch.dtype, shape: tuple[int, ...]) -> Target:
        """A target over memory that exists, for all processes."""
        return Target.create(number, shard, region, dtype, shape, is_saved=self._undoes)

    def free_numbers(self) -> Iterator[int]:
        """The numbers that no target has; the same in all processes as long as all have the same targets."""
        used = {target.number for target in self.targets}
        return (number for number in itertools.count() if number not in used)

    def drop(self, targets: Sequence[Target]) -> None:
        """Forgets targets that nobody will change any more."""
        numbers = {target.number for target in targets}
        self.targets = [target for target in self.targets if target.number not in numbers]

    @contextlib.contextmanager
    def reading(self, shard: int) -> Iterator[None]:
        """Holds a shard together with other readers; nobody changes it in the block."""
        with contextlib.ExitStack() as held:
            held.enter_context(self._locks.held(shard, shared=True))
            while self._board.dirty[shard]:  # who changed it last was killed
                held.close()
                with self.writing([shard]):
                    pass
                held.enter_context(self._locks.held(shard, shared=True))
            yield

    @contextlib.contextmanager
    def writing(self, shards: Sequence[int]) -> Iterator[None]:
        """Holds shards alone, and puts right what a dead holder left."""
        with contextlib.ExitStack() as held:
            for shard in sorted(shards):
                held.enter_context(self._locks.held(shard))
                self._repair(shard)
            yield

    @contextlib.contextmanager
    def change(self, shards: Sequence[int], worker: int, plan: "Sequence[Saving]") -> Iterator[None]:
        """Changes shards, which the caller holds: all of the block is done, or nothing, unless nothing is undone.

        Args:
            shards: Which.
            worker: Who does it.
            plan: All that the block may write to.
        """
        board = self._board
        if not self._undoes:
            board.pushing[worker] += 1
            board.committed[worker] = board.pushing[worker]  # whole or not, nobody shall push it once more
            yield
            return
        touched = set(shards)
        for target in self.targets:
            if target.shard in touched:
                board.targets[target.number, 0] = 0
        for target, what in plan:
            self._save(target, what)
        board.pushing[worker] += 1
        for shard in shards:
            board.dirty[shard] = worker + 1
        try:
            yield
        except BaseException:
            for shard in shards:
                self._roll_back(shard)
            board.pushing[worker] -= 1
            raise
        board.committed[worker] = board.pushing[worker]  # from here on it has happened, whoever is killed
        for shard in shards:
            board.dirty[shard] = 0

    def _save(self, target: Target, what: "tuple[int, int] | torch.Tensor") -> None:
        entry = self._board.targets[target.number]
        if isinstance(what, torch.Tensor):
            count = len(what)
            target.reserve_rows(count)
            torch.index_select(target.live, 0, what, out=target.saved[:count])
            target.indices[:count].copy_(what)  # type: ignore[index]  # tables have them
            entry[2], entry[0] = count, _ROWS
        else:
            start, stop = what
            target.saved[start:stop].copy_(target.live[start:stop])
            entry[1], entry[2], entry[0] = start, stop, _WHOLE

    def _repair(self, shard: int) -> None:
        owner = int(self._board.dirty[shard]) - 1
        if owner < 0:
            return
        if self._board.committed[owner] < self._board.pushing[owner]:
            self._roll_back(shard)
        self._board.dirty[shard] = 0

    def _roll_back(self, shard: int) -> None:
        for target in self.targets:
            if target.shard != shard:
                continue
            kind, start, stop, _ = self._board.targets[target.number].tolist()
            if kind == _WHOLE:
                target.live[start:stop].copy_(target.saved[start:stop])
            elif kind == _ROWS:
                target.live.index_copy_(0, target.indices[:stop], target.saved[:stop])  # type: ignore[index]
        self._board.dirty[shard] = 0


Saving = tuple[Target, tuple[int, int] | torch.Tensor]
"""What is saved of a target: a range of a vector, or rows of a table."""


def joined(plan: Sequence[Saving]) -> list[Saving]:
    """Savings, one for each target: the journal has one entry for each."""
    merged: dict[int, Any] = {}
    for target, what in plan:
        _, both = merged.get(target.number, (target, what))
        is_range = isinstance(both, tuple)
        merged[target.number] = target, (min(both[0], what[0]), max(both[1], what[1])) if is_range else both
    return list(merged.values())


def _unreserved(num_bytes: int) -> Region:
    """Shared memory that takes room only where it is written to."""
    num_bytes = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
    descriptor = os.memfd_create("stratagem", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return Region(descriptor, num_bytes)
