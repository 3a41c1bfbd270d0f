"""Exchanges tensors between replicas of several machines: inside each machine first, then between them.

The first replica of each machine alone is connected to those of the others, so that what all
replicas of a machine have in common crosses the network once. Sums are made in a fixed order: that
of the replicas of a machine, then that of the machines.
"""

from collections.abc import Sequence
from typing import final

import torch

from stratagem.collectives.collective import (
    Collective,
    check_calls,
    check_operation,
    check_root,
    describe_call,
    flat,
    shapes_of,
    widened,
)

_NOTE_BYTES = 512


@final
class TwoLevel(Collective):
    """The collective of the replicas of several machines.

    Args:
        inside: Between the replicas of this machine.
        between: Between the first replicas of all machines; `None` in the others.
        machine: The number of this machine.
        sizes: How many replicas each machine has.
    """

    def __init__(self, inside: Collective, between: Collective | None, machine: int, sizes: Sequence[int]) -> None:
        super().__init__(sum(sizes[:machine]) + inside.rank, sum(sizes))
        self._inside = inside
        self._between = between
        self._machine = machine
        self._sizes = tuple(sizes)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_operation(tensor, op)
        self._agree(describe_call(f"all_reduce({op!r})", tensor))
        # Rounded once, at the end, whatever the number of levels.
        total = self._inside.all_reduce(widened(tensor), "sum" if op == "mean" else op)
        if self._between is not None:
            total = self._between.all_reduce(total, "sum" if op == "mean" else op)
        total = self._inside.broadcast(total)
        return (total.div_(self.size) if op == "mean" else total).to(tensor.dtype)

    def sum_as(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype == tensor.dtype:
            return self.all_reduce(tensor)
        self._agree(describe_call(f"sum as {dtype}", tensor))
        total = self._inside.sum_as(tensor, dtype)
        if self._between is not None:
            total = self._between.sum_as(total, dtype)
        return self._inside.broadcast(total.to(dtype)).to(tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_root(root, self.size)
        self._agree(describe_call(f"broadcast(root={root})", tensor))
        machine, first = 0, 0
        while root >= first + self._sizes[machine]:
            first += self._sizes[machine]
            machine += 1
        if machine == self._machine:
            tensor = self._inside.broadcast(tensor, root - first)
        if self._between is not None:
            tensor = self._between.broadcast(tensor, machine)
        return self._inside.broadcast(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat(tensor)  # refuses what cannot travel, before anybody is met
        shapes = shapes_of(self._agree(describe_call("all_gather", tensor), any_shape=True))
        row = self._gathered(tensor.detach().reshape(-1))
        parts = torch.split(row, [torch.Size(shape).numel() for shape in shapes])
        return [part.view(shape).clone() for part, shape in zip(parts, shapes, strict=True)]

    def barrier(self) -> None:
        self._agree(describe_call("barrier"))

    def close(self) -> None:
        if self._between is not None:
            self._between.close()
        self._inside.close()

    def _agree(self, call: str, *, any_shape: bool = False) -> list[str]:
        """Tells the others what this replica is about to do; returns what all of them are."""
        note = torch.frombuffer(bytearray(call.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")), dtype=torch.uint8)
        rows = self._gathered(note).view(-1, _NOTE_BYTES)
        calls = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        check_calls(calls, any_shape=any_shape)
        return calls

    def _gathered(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all replicas as one."""
        everything = torch.cat(self._inside.all_gather(row))
        if self._between is not None:
            everything = torch.cat(self._between.all_gather(everything))
        return self._inside.all_gather(everything if self._inside.rank == 0 else row[:0])[0]
