"""Variables in pages that all replicas of a machine share, for replicas that compute on the CPU.

Owns the exchange of gradients through shared memory, the publishing of what one replica changed in
its own view of the pages, and the joining of buffers.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import numpy as np
import torch

from stratagem.collectives.exchange import WindowExchange, chunk_of
from stratagem.errors import DriftError
from stratagem.processes.region import Region
from stratagem.variables import agreement, drift, written
from stratagem.variables.aggregation import default_of, joined
from stratagem.variables.copies import (
    ALL_BUFFERS_FLAG,
    ALL_WRITTEN_FLAG,
    BUFFERS_FLAG,
    WRITTEN_FLAG,
    Copies,
    Written,
)
from stratagem.variables.ledger import Ledger
from stratagem.variables.participant import Participant, Updating
from stratagem.variables.slices import SplitUpdate, can_be_split
from stratagem.variables.store import OwnPart, Placement, Store, shaped
from stratagem.variables.windows import Windows


@dataclasses.dataclass(frozen=True)
class SharedVariables:
    """The memory behind some distributed tensors."""

    store: Store
    are_parameters: bool
    exchange: "ExchangeMemory | None" = None


@dataclasses.dataclass(frozen=True)
class ExchangeMemory:
    """The memory in which the gradients of a store are summed; only stores that need gradients have it."""

    slots: Region
    total: Region


@final
class SharedCopies(Copies):
    """One replica's view of variables that lie once in memory.

    Args:
        runtime: The replica.
    """

    def __init__(self, runtime: Participant) -> None:
        self._windows = Windows(runtime)
        super().__init__(Ledger(runtime, self._windows))
        self._runtime = runtime
        self._signals = runtime.signals
        self._parameters: list[Store] = []
        self._buffers: list[Store] = []
        self._where: dict[int, tuple[Store, Placement]] = {}
        self._wrote = False  # whether parameters were written to, in this run and on this machine
        self._new_memory: list[tuple[Store, ExchangeMemory]] = []  # which the children may not have yet
        self._failed = False

    def place(self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str]) -> list[SharedVariables]:
        """Moves tensors into shared memory, those of one dtype together."""
        kinds: dict[tuple[bool, bool, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
        for name, tensor in named:
            kind = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad, tensor.dtype
            kinds.setdefault(kind, []).append((name, tensor))
        placed = []
        for (are_parameters, need_gradients, dtype), chosen in kinds.items():
            store = Store.take_in(chosen, dtype, labels)
            exchange = self._exchange_memory(store) if are_parameters and need_gradients else None
            placed.append(SharedVariables(store, are_parameters, exchange))
        return placed

    def _exchange_memory(self, store: Store) -> ExchangeMemory:
        num_bytes = WindowExchange.num_slot_bytes(
            store.num_elements, len(store.placements), store.dtype, self._signals.size
        )  # as many bytes if gradients are shown as a narrower type: less of them is touched
        return ExchangeMemory(Region.create(num_bytes), Region.create(store.region.num_bytes))

    def build(self, placed: SharedVariables) -> dict[int, torch.Tensor]:
        store = placed.store
        store.build_tensors()
        pairs = zip(store.placements, store.tensors, strict=True)
        return {placement.name: tensor for placement, tensor in pairs if tensor is not None}

    def add(self, placed: SharedVariables, tensors: Mapping[int, torch.Tensor]) -> None:
        store = placed.store
        if not placed.are_parameters:
            self._buffers.append(store)
            return
        self._parameters.append(store)
        self._where = {}
        if placed.exchange is not None:
            self._exchange_gradients(store, placed.exchange)

    def _exchange_gradients(self, store: Store, memory: ExchangeMemory) -> None:
        segments = [(placement.offset, placement.numel) for placement in store.placements]
        forms = [(placement.shape, placement.stride) for placement in store.placements]
        exchange = WindowExchange(
            *(memory.slots, memory.total, store.dtype, segments, store.num_elements, self._signals),
            # A replica that is alone on its machine shows them to itself.
            shown_as=self._runtime.recipe.travels_as(store.dtype) if self._signals.size > 1 else store.dtype,
            further=self._runtime.recipe.num_machines > 1,
            forms=forms,
        )
        self._windows.add(store, exchange)
        live = {each.name: tensor for each, tensor in zip(store.placements, store.tensors, strict=True)}
        labels = {placement.name: placement.label for placement in store.placements}
        self.ledger.add(live, labels)  # the same names in all replicas, whatever has been dropped where

    def drop(self, names: set[int]) -> None:
        """Lets go of memory that nothing else is in.

        Not on several machines, where the garbage collector may have been earlier on one than on another: all must
        exchange the same.
        """
        if self._runtime.recipe.num_machines > 1:
            return
        for stores in (self._parameters, self._buffers):
            for store in [each for each in stores if _is_gone(each, names)]:
                stores.remove(store)
                self._windows.drop(store)
                self.ledger.drop({placement.name for placement in store.placements})
                self._where = {}

    def parameters(self) -> list[torch.Tensor]:
        """Also those that need no gradient, and so are in no exchange."""
        return [tensor for store in self._parameters for tensor in store.tensors if tensor is not None]

    def buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        for store in self._buffers:
            for placement, tensor in zip(store.placements, store.tensors, strict=True):
                if tensor is not None:
                    yield placement.name, tensor

    def split(self, optimizer: torch.optim.Optimizer, replica: Updating) -> SplitUpdate | None:
        return SplitUpdate(optimizer, self, replica, self._signals.size) if can_be_split(optimizer) else None

    def take_written(self) -> Written:
        """No value travels but gradients: the pages that the controller wrote to become everyone's."""
        told: agreement.Told = {}
        compares = self._runtime.recipe.num_machines > 1
        stores = [*self._parameters, *self._buffers]
        for store, pages in zip(stores, _written(stores), strict=True):
            told |= agreement.changed_in(store, pages) if compares else {}
            store.region.publish(pages)
        failed, self._failed = self._failed, False
        gradients = self.ledger.changed_gradients()
        if compares:
            told |= {f"gradient {name}": agreement.checksum(gradient) for name, gradient in gradients.items()}
        return Written({}, gradients, self._new_exchanges(), failed, told)

    def _new_exchanges(self) -> list[tuple[int, ExchangeMemory]]:
        """Memory for the gradients of parameters that were frozen until now."""
        for store in self._parameters:
            if not self._windows.has(store) and any(each is not None and each.requires_grad for each in store.tensors):
                self._new_memory.append((store, self._exchange_memory(store)))
                self._exchange_gradients(*self._new_memory[-1])
        return [
            (self._parameters.index(store), memory) for store, memory in self._new_memory if store in self._parameters
        ]

    def receive(self, written: Written) -> None:
        if written.after_failure:
            for store in (*self._parameters, *self._buffers):
                store.region.drop(store.region.written_pages())
        for number, memory in written.exchanges:
            if not self._windows.has(self._parameters[number]):
                self._exchange_gradients(self._parameters[number], memory)
        self.ledger.receive_gradients(written.gradients)

    def own_part(self, tensor: torch.Tensor) -> OwnPart:
        return self.part_of(self._signals.rank, tensor)

    def sum_of(self, store: Store) -> torch.Tensor | None:
        return self._windows.sum_of(store)

    def part_of(self, rank: int, tensor: torch.Tensor) -> OwnPart:
        """The elements of a tensor that a replica updates."""
        store, placement = self.find(tensor)
        start, end = chunk_of(rank, self._signals.size, store.num_elements)
        first, last = max(0, start - placement.offset), min(placement.numel, end - placement.offset)
        return OwnPart(first, max(first, last), placement, store.shared)

    def find(self, tensor: torch.Tensor) -> tuple[Store, Placement]:
        """Where a tensor lies."""
        if id(tensor) not in self._where:
            self._where = {
                id(each): (store, placement)
                for store in self._parameters
                for each, placement in zip(store.tensors, store.placements, strict=True)
                if each is not None
            }
        return self._where[id(tensor)]

    def note_state(self) -> None:
        self.ledger.note_gradients()
        self._new_memory = []

    def forget_state(self) -> None:
        self.ledger.forget_gradients()
        self._failed = True

    def publish_written(self) -> bool:
        """Also the point where all replicas have come: nobody reads parameters that others now update."""
        pages = _written(self._parameters)
        self._publish(pages, self._signals.exchange_flag(WRITTEN_FLAG, _any(pages)))
        return True

    def share_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        if self._signals.rank == 0:
            for store, pages in zip(self._parameters, _written(self._parameters), strict=True):
                store.region.publish(pages)
        self._signals.barrier()

    def settle(self, share: float, *, all_buffers: bool = False) -> bool:
        pages = _written(self._parameters)
        several_machines = self._runtime.recipe.num_machines > 1
        if several_machines and (step := self._runtime.compared_step):
            self._compare_with_machines(step)
        if not self._buffers:
            # Seldom is anything written after the last update: no reason for all to wait for each other. Other
            # machines are asked when the next run begins.
            return bool(_any(pages))
        buffers = _written(self._buffers)
        self._signals.put_flag(BUFFERS_FLAG, _any(buffers))
        self._publish(pages, self._signals.exchange_flag(WRITTEN_FLAG, _any(pages)))
        changed = any(self._signals.flags(BUFFERS_FLAG))
        if self._agree_with_machines(changed) if several_machines else changed:
            self._join_buffers(buffers, share)
        return False

    def settle_before_next(self, *, unsettled: bool) -> None:
        if unsettled:
            self.publish_written()
        if self._runtime.recipe.num_machines > 1 and not self._buffers:  # else `settle` has asked them
            self._agree_with_machines(False)

    def take_wrote(self) -> bool:
        wrote, self._wrote = self._wrote, False
        return wrote

    def take_from(self, machine: int, *, wrote: bool) -> None:
        between = self._runtime.between
        for store in self._parameters if between is not None else ():
            theirs = between.broadcast(store.shared, machine)  # type: ignore[union-attr]
            differs = ~written.are_alike(store.shared, theirs) if wrote else torch.zeros(0)
            if differs.any():
                label = written.label_at(store, int(differs.nonzero()[0]))
                raise DriftError(
                    f"workers wrote different values to {label!r} in one step, worker {machine} the first of them; "
                    f"write the same values in all workers (from gradients or all_reduce)"
                )
            store.shared.copy_(theirs)

    def _compare_with_machines(self, step: int) -> None:
        """Finds parameters that have drifted apart between machines; every replica must come here."""
        self._signals.barrier()  # no other replica of this machine writes
        if (between := self._runtime.between) is not None:
            sums = [agreement.checksum(store.shared) for store in self._parameters]
            rows = between.exchange("compare parameters", repr([self._wrote, *sums]).encode())
            # What a machine has written in this step it gives the others before the next.
            if len(set(rows)) > 1 and not any(row.startswith(b"[True") for row in rows):
                parameters = [
                    (each.label, shaped(store.shared, each)) for store in self._parameters for each in store.placements
                ]
                drift.settle(parameters, between, step, "worker")
        self._signals.barrier()

    def _agree_with_machines(self, changed: bool) -> bool:
        """Gives all machines the parameters of the first that wrote to them in this run.

        Args:
            changed: Whether buffers were changed on this machine.
        Returns:
            Whether they were on any.
        """
        between, wrote, is_any = self._runtime.between, self.take_wrote(), False
        if between is not None:
            rows = between.exchange("end a run", bytes([changed, wrote]))
            changed, is_any = any(row[0] for row in rows), any(row[1] for row in rows)
            if is_any:
                self.take_from(next(machine for machine, row in enumerate(rows) if row[1]), wrote=wrote)
        self._signals.put_flag(ALL_BUFFERS_FLAG, int(changed))
        if self._signals.exchange_flag(ALL_WRITTEN_FLAG, int(is_any))[0]:
            for store in self._parameters:
                store.region.drop(store.region.written_pages())
        return bool(self._signals.flags(ALL_BUFFERS_FLAG)[0])

    def _publish(self, pages: Sequence[np.ndarray], flags: Sequence[int]) -> None:
        """Makes what replicas wrote to parameters everyone's."""
        if any(flags):
            self._wrote = True
            written.publish(self._parameters, pages, flags, self._runtime)

    def _join_buffers(self, written: Sequence[np.ndarray], share: float) -> None:
        collective, first = self._runtime.collective, self._runtime.first_with_examples
        for store, pages in zip(self._buffers, written, strict=True):
            how = default_of(store.dtype)
            value = joined(collective, how, store.shared, store.private, share, first)
            for placement in store.placements:
                chosen = self._chosen.get(placement.name, how)
                if chosen is not how:
                    own = slice(placement.offset, placement.offset + placement.numel)
                    value[own] = joined(collective, chosen, store.shared[own], store.private[own], share, first)
            self._signals.barrier()
            if self._signals.rank == 0:
                store.shared.copy_(value)
            store.region.drop(pages)
            self._signals.barrier()

    def close(self) -> None:
        """Tensors that are still used keep their memory."""
        self.ledger.close()


def _written(stores: Sequence[Store]) -> list[np.ndarray]:
    """The pages of each store that this replica has written to, in whatever way."""
    for store in stores:
        store.bring_back()
    return [store.region.written_pages() for store in stores]


def _any(written: Sequence[np.ndarray]) -> int:
    return int(any(map(len, written)))


def _is_gone(store: Store, names: set[int]) -> bool:
    """Whether a store has nothing in it any more, when these have gone (and earlier ones before)."""
    store.gone |= names & {placement.name for placement in store.placements}
    return len(store.gone) == len(store.placements)
