"""Exchanges tensors by torch.distributed: gloo for those of the CPU, NCCL for those of GPUs.

What carries the tensors of another kind of device is in its row of `devices/kind_table`.
Strict devices have a group that begins and waits as NCCL does (`strict_group`).

Owns its process groups; the user's default group is neither used nor touched. Replicas of one
machine find each other through a file in a folder that only their user can enter, and gloo listens
on loopback only; tasks of a cluster through a store of theirs, and gloo listens on the task's
address. Every reduction but `start_all_reduce` is done here, in the order of the replicas, so that
its bits do not depend on the algorithm that a backend chooses.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed

from stratagem import _torch
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
from stratagem.collectives.connections import check_folder, connections_on, hang_up
from stratagem.collectives.strict_group import StrictGroup
from stratagem.collectives.waiting import (
    PendingExchange,
    is_completed,
    is_over,
    outcome_of,
    reason_of,
    result_of,
    wait_in_slices,
)
from stratagem.devices import kind_table
from stratagem.devices.kind_table import STRICT_GROUP
from stratagem.devices.process_groups import GroupBackend
from stratagem.errors import CollectiveError

_LOOPBACK: Final = "127.0.0.1"
_NOTE_BYTES: Final = 512
_PIECE_BYTES: Final = 8 * 2**20  # bounds the memory that a reduction needs beside its result
_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)
_IN_PLACE: Final = (*_LOW_PRECISION, torch.float32, torch.float64, torch.complex64, torch.complex128)

# Its stubs know neither the stores nor the options of the groups as they are in this release.
_c10d: Final[Any] = torch.distributed


@final
class TorchDistributed(Collective):
    """The collective of replicas that are connected by gloo or NCCL.

    For replicas of one machine without GPUs choose `SharedMemory`, which needs no sockets.

    Args:
        rank: Which replica this is.
        size: How many there are.
        path: A file that does not exist yet, the same for all replicas, in a folder of mode 0700
            that belongs to whoever builds the collective.
        store: In the place of a file: a store of torch through which all find each other.
        address: On which address of this machine gloo listens.
        timeout_s: How long a replica waits for the others in every exchange.
        start_timeout_s: How long it waits for them in `start`; by default the same.
        attend: Called after each slice of waiting with the seconds waited so far; may raise, which
            ends the wait. The collective can only be closed then.

    Raises:
        CollectiveError: Others could enter the folder of `path`, or it is not there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:  # has mode 0700
        ...     collective = TorchDistributed(0, 1, path=f"{folder}/store")
        ...     collective.start()
        ...     print(collective.all_reduce(torch.ones(2)))
        ...     collective.close()
        tensor([1., 1.])
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        path: str | Path | None = None,
        store: Any = None,
        address: str = _LOOPBACK,
        timeout_s: float = 60.0,
        start_timeout_s: float | None = None,
        attend: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(rank, size)
        if path is not None:
            check_folder(Path(path).absolute().parent)
        self._path, self._given_store = path, store
        self._address = address
        self._sockets: list[tuple[int, int]] = []
        self.timeout_s = timeout_s
        self._start_timeout_s = timeout_s if start_timeout_s is None else start_timeout_s
        self._attend = attend
        self._store: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._gloo: Any = None
        self._on_device: Any = None  # NCCL, or what stands for it

    def start(self) -> None:
        """Connects the replicas; returns when all are there.

        Raises:
            CollectiveError: Some did not come in time.
        """
        self._store = self._given_store or _c10d.FileStore(str(self._path), self.size)
        self._store.set_timeout(timedelta(seconds=self._start_timeout_s))
        connecting: Future[str] = Future()
        # Torch waits without looking around, so that another thread does it, which no exit waits for.
        threading.Thread(target=lambda: connecting.set_result(self._try_gloo()), daemon=True).start()
        try:
            wait_in_slices(partial(is_over, connecting), self._attend or _ignore)
        except BaseException:
            self._store = None
            raise
        reason = connecting.result()
        if not reason:
            return
        self.close()
        raise CollectiveError(
            f"replica {self.rank} did not reach all of the {self.size} replicas within {self._start_timeout_s:g} s: "
            f"{reason}. Check that all have called start(), or raise start_timeout_s"
        )

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_operation(tensor, op)
        source, call = flat(tensor), describe_call(f"all_reduce({op!r})", tensor)
        self._check_device(tensor)
        self._agree(call)
        target = torch.empty_like(source)
        self._reduce(source, target, op, partial(self._finish, call))
        return target.view(tensor.shape)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_root(root, self.size)
        call = describe_call(f"broadcast(root={root})", tensor)
        target = flat(tensor).clone()
        self._check_device(tensor)
        self._agree(call)
        if target.numel():
            self._finish(call, partial(self._broadcast, target, root))
        return target.view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        call = describe_call("all_gather", tensor)
        source = flat(tensor)
        self._check_device(tensor)
        shapes = shapes_of(self._agree(call, any_shape=True))
        targets = [torch.empty(shape, dtype=tensor.dtype, device=tensor.device) for shape in shapes]
        targets[self.rank].view(-1).copy_(source)
        for root, target in enumerate(targets):
            if target.numel():
                self._finish(call, partial(self._broadcast, target.view(-1), root))
        return targets

    def barrier(self) -> None:
        self._agree(describe_call("barrier"))

    def start_all_reduce(self, tensor: torch.Tensor) -> PendingExchange:
        """Begins to sum a flat tensor over the replicas, in place, and returns at once.

        Several may be under way; all replicas start them in the same order. The order of summation
        is the backend's: the same in every run, with the same bits on every replica. Low precision
        is summed in float32 on the CPU, and as NCCL does it on GPUs, where sizes are not compared.
        """
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.requires_grad or tensor.dtype not in _IN_PLACE:
            raise CollectiveError(
                f"start_all_reduce sums flat, contiguous float or complex tensors without gradient in place, got "
                f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}, requires_grad={tensor.requires_grad}; use all_reduce for others"
            )
        call = describe_call("start_all_reduce('sum')", tensor)
        self._check_device(tensor)
        self._check_connected()
        numbers = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
        if tensor.device.type == "cpu":
            # gloo ends the process if the sizes differ, so that it may only begin when all have
            # told theirs; a thread waits for that, and the caller goes on.
            future = self._submit(partial(self._sum, call, numbers))
            return PendingExchange(partial(result_of, call, future), partial(is_over, future), self._attend or _ignore)
        # NCCL queues its work and goes on; to compare sizes first would hold up the caller.
        work = self._group(numbers).allreduce([numbers])
        return PendingExchange(
            partial(self._finish, call, [work].pop), partial(is_completed, work), self._attend or _ignore
        )

    def close(self) -> None:
        """Cuts the connections. Waits for a sum that is under way, no longer than `timeout_s`; drops the next ones."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        for group in (self._on_device, self._gloo):
            if group is not None:
                group.shutdown()
        # The file of the store is removed by who made its folder: torch does so only if all let go one by one.
        self._thread = self._last = self._on_device = self._gloo = self._store = None

    def cut(self) -> None:
        """Ends what is under way, also if another replica neither answers nor hangs up; then only `close` is left.

        Gloo itself would wait until its timeout.
        """
        hang_up(self._sockets)
        self._sockets = []

    def _submit(self, function: Callable[[], None]) -> "Future[None]":
        """Lets the thread of this collective do something, after what it was given before."""
        self._thread = self._thread or ThreadPoolExecutor(1, "stratagem-all-reduce")
        self._last = self._thread.submit(function)
        return self._last

    def _finish(self, call: str, begin: Callable[[], Any]) -> None:
        """Does work of a group, while somebody attends to the world, if they want to."""
        self._do(call, begin, self._attend)

    def _do(self, call: str, begin: Callable[[], Any], attend: Callable[[float], None] | None = None) -> None:
        """Begins work of a group and waits for it; says what it was if that fails."""
        reason = outcome_of(begin, attend, blocks=self._on_device is None)
        if reason is None:
            return
        raise CollectiveError(
            f"{call} failed on replica {self.rank}: {reason}. Another replica is gone, or did not "
            f"come within {self.timeout_s:g} s (timeout_s)"
        )

    def _reduce(
        self, source: torch.Tensor, target: torch.Tensor, op: str, do: Callable[[Callable[[], Any]], None]
    ) -> None:
        """Reduces a row, piece by piece: each replica reduces its own part of a piece, then all take every part."""
        step = max(1, _PIECE_BYTES // source.itemsize // self.size) * self.size
        for start in range(0, source.numel(), step):
            piece = source[start : start + step]
            parts = _padded(piece, self.size)
            arrived = torch.empty_like(parts)
            do(partial(self._alltoall, arrived, parts))
            own = combine(arrived.chunk(self.size), op)
            do(partial(self._allgather, parts, own))
            target[start : start + step] = parts[: piece.numel()]

    def _alltoall(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        return self._group(source).alltoall_base(_bytes(target), _bytes(source), [], [])

    def _allgather(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        return _torch.collective_groups.allgather_into(self._group(source), _bytes(target), _bytes(source))

    def _broadcast(self, row: torch.Tensor, root: int) -> Any:
        options = _c10d.BroadcastOptions()
        options.rootRank = root
        return self._group(row).broadcast([_bytes(row)], options)

    def _allreduce(self, row: torch.Tensor) -> Any:
        return self._group(row).allreduce([row])

    def _sum(self, call: str, numbers: torch.Tensor) -> None:
        notes, own = self._notes_for(call)
        self._do(call, partial(self._allgather, notes, own))
        check_calls(_texts(notes))
        if not numbers.numel():
            return
        if numbers.dtype in _LOW_PRECISION:  # which gloo would add up without float32
            self._reduce(numbers, numbers, "sum", partial(self._do, call))
        else:
            self._do(call, partial(self._allreduce, numbers))

    def _drain(self) -> None:
        """Lets what the thread has begun come to its end: a group must be used in one order by all."""
        if self._last is not None:
            wait_in_slices(partial(is_over, self._last), self._attend or _ignore)
            self._last = None

    def _agree(self, call: str, *, any_shape: bool = False) -> list[str]:
        """Tells the others what this replica is about to do; returns what all of them are."""
        self._check_connected()
        self._drain()
        notes, own = self._notes_for(call)
        self._finish(call, partial(self._allgather, notes, own))
        calls = _texts(notes)
        check_calls(calls, any_shape=any_shape)
        return calls

    def _notes_for(self, call: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the notes of all, and this replica's own."""
        note = call.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
        return torch.empty(self.size * _NOTE_BYTES, dtype=torch.uint8), torch.frombuffer(
            bytearray(note), dtype=torch.uint8
        )

    def _check_connected(self) -> None:
        if self._gloo is None:
            raise CollectiveError("the replicas are not connected; call start() first, and nothing after close()")

    def _check_device(self, tensor: torch.Tensor) -> None:
        """Refuses what no group can carry."""
        if tensor.device.type != "cpu":
            self._backend_of(tensor)

    def _backend_of(self, tensor: torch.Tensor) -> GroupBackend:
        """The backend that carries a tensor of an accelerator."""
        row = kind_table.of_torch_type(tensor.device.type)
        backend = None if row is None else row.group
        if backend is None or not backend.is_available():
            what = "nothing" if backend is None else f"{backend.name}, which this process does not have"
            raise CollectiveError(
                f"torch.distributed moves tensors of {tensor.device.type!r} devices by {what}, got one on "
                f"{str(tensor.device)!r}; copy it to the CPU first"
            )
        return backend

    def _group(self, tensor: torch.Tensor) -> Any:
        """The group that carries a tensor, chosen by where it is."""
        if tensor.device.type == "cpu":
            return self._gloo
        if self._on_device is None:
            backend = self._backend_of(tensor)
            if backend.name == STRICT_GROUP:
                self._on_device = StrictGroup(self._connect_gloo(STRICT_GROUP), self.rank, self.size)
            else:
                timeout = timedelta(seconds=self.timeout_s)
                self._on_device = backend.connect(self._store, self.rank, self.size, timeout)
        return self._on_device

    def _try_gloo(self) -> str:
        """Connects by gloo; returns why that failed, or nothing."""
        try:
            self._gloo = self._connect_gloo()
        except Exception as error:  # not kept: it would keep sockets
            return reason_of(error) or type(error).__name__
        return ""

    def _connect_gloo(self, name: str = "gloo") -> Any:
        device = _c10d.ProcessGroupGloo.create_device(hostname=self._address)
        options = _torch.collective_groups.gloo_options(timedelta(seconds=self._start_timeout_s), [device])
        store = _c10d.PrefixStore(name, self._store)
        before = connections_on(self._address)
        group = _c10d.ProcessGroupGloo(store, self.rank, self.size, options)
        self._sockets += connections_on(self._address) - before
        _torch.collective_groups.set_timeout(group, timedelta(seconds=self.timeout_s))
        return group


def _texts(notes: torch.Tensor) -> list[str]:
    rows = notes.view(-1, _NOTE_BYTES).numpy()
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def _ignore(_: float) -> None:
    """Nobody attends."""


def _padded(row: torch.Tensor, multiple: int) -> torch.Tensor:
    """A copy of a row, made longer with zeros until it divides evenly."""
    padded = row.new_zeros(-(-row.numel() // multiple) * multiple)
    padded[: row.numel()] = row
    return padded


def _bytes(row: torch.Tensor) -> torch.Tensor:
    """The same memory as plain bytes, which every backend can carry, whatever the type."""
    return row.view(torch.uint8)
