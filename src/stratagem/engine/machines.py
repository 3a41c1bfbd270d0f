"""The workers that train together, as the program of one of them sees the others.

Every worker runs the same program and drives the replicas of its own machine. Here is what they do
together outside the steps of a run: begin a run at the same time, start from equal variables, and
join results. All of it goes over one connection between the first replicas (`between`), which is
also the one that gradients take.
"""

import itertools
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

import torch

from stratagem import _dtypes
from stratagem._caller import warn_caller
from stratagem.cluster.membership.membership import Membership
from stratagem.cluster.membership.value_store import ClusterStore
from stratagem.collectives.between import Between
from stratagem.collectives.calling import connect_all
from stratagem.collectives.collective import MismatchError
from stratagem.collectives.mesh import Mesh
from stratagem.collectives.sockets import CutOffError, Sockets
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.engine import random_state
from stratagem.errors import (
    CollectiveError,
    StratagemError,
    StratagemWarning,
    StrategyError,
    TaskLostError,
    WorkerError,
    WorkerStalledError,
    in_words,
)
from stratagem.objects.per_replica import PerReplica, as_tensors
from stratagem.variables import agreement

Counts: TypeAlias = tuple[int, ...] | None
"""How many examples replicas have in a step; `None` if they are not on a distributed batch."""

_NO_COUNTS = -1
_LOOK_S = 0.02
_LINGER_S = 5.0
_REMIND_S = 60.0
_PACKET_BYTES = 4 * 2**20


@final
class Alone:
    """No other workers: what they would do together is done."""

    size = 1
    between = None
    fatal: Callable[[Exception], BaseException]

    def meet(
        self, number: int, counts: Sequence[Counts], wrote: bool, told: agreement.Told
    ) -> tuple[Sequence[Counts], int | None]:
        return counts, None

    def make_equal(self, tensors: Sequence[torch.Tensor], labels: Mapping[int, str], settings: Sequence[str]) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def explain(self, error: CollectiveError) -> StratagemError:
        return error

    def close(self) -> None:
        pass


@final
class Workers:
    """All workers of one strategy.

    Args:
        membership: How this one is in touch with the others; it has joined.
        num_replicas: How many replicas this worker has.
        stall_timeout_s: How long to wait for a worker that lives but does not come.
    """

    def __init__(self, membership: Membership, num_replicas: int, *, stall_timeout_s: float) -> None:
        self.rank, self.size = membership.rank, membership.size
        self._names = [task.name for task in membership.participants]
        self._membership = membership
        self._stall_timeout_s = stall_timeout_s
        self._reminded_s = 0.0
        self._doing = "connect"
        self.fatal: Callable[[Exception], BaseException] = lambda error: error
        found = connect_all(
            self.rank,
            self.size,
            ClusterStore(membership, timeout_s=membership.join_timeout_s),
            address=membership.own_host,
            sign=membership.sign,
            timeout_s=membership.join_timeout_s,
            attend=self._attend,
            names=self._names,
        )
        mesh = Mesh(self.rank, self.size, Sockets(found, self._names), self._attend)
        self.between = Between(mesh, self._connect_accelerators, lambda error: self.fatal(self.explain(error)))
        try:
            self.sizes = tuple(each[0] for each in self._exchange("count replicas", [num_replicas]))
            self.draw_alike()
        except BaseException:
            self.between.close()
            raise

    def _connect_accelerators(self) -> TorchDistributed:
        connection = TorchDistributed(
            self.rank,
            self.size,
            store=ClusterStore(self._membership),
            address=self._membership.own_host,
            timeout_s=self._stall_timeout_s + 3600.0,  # who is late is for `_attend` to judge
            start_timeout_s=self._membership.join_timeout_s,
            attend=self._attend,
        )
        connection.start()
        return connection

    @property
    def num_replicas(self) -> int:
        return sum(self.sizes)

    @property
    def first_replica(self) -> int:
        """The number of this worker's first replica among all."""
        return sum(self.sizes[: self.rank])

    def meet(
        self, number: int, counts: Sequence[Counts], wrote: bool, told: agreement.Told
    ) -> tuple[Sequence[Counts], int | None]:
        """Begins a run in all workers, of as many steps as all of them have.

        Args:
            number: Which run: the number of its first step.
            counts: For each step, how many examples each replica of this worker has.
            wrote: Whether the last run wrote to parameters here, other than by updates.
            told: What the program has changed since.
        Returns:
            For each step, how many examples each replica of all workers has; and the first worker where the last run
            wrote.
        """
        self._doing = f"begin run {number}"
        here = [count for each in counts for count in each or [_NO_COUNTS] * self.sizes[self.rank]]
        rows = self._exchange("strategy.run", [number, *here, int(wrote), agreement.total(told)])
        changes = {row.pop() for row in rows}
        writers = [rank for rank, row in enumerate(rows) if row.pop()]
        self._doing = f"finish run {number}"
        if len({row[0] for row in rows}) > 1:
            raise WorkerError(
                "workers are not in the same run: "
                + ", ".join(f"{name} in run {row[0]}" for name, row in zip(self._names, rows, strict=True))
                + "; call run the same number of times in every worker"
            )
        by_step = list(
            zip(*(_in_rows(row[1:], size) for row, size in zip(rows, self.sizes, strict=True)), strict=False)
        )
        for place, step in enumerate(by_step):
            if len({each[0] == _NO_COUNTS for each in step}) > 1:
                having = [name for name, each in zip(self._names, step, strict=True) if each[0] != _NO_COUNTS]
                raise WorkerError(
                    f"only {', '.join(having)} began run {number + place} with a distributed batch; use "
                    f"strategy.distribute in every worker"
                )
        if len(changes) > 1:
            theirs = self.between.exchange("compare changes", json.dumps(told).encode())
            raise WorkerError(agreement.difference(number, self._names, [json.loads(each) for each in theirs]))
        everyones = [None if each[0][0] == _NO_COUNTS else tuple(itertools.chain(*each)) for each in by_step]
        return everyones, writers[0] if writers else None

    @torch.no_grad()
    def make_equal(self, tensors: Sequence[torch.Tensor], labels: Mapping[int, str], settings: Sequence[str]) -> None:
        """Gives all workers the first one's values of tensors that have just been distributed.

        Args:
            tensors: Of this worker.
            labels: What to call them in errors, by id.
            settings: What the optimizers among what is distributed are set to, which must be the same.
        """
        self._doing = "distribute the model"
        forms = [f"{labels.get(id(each), '')} {tuple(each.shape)} {each.dtype}{_kind(each)}" for each in tensors]
        forms += settings
        text = "\n".join(forms).encode()
        everyones = self._exchange("distribute a model", [len(forms), zlib.crc32(text)])
        if any(each != everyones[0] for each in everyones):
            self._name_difference([each.decode().split("\n") for each in self.between.exchange("compare models", text)])
        for group in _packed(tensors):
            row = torch.cat([each.detach().reshape(-1) for each in group]) if len(group) > 1 else group[0]
            row = row.cpu()  # which kind of device each has its variables on already is no matter of the others
            parts = torch.split(self.between.broadcast(row).view(-1), [each.numel() for each in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _name_difference(self, everyones: Sequence[Sequence[str]]) -> None:
        """Says what is first different in the models of two workers."""
        for name, theirs in zip(self._names, everyones, strict=True):
            pairs = zip(everyones[0], theirs, strict=False)
            for position, (first, other) in enumerate(pairs):
                if first != other:
                    raise WorkerError(
                        f"{self._names[0]} and {name} have different models: part {position} is {first!r} on the "
                        f"first and {other!r} on the second; build the same model and optimizer in every worker"
                    )
            if len(theirs) != len(everyones[0]):
                raise WorkerError(
                    f"{self._names[0]} and {name} have different models: {len(everyones[0])} and {len(theirs)} "
                    f"tensors and optimizers; build the same in every worker"
                )
        raise StrategyError(
            "the checksums of the workers' models differ, but the models are equal; report this as a bug of stratagem"
        )

    def draw_alike(self) -> None:
        """Gives all workers the first one's random state: else they would shuffle in different orders."""
        self._doing = "begin an epoch"
        own = random_state.to_bytes(random_state.current())
        everyones = self.between.exchange("iter() of strategy.distribute", own)
        random_state.restore(random_state.from_bytes(everyones[0]))

    def compare_data(self, told: Mapping[str, int | str | None]) -> None:
        """Compares what all workers know of data of which each loads its part.

        Raises:
            WorkerError: They differ: some examples would be seen twice and some never.
        """
        self._doing = "begin an epoch"
        packed = self.between.exchange("iter() of strategy.distribute", json.dumps(told).encode())
        first, *others = [json.loads(each) for each in packed]
        for name, theirs in zip(self._names[1:], others, strict=True):
            differing = [key for key in {**first, **theirs} if first.get(key) != theirs.get(key)]
            if differing:
                pairs = ", ".join(f"{key} {first.get(key)} and {theirs.get(key)}" for key in differing)
                raise WorkerError(
                    f"{self._names[0]} and {name} have different data: {pairs}; every worker loads its part of the "
                    f"same global batches, so give all workers the same data in the same order, or write "
                    f"auto_shard='off' if each worker has its own data"
                )

    def is_any(self, has_data: bool) -> bool:
        """Whether any worker has data; all ask at the same time."""
        self._doing = "ask for the next batch"
        return any(each[0] for each in self._exchange("next() of strategy.distribute", [int(has_data)]))

    def everyones(self, value: PerReplica) -> PerReplica:
        """The values of the replicas of all workers, which all give theirs at the same time."""
        self._doing = "join the results of the replicas"
        tensors = as_tensors("join", value)
        if any(each.is_nested or each.layout != torch.strided for each in tensors):
            raise StrategyError(
                "only dense tensors can be joined between workers, but replicas returned sparse or nested ones; "
                "return x.to_dense(), or read this worker's own with strategy.local_results"
            )
        header = [len(tensors), int(value.counts is not None)]
        if why := next(filter(None, (_dtypes.why_not_sent(each.dtype) for each in tensors)), ""):
            raise StrategyError(why)
        for each, count in zip(tensors, value.counts or [0] * len(tensors), strict=True):
            header += [count, _dtypes.CODES.index(each.dtype), each.dim(), *each.shape]
        payload = b"".join(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
        packed = struct.pack(f"<i{len(header)}q", len(header), *header) + payload
        joined = [_unpack(each) for each in self.between.exchange("strategy.reduce or gather", packed)]
        counted = all(has_counts for _, _, has_counts in joined)
        values = [tensor for each, _, _ in joined for tensor in each]
        return PerReplica(values, tuple(count for _, counts, _ in joined for count in counts) if counted else None)

    def _exchange(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """The few numbers of each worker."""
        rows = self.between.exchange(what, struct.pack(f"<{len(numbers)}q", *numbers))
        return [list(struct.unpack(f"<{len(row) // 8}q", row)) for row in rows]

    def fail(self, error: BaseException) -> None:
        """Tells the others that this worker cannot go on."""
        if not isinstance(error, TaskLostError):  # all know of that
            self._membership.fail(in_words(error))

    def explain(self, error: CollectiveError) -> StratagemError:
        """What is behind an error: that a connection broke is a symptom, and why is known a moment later."""
        if isinstance(error, MismatchError):
            return WorkerError(f"workers do not make the same calls: {error}")
        is_cut_off = isinstance(error, CutOffError)  # which takes longer to notice than a loss, on a machine with time
        self._await_news(_LINGER_S + (0.0 if is_cut_off else self._membership.heartbeat_timeout_s))
        try:
            self._membership.raise_if_lost()
        except TaskLostError as lost:
            return lost
        if is_cut_off:
            return WorkerError(
                f"{self._names[self.rank]} wanted to {self._doing}, but {error}; each worker must be able to reach "
                f"every other"
            )
        others = ", ".join(name for rank, name in enumerate(self._names) if rank != self.rank)
        return WorkerError(
            f"{self._names[self.rank]} wanted to {self._doing}, but not all of {others} take part any more: one has "
            f"closed its strategy; make the same calls in every worker ({error})"
        )

    def _await_news(self, timeout_s: float) -> None:
        """Waits until it is known that somebody is lost or has left."""
        deadline = time.monotonic() + timeout_s
        while not self._has_news() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        time.sleep(_LOOK_S)  # a task that is lost is first gone, then lost

    def _has_news(self) -> bool:
        known = self._membership
        return not known.takes_part or known.lost is not None or len(known.members) < self.size

    def close(self) -> None:
        """Ends the connection, also while somebody waits."""
        self.between.close()
        self._membership.leave(linger_s=0.0 if self._membership.lost else _LINGER_S)

    def _attend(self, waited_s: float) -> None:
        """While this worker waits for others: whether they still live, and how long is too long."""
        self._reminded_s = min(self._reminded_s, waited_s)
        try:
            self._membership.raise_if_lost()
            others = [name for rank, name in enumerate(self._names) if rank != self.rank]
            if waited_s > self._stall_timeout_s:
                raise WorkerStalledError(
                    f"{self._names[self.rank]} has waited {waited_s:.0f} s to {self._doing}: not all of "
                    f"{', '.join(others)} have come, although their processes are alive; make the same calls in "
                    f"every worker, or raise "
                    f"worker_timeout_s"
                )
        except Exception as error:
            raise self.fatal(error) from None
        if waited_s - self._reminded_s > _REMIND_S:
            self._reminded_s = waited_s
            warn_caller(f"waiting for {', '.join(others)} to {self._doing}, {waited_s:.0f} s so far", StratagemWarning)


def _packed(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type on one device that travel together: each way over the network takes its time."""
    group: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.nbytes
        fits = not group or (tensor.dtype, tensor.device) == (group[0].dtype, group[0].device)
        if group and not (fits and num_bytes <= _PACKET_BYTES):
            yield group
            group, num_bytes = [], tensor.nbytes
        group.append(tensor)
    if group:
        yield group


def _kind(tensor: torch.Tensor) -> str:
    return (" parameter" if isinstance(tensor, torch.nn.Parameter) else "") + (" frozen" * (not tensor.requires_grad))


def _unpack(packed: bytes) -> tuple[list[torch.Tensor], list[int], bool]:
    """The tensors of a worker's replicas, their counts, and whether these are known."""
    (length,) = struct.unpack_from("<i", packed)
    header = list(struct.unpack_from(f"<{length}q", packed, 4))
    data = memoryview(bytearray(packed[4 + 8 * length :]))
    (number, has_counts), header = header[:2], header[2:]
    tensors, counts = [], []
    for _ in range(number):
        count, code, num_dims = header[:3]
        shape, header = header[3 : 3 + num_dims], header[3 + num_dims :]
        empty = torch.empty(shape, dtype=_dtypes.CODES[code])
        own, data = data[: empty.nbytes], data[empty.nbytes :]
        tensors.append(torch.frombuffer(own, dtype=empty.dtype).view(shape) if empty.nbytes else empty)
        counts.append(count)
    return tensors, counts, bool(has_counts)


def _in_rows(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
