"""Sums gradients over replicas that have parameters of their own, while the backward pass goes on.

Parameters are packed into flat buckets in the reverse order of their making, which is about the
order in which gradients come. A bucket that is full is summed at once; all replicas sum the same
buckets in the same order. Gradients are views of the memory in which they were summed, and the next pass takes
that memory again once nobody holds them. When the pass is done the replicas tell each other which parameters got
a gradient, so that zeros stand in where one replica has none, and nothing where all have none.
"""

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.errors import StrategyError
from stratagem.variables.ledger import Summed, Watched, gather_numbers
from stratagem.variables.participant import Participant

BUCKET_BYTES = 25 * 2**20
_ABSENT, _PRESENT, _LATE = 0, 1, 2
_MOST_ROWS = 2  # that a bucket keeps: of gradients that stay from pass to pass, and of those of the pass

# Begins to sum a flat tensor over the replicas; the function that it returns waits for the sum.
StartSum = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


@final
class Buckets:
    """The sums of one replica's gradients, in flat buckets.

    Args:
        replica: The replica.
        start_sum: How flat tensors are summed.
        spoil: Called when a pass fails whose sums have begun.
        ask: What else the host wants to know of the device: truth values on it. They are read where the host waits for
            the device anyway, once in a pass.
        answer: Called with them.
    """

    def __init__(
        self,
        replica: Participant,
        start_sum: StartSum,
        spoil: Callable[[], None],
        ask: Callable[[], Sequence[torch.Tensor]],
        answer: Callable[[Sequence[bool]], None],
    ) -> None:
        self._replica = replica
        self._start_sum = start_sum
        self._spoil = spoil
        self._ask, self._answer = ask, answer
        self._known: dict[int, _BucketMember] = {}
        self._wanted: list[bool] | None = None
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        # Of the pass under way
        self._lock = threading.Lock()  # a model on several devices has a thread for each
        self._is_open = False
        self._num_started = 0
        self._late: set[int] = set()
        self._alone: dict[int, torch.Tensor] = {}

    def add(self, parameters: Mapping[int, torch.Tensor], labels: Mapping[int, str]) -> None:
        """Takes parameters by name, in the order of their making."""
        for name, parameter in parameters.items():
            self._known[name] = _BucketMember(parameter, labels[name])
        self._wanted = None

    def drop(self, names: set[int]) -> None:
        """Lets go of parameters."""
        for name in names & self._known.keys():
            self._known.pop(name).unhook()
            self._wanted = None

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for known in self._known.values():
            known.unhook()
        self._wanted, self._buckets, self._bucket_of = None, [], {}

    # A backward pass

    def begin(self, *, syncing: bool, counts: bool) -> None:
        self._lay_out()
        self._late, self._num_started, self._alone = set(), 0, {}
        if syncing:
            for bucket in self._buckets:
                bucket.empty()
        self._is_open = syncing and counts

    def abandon(self) -> None:
        self._is_open = False
        for bucket in self._buckets:
            bucket.forget()
        if self._num_started:
            self._spoil()

    @torch.no_grad()
    def _arrived(self, name: int, parameter: torch.Tensor) -> None:
        """Torch has added to the gradient of a parameter."""
        gradient = parameter.grad
        if not self._is_open or gradient is None or gradient.is_sparse:
            return
        with self._lock:
            if (bucket := self._bucket_of[name]).wait_for_sum is not None:
                # A pass within the pass (checkpointing) came back to a parameter that seemed to be done.
                self._late.add(name)
                return
            bucket.put(name, gradient)
            while self._num_started < len(self._buckets) and not self._buckets[self._num_started].missing:
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        bucket.wait_for_sum = self._start_sum(bucket.filled())

    def taken(self) -> Mapping[int, torch.Tensor]:
        return {}

    def sum(self, gradients: Mapping[int, torch.Tensor]) -> Summed:
        start = time.monotonic()
        self._is_open = False
        for name, gradient in gradients.items():
            bucket = self._bucket_of.get(name)
            if bucket is not None and name in bucket.missing and not gradient.is_sparse:
                bucket.put(name, gradient)  # left by passes without a sum
        # Before anything waits for a sum: this wait for the others can be ended, and knows who is missing.
        any_sparse = any(each.is_sparse for each in gradients.values())
        states = gather_numbers(self._replica.collective, [any_sparse, *map(self._state_of, self._known)])
        any_sparse, *anywhere = states.amax(dim=0).tolist()
        found = dict(zip(self._known, anywhere, strict=True))
        while self._num_started < len(self._buckets):
            bucket = self._buckets[self._num_started]
            if any(found[name] for name in bucket.names):
                self._start_next()
            else:
                self._num_started += 1
        late = {name: self._start_alone(name, gradients) for name, state in found.items() if state == _LATE}
        sums = [bucket.take_sum() for bucket in self._buckets if bucket.wait_for_sum is not None]
        self._alone = {name: wait() for name, wait in late.items()}
        is_judged = self._replica.recipe.on_nonfinite != "apply"
        is_finite = not is_judged or self._are_finite([*sums, *self._alone.values()])
        self._replica.signals.waited_s += time.monotonic() - start
        return Summed({name for name, state in found.items() if state}, is_finite, bool(any_sparse))

    def _are_finite(self, rows: Sequence[torch.Tensor]) -> bool:
        """One number shows for many whether any is not finite; only then is it worth looking at each."""
        if not rows:
            return True
        looks = [row.sum().isfinite() for row in rows]
        found = torch.stack([*looks, *self._ask()]).tolist()
        self._answer(found[len(rows) :])
        return all(found[: len(rows)]) or all(bool(row.isfinite().all()) for row in rows)

    def totals(self, names: Sequence[int]) -> list[torch.Tensor]:
        # No view to autograd: the program may call `detach_()`, and what it writes to one changes no other's version.
        return [self._bucket_of[name].slot(name, self._alone.get(name)).data for name in names]

    def end(self) -> None:
        for bucket in self._buckets:
            bucket.let_go()
        self._alone = {}

    def watch(self, gradients: Mapping[int, torch.Tensor], where: Sequence[int]) -> Watched:
        """None of them."""
        return Watched()

    def written(self) -> Set[int]:
        return frozenset()

    def _start_alone(self, name: int, gradients: Mapping[int, torch.Tensor]) -> Callable[[], torch.Tensor]:
        row, slot = self._bucket_of[name].new_row(name)
        if name in gradients:
            slot.copy_(gradients[name])
        return self._start_sum(row)

    def _state_of(self, name: int) -> int:
        bucket = self._bucket_of.get(name)
        if bucket is None or name in bucket.missing:
            return _ABSENT
        return _LATE if name in self._late else _PRESENT

    def _lay_out(self) -> None:
        """Packs the parameters that want gradients into buckets, when they are others than before."""
        wanted = [known.wants_gradient() for known in self._known.values()]
        if wanted == self._wanted:
            return
        rows = gather_numbers(self._replica.collective, [int(each) for each in wanted])
        for known, column in zip(self._known.values(), rows.T.tolist(), strict=True):
            if len(set(column)) > 1:
                raise StrategyError(
                    f"requires_grad of {known.label!r} is {bool(column[0])} on replica 0 and {not column[0]} on "
                    f"replica {column.index(1 - column[0])}; change it in the same way in every replica"
                )
        chosen = {name: each for (name, each), wants in zip(self._known.items(), wanted, strict=True) if wants}
        for name, known in self._known.items():
            known.unhook()
            if name in chosen:
                known.hook(functools.partial(self._arrived, name))
        self._buckets = _packed(chosen)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._wanted = wanted


@final
class _BucketMember:
    """A parameter, not kept alive, and what it looks like."""

    def __init__(self, parameter: torch.Tensor, label: str) -> None:
        form = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
        self.reference = weakref.ref(parameter)
        self.label = label
        self.shape, self.stride, self.numel = tuple(form.shape), form.stride(), form.numel()
        self.kind = parameter.dtype, parameter.device
        self.num_bytes = parameter.numel() * parameter.itemsize
        self._wants = parameter.requires_grad
        self._handle: Any = None

    def wants_gradient(self) -> bool:
        """Whether it does; of one that is gone here and not yet elsewhere, whether it did."""
        parameter = self.reference()
        if parameter is not None:
            self._wants = parameter.requires_grad
        return self._wants

    def hook(self, function: Callable[[torch.Tensor], None]) -> None:
        parameter = self.reference()
        if parameter is not None:
            hook = _torch.gradient_hooks.LibraryHook(function)
            self._handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


@final
class _BucketRow:
    """Memory for the gradients of a bucket, one after the other."""

    def __init__(self, flat: torch.Tensor, members: Mapping[int, _BucketMember]) -> None:
        self.flat = flat
        self.slots: dict[int, torch.Tensor] = {}
        offset = 0
        for name, known in members.items():
            self.slots[name] = flat.as_strided(known.shape, known.stride, offset)
            offset += known.numel
        self._num_own_users = _torch.storages.num_storage_users(flat)

    def is_free(self) -> bool:
        """Whether nobody else holds the memory: no gradient lies in it any more."""
        return not self.flat.is_inference() and _torch.storages.num_storage_users(self.flat) == self._num_own_users


@final
class _Bucket:
    """Some parameters of one dtype on one device, whose gradients are summed together."""

    def __init__(self, members: dict[int, _BucketMember]) -> None:
        self.names = list(members)
        self.missing: set[int] = set()
        self.wait_for_sum: Callable[[], torch.Tensor] | None = None
        self._members = members
        self._numel = sum(known.numel for known in members.values())
        self._dtype, self._device = next(iter(members.values())).kind
        self._rows: list[_BucketRow] = []
        # Of the pass under way
        self._arrived: dict[int, torch.Tensor] = {}
        self._row: _BucketRow | None = None
        self._sum: _BucketRow | None = None

    def empty(self) -> None:
        """Begins a new pass. Gradients of earlier ones belong to whoever holds them, with their memory."""
        self._row = next((row for row in self._rows if row.is_free()), None)
        if self._row is None:
            flat = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            self._row = _BucketRow(flat, self._members)
            self._rows = [*self._rows, self._row][-_MOST_ROWS:]
        self.missing, self._arrived = set(self.names), {}
        self.wait_for_sum = self._sum = None

    def put(self, name: int, gradient: torch.Tensor) -> None:
        self._arrived[name] = gradient
        self.missing.discard(name)

    def filled(self) -> torch.Tensor:
        """All gradients that have come, in one row, with zeros for the others."""
        row = self._current_row()
        if self._arrived:
            _torch.tensors.foreach_copy_([row.slots[name] for name in self._arrived], list(self._arrived.values()))
        if self.missing:
            _torch.tensors.foreach_zero_([row.slots[name] for name in self.missing])
        self._arrived = {}
        return row.flat

    def take_sum(self) -> torch.Tensor:
        row = self._current_row()
        flat = row.flat if self.wait_for_sum is None else self.wait_for_sum()
        self._sum = row if flat is row.flat else _BucketRow(flat, self._members)
        return flat

    def let_go(self) -> None:
        """Leaves the memory to the gradients that lie in it."""
        self._row = self._sum = self.wait_for_sum = None
        self._arrived = {}

    def forget(self) -> None:
        """Ends a pass that has failed: sums may still go on in the memory."""
        self._rows = []
        self.let_go()

    def slot(self, name: int, alone: torch.Tensor | None = None) -> torch.Tensor:
        """The summed gradient of a parameter in the bucket, or in a row of its own."""
        if alone is not None:
            known = self._members[name]
            return alone.as_strided(known.shape, known.stride, 0)
        return (self._sum or self._current_row()).slots[name]

    def new_row(self, name: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row of zeros for one gradient alone, and the gradient in it."""
        row = torch.zeros(self._members[name].numel, dtype=self._dtype, device=self._device)
        return row, self.slot(name, row)

    def _current_row(self) -> _BucketRow:
        if self._row is None:
            raise RuntimeError("no pass is under way")
        return self._row


def _packed(members: Mapping[int, _BucketMember]) -> list[_Bucket]:
    """Buckets of about the same size, in the order in which they are likely to be full."""
    filled: list[dict[int, _BucketMember]] = []
    open_: dict[Any, dict[int, _BucketMember]] = {}
    sizes: dict[Any, int] = {}
    for name in reversed(list(members)):
        kind = members[name].kind
        open_.setdefault(kind, {})[name] = members[name]
        sizes[kind] = sizes.get(kind, 0) + members[name].num_bytes
        if sizes[kind] >= BUCKET_BYTES:
            filled.append(open_.pop(kind))
            sizes[kind] = 0
    return [_Bucket(each) for each in (*filled, *open_.values())]
