"""Exchanges tensors over sockets that connect each replica with each: what machines without accelerators use.

Every exchange begins with a note that says what it is, so that replicas which do different things hear
of it at once. Sums are made in the order of the replicas, each replica summing its own part of a window
and giving it to the others: the same bits everywhere, whatever the network does.
"""

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, final

import numpy as np
import torch

from stratagem import _torch
from stratagem.collectives.collective import (
    Collective,
    MismatchError,
    check_calls,
    check_operation,
    check_root,
    combine,
    describe_call,
    flat,
    is_finite,
    shapes_of,
)
from stratagem.collectives.sockets import Attend, Sockets
from stratagem.collectives.waiting import is_over, result_of, wait_in_slices
from stratagem.errors import CollectiveError

_HEAD: Final = struct.Struct("<QQ")  # number of the exchange, bytes that follow the note
_NOTE_BYTES: Final = 496
_WINDOW_BYTES: Final = 4 * 2**20  # what is summed at a time stays in the cache
_SMALL_BYTES: Final = 32 * 1024  # rather sent whole than in two steps
_SKIP_BYTES: Final = 2**20

_Result = TypeVar("_Result")


@final
class Mesh(Collective):
    """The collective of replicas that sockets connect.

    Args:
        rank: Which replica this is.
        size: How many there are.
        sockets: Its connections to all others; closed with it.
        attend: Called after each slice of waiting with the seconds waited so far; may raise, which ends
            the wait. The collective can only be closed then.
    """

    def __init__(self, rank: int, size: int, sockets: Sockets, attend: Attend = lambda _: None) -> None:
        super().__init__(rank, size)
        self._sockets = sockets
        self._attend = attend
        self._others = [each for each in range(size) if each != rank]
        self._number = 0
        self._thread = ThreadPoolExecutor(1, "stratagem-mesh")
        self._thread.submit(_nobody, 0.0).result()  # it is there from now on, and ends with this
        self._last: Future[Any] | None = None
        self._closed = False
        self._why_broken: str | None = None

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_operation(tensor, op)
        row = flat(tensor).to("cpu", copy=True)
        self._in_turn(lambda attend: self._reduce(describe_call(f"all_reduce({op!r})", tensor), row, op, attend))
        return row.view(tensor.shape).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_root(root, self.size)
        row = flat(tensor).to("cpu", copy=True)
        call = describe_call(f"broadcast(root={root})", tensor)
        self._in_turn(lambda attend: self._broadcast(call, row, root, attend))
        return row.view(tensor.shape).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        row = flat(tensor).cpu()
        rows = self._in_turn(lambda attend: self._gather(describe_call("all_gather", tensor), row, tensor, attend))
        return [each.to(tensor.device) for each in rows]

    def barrier(self) -> None:
        self._in_turn(lambda attend: self._agree(describe_call("barrier"), attend))

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """The bytes of all replicas.

        Args:
            what: Why they are exchanged: all must say the same.
            data: This replica's.
        """
        return self._in_turn(lambda attend: self._exchange(what, data, attend))

    def start_sum(self, row: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], bool]:
        """Begins to sum a flat tensor of the CPU over the replicas, in place, and returns at once.

        Several may be under way; all replicas start them in the same order.

        Args:
            row: The tensor.
            dtype: The type as which it travels, and to which the sum is rounded, in every replica; by default its own.

        Returns:
            Waits, and tells whether the sum is finite; until then the tensor must be neither read nor written.
        """
        call = describe_call("start_sum" if dtype in (None, row.dtype) else f"start_sum as {dtype}", row)
        self._check_open()
        self._last = future = self._thread.submit(self._whole, partial(self._sum_as, call, row, dtype), _nobody)

        def wait_for_sum() -> bool:
            wait_in_slices(partial(is_over, future), self._attend)
            return result_of(call, future)

        return wait_for_sum

    def cut(self) -> None:
        """Ends what is under way, also if another replica neither answers nor hangs up; then only `close` is left."""
        self._sockets.cut()

    def close(self) -> None:
        """Ends the connections, and what is under way."""
        self._closed = True
        self._sockets.cut()
        self._thread.shutdown(cancel_futures=True)
        self._last = None
        self._sockets.close()

    def _in_turn(self, function: Callable[[Attend], _Result]) -> _Result:
        """Does something after all that the thread was given before; without the thread, if it is idle."""
        self._check_open()
        if self._last is not None:
            wait_in_slices(partial(is_over, self._last), self._attend)
            self._last = None
        return self._whole(function, self._attend)

    def _whole(self, function: Callable[[Attend], _Result], attend: Attend) -> _Result:
        """Does an exchange. One that is cut short leaves bytes behind which the next would take for its own."""
        if self._why_broken is not None:
            raise CollectiveError(f"an earlier exchange was cut short: {self._why_broken}")
        try:
            return function(attend)
        except MismatchError:  # of which all know, and nothing is left
            raise
        except BaseException as error:
            self._why_broken = str(error) or type(error).__name__
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError("the collective was closed; make a new one")

    # What an exchange consists of; all of it in one thread at a time

    def _begin(self, note: str, payload: Mapping[int, Any]) -> None:
        """Sends all others the head of an exchange, and some of them the bytes that come with it."""
        text = note.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
        for other in self._others:
            data = payload.get(other, b"")
            self._sockets.put(other, _HEAD.pack(self._number, memoryview(data).nbytes) + text)
            self._sockets.put(other, data)

    def _hear(self, note: str, attend: Attend, *, any_shape: bool = False) -> tuple[list[str], list[int]]:
        """What the others announced, compared with what this replica did; and how many bytes come with it."""
        heads = {other: bytearray(_HEAD.size + _NOTE_BYTES) for other in self._others}
        self._sockets.fill(heads, attend)
        notes, sizes = [note[:_NOTE_BYTES]] * self.size, [0] * self.size
        for other, head in heads.items():
            number, sizes[other] = _HEAD.unpack_from(head)
            notes[other] = head[_HEAD.size :].rstrip(b"\0").decode(errors="replace")
            if number != self._number:
                raise CollectiveError(f"{self._sockets.name(other)} is at exchange {number}, not {self._number}")
        self._number += 1
        try:
            check_calls(notes, any_shape=any_shape, name=self._sockets.name)
        except MismatchError:
            self._skip(sizes, attend)
            raise
        return notes, sizes

    def _skip(self, sizes: Sequence[int], attend: Attend) -> None:
        """Reads what is of no use, but must not be taken for the next exchange."""
        left = {other: sizes[other] for other in self._others if sizes[other]}
        while left:
            self._sockets.fill({other: bytearray(min(size, _SKIP_BYTES)) for other, size in left.items()}, attend)
            left = {other: size - _SKIP_BYTES for other, size in left.items() if size > _SKIP_BYTES}
        self._sockets.flush(attend)

    def _take(self, into: Mapping[int, Any], sizes: Sequence[int], attend: Attend) -> None:
        """Fills buffers with what came with the heads, if it is as long as it must be."""
        for other, buffer in into.items():
            if memoryview(buffer).nbytes != sizes[other]:
                raise CollectiveError(
                    f"{self._sockets.name(other)} sends {sizes[other]} bytes in place of {memoryview(buffer).nbytes}"
                )
        self._sockets.fill(into, attend)

    def _agree(self, note: str, attend: Attend) -> None:
        self._begin(note, {})
        self._hear(note, attend)
        self._sockets.flush(attend)

    def _exchange(self, what: str, data: bytes, attend: Attend) -> list[bytes]:
        self._begin(what, dict.fromkeys(self._others, data))
        _, sizes = self._hear(what, attend)
        try:
            rows = {other: bytearray(sizes[other]) for other in self._others}
        except (MemoryError, OverflowError):
            raise CollectiveError(f"there is no memory for {sum(sizes)} bytes that others want to send") from None
        self._take(rows, sizes, attend)
        self._sockets.flush(attend)
        return [data if rank == self.rank else bytes(rows[rank]) for rank in range(self.size)]

    def _broadcast(self, call: str, row: torch.Tensor, root: int, attend: Attend) -> None:
        self._begin(call, dict.fromkeys(self._others, _bytes(row)) if self.rank == root else {})
        _, sizes = self._hear(call, attend)
        if self.rank != root:
            self._take({root: _bytes(row)}, sizes, attend)
        self._sockets.flush(attend)

    def _gather(self, call: str, row: torch.Tensor, tensor: torch.Tensor, attend: Attend) -> list[torch.Tensor]:
        self._begin(call, dict.fromkeys(self._others, _bytes(row)))
        notes, sizes = self._hear(call, attend, any_shape=True)
        targets = [torch.empty(shape, dtype=tensor.dtype) for shape in shapes_of(notes)]
        targets[self.rank].view(-1).copy_(row)
        self._take({other: _bytes(targets[other].view(-1)) for other in self._others}, sizes, attend)
        self._sockets.flush(attend)
        return targets

    def _sum_as(self, call: str, row: torch.Tensor, dtype: torch.dtype | None, attend: Attend) -> bool:
        carrier = row if dtype is None else row.to(dtype)
        self._reduce(call, carrier, "sum", attend)
        if carrier is not row:
            row.copy_(carrier)
        return not row.is_floating_point() or is_finite(row)  # now, while it is in the cache

    def _reduce(self, call: str, row: torch.Tensor, op: str, attend: Attend) -> None:
        """Makes a row the reduction over all replicas."""
        if row.nbytes <= _SMALL_BYTES:
            self._reduce_whole(call, row, op, attend)
            return
        step = max(1, _WINDOW_BYTES // row.itemsize)
        room = torch.empty((self.size, -(-min(step, row.numel()) // self.size)), dtype=row.dtype)
        for start in range(0, row.numel(), step):
            parts = _divided(row[start : start + step], self.size)
            arrived = [each[: parts[self.rank].numel()] for each in room]
            arrived[self.rank] = parts[self.rank]
            wanted = {other: _bytes(arrived[other]) for other in self._others}
            if start == 0:
                self._begin(call, {other: _bytes(parts[other]) for other in self._others})
                self._take(wanted, self._hear(call, attend)[1], attend)
            else:
                for other in self._others:
                    self._sockets.put(other, _bytes(parts[other]))
                self._sockets.fill(wanted, attend)
            _combine_into(parts[self.rank], arrived, self.rank, op)
            for other in self._others:
                self._sockets.put(other, _bytes(parts[self.rank]))
            # Written over only when the other side has it: it answers with the sum.
            self._sockets.fill({other: _bytes(parts[other]) for other in self._others}, attend)
        self._sockets.flush(attend)

    def _reduce_whole(self, call: str, row: torch.Tensor, op: str, attend: Attend) -> None:
        self._begin(call, dict.fromkeys(self._others, _bytes(row)))
        _, sizes = self._hear(call, attend)
        arrived = [torch.empty_like(row) for _ in range(self.size)]
        arrived[self.rank] = row
        self._take({other: _bytes(arrived[other]) for other in self._others}, sizes, attend)
        self._sockets.flush(attend)
        _combine_into(row, arrived, self.rank, op)


def _combine_into(target: torch.Tensor, parts: Sequence[torch.Tensor], rank: int, op: str) -> None:
    """Reduces parts in their order; the target is one of them, that of `rank`."""
    if op == "sum" and target.dtype in (torch.float32, torch.float64) and rank < 2:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)
    else:
        target.copy_(combine(parts, op))


def _divided(window: torch.Tensor, size: int) -> list[torch.Tensor]:
    bounds = [window.numel() * each // size for each in range(size + 1)]
    return [window[first:last] for first, last in itertools.pairwise(bounds)]


def _bytes(row: torch.Tensor) -> "np.ndarray[Any, Any]":
    """The memory of a flat tensor."""
    return _torch.tensors.numpy_of(row.view(torch.uint8))  # type: ignore[no-any-return]


def _nobody(_: float) -> None:
    """Nobody attends: whoever waits for the thread does."""
