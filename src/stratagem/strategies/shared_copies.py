"""Variables in pages that all replicas of a machine share, for replicas that compute on the CPU.

Owns the exchange of gradients through shared memory, the publishing of what one replica changed in
its own view of the pages, and the mean of buffers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from stratagem.collectives.exchange import Exchange
from stratagem.replicas.memory import Region
from stratagem.replicas.variables import Store
from stratagem.strategies.copies import BUFFERS_FLAG, WRITTEN_FLAG, Copies, Written
from stratagem.strategies.gradients import GradientStore, GradientSync
from stratagem.strategies.updates import SplitUpdate, can_be_split

if TYPE_CHECKING:
    from stratagem.strategies.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class SharedVariables:
    """The memory behind some distributed tensors."""

    store: Store
    slots: Region | None
    total: Region | None


@final
class SharedCopies(Copies):
    """One replica's view of variables that lie once in memory.

    Args:
        runtime: The replica.
    """

    def __init__(self, runtime: "Runtime") -> None:
        super().__init__()
        self._runtime = runtime
        self._signals = runtime.signals
        self._parameters: list[Store] = []
        self._buffers: list[Store] = []
        self._gradients = GradientSync(runtime)

    def place(self, named: Sequence[tuple[int, torch.Tensor]], labels: Mapping[int, str]) -> list[SharedVariables]:
        """Moves tensors into shared memory, those of one dtype together."""
        placed = []
        for is_parameter in (True, False):
            kind = [each for each in named if isinstance(each[1], torch.nn.Parameter) == is_parameter]
            for dtype in dict.fromkeys(tensor.dtype for _, tensor in kind):
                chosen = [each for each in kind if each[1].dtype == dtype]
                store = Store.take_in(chosen, dtype, labels)
                slots = total = None
                if is_parameter:
                    num_bytes = Exchange.num_slot_bytes(store.num_elements, len(chosen), dtype, self._signals.size)
                    slots, total = Region.create(num_bytes), Region.create(store.region.num_bytes)
                placed.append(SharedVariables(store, slots, total))
        return placed

    def build(self, placed: SharedVariables) -> dict[int, torch.Tensor]:
        store = placed.store
        store.build_tensors()
        pairs = zip(store.placements, store.tensors, strict=True)
        return {placement.name: tensor for placement, tensor in pairs if tensor is not None}

    def add(self, placed: SharedVariables, tensors: Mapping[int, torch.Tensor]) -> None:
        store = placed.store
        if placed.slots is None or placed.total is None:
            self._buffers.append(store)
            return
        self._parameters.append(store)
        segments = [(placement.offset, placement.numel) for placement in store.placements]
        exchange = Exchange(placed.slots, placed.total, store.dtype, segments, store.num_elements, self._signals)
        self._gradients.stores.append(GradientStore(store, exchange))

    def drop(self, names: set[int]) -> None:
        """Lets go of memory that nothing else is in."""
        for stores in (self._parameters, self._buffers):
            for store in [each for each in stores if _is_gone(each, names)]:
                stores.remove(store)
                self._gradients.stores = [each for each in self._gradients.stores if each.store is not store]

    def parameters(self) -> list[torch.Tensor]:
        return [tensor for store in self._parameters for tensor in store.tensors if tensor is not None]

    def split(self, optimizer: torch.optim.Optimizer) -> SplitUpdate | None:
        return SplitUpdate(optimizer, self._parameters, self._runtime) if can_be_split(optimizer) else None

    def take_written(self) -> Written:
        """Nothing travels: the pages that the controller wrote to become everyone's."""
        for store in (*self._parameters, *self._buffers):
            store.bring_back()
            store.region.publish(store.region.written_pages())
        return Written()

    def receive(self, written: Written) -> None:
        """Nothing has travelled."""

    def note_state(self) -> None:
        """The pages are the state."""

    def forget_state(self) -> None:
        """The pages are the state."""

    def begin_backward(self, *, syncing: bool) -> None:
        if syncing:
            for store in self._gradients.stores:
                store.set_aside()

    def end_backward(self, *, syncing: bool) -> None:
        if syncing:
            self._gradients.sum()
            self.finite, self.culprits = self._gradients.finite, self._gradients.culprits

    def abandon_backward(self) -> None:
        """Nothing has been begun."""

    def publish_written(self) -> None:
        """Also the point where all replicas have come: nobody reads parameters that others now update."""
        written = [store.region.written_pages() for store in self._parameters]
        self._publish(written, self._signals.exchange_flag(WRITTEN_FLAG, _any(written)))

    def settle(self, share: float) -> bool:
        written = [store.region.written_pages() for store in self._parameters]
        if not self._buffers:
            # Seldom is anything written after the last update: no reason for all to wait for each other.
            return bool(_any(written))
        buffers = [store.region.written_pages() for store in self._buffers]
        self._signals.put_flag(BUFFERS_FLAG, _any(buffers))
        self._publish(written, self._signals.exchange_flag(WRITTEN_FLAG, _any(written)))
        if any(self._signals.flags(BUFFERS_FLAG)):
            self._average_buffers(buffers, share)
        return False

    def _publish(self, written: Sequence[np.ndarray], flags: Sequence[int]) -> None:
        """Makes the pages of the first replica that wrote to parameters everyone's."""
        if any(flags):
            first = flags.index(1)
            for store, pages in zip(self._parameters, written, strict=True):
                store.region.publish(pages) if self._signals.rank == first else None
            self._signals.barrier()
            for store, pages in zip(self._parameters, written, strict=True):
                store.region.drop(pages)
            self._signals.barrier()

    def _average_buffers(self, written: Sequence[np.ndarray], share: float) -> None:
        collective = self._runtime.collective
        for store, pages in zip(self._buffers, written, strict=True):
            if store.private.is_floating_point():
                # The change is averaged, not the value: what nobody changed stays as it is to the last bit.
                change = store.private.double() - store.shared.double()
                mean = store.shared.double() + collective.all_reduce(
                    change * share if share else torch.zeros_like(change)
                )
            else:
                mean = collective.broadcast(store.private)
            self._signals.barrier()
            if self._signals.rank == 0:
                store.shared.copy_(mean)
            store.region.drop(pages)
            self._signals.barrier()

    def close(self) -> None:
        """Tensors that are still used keep their memory."""


def _any(written: Sequence[np.ndarray]) -> int:
    return int(any(len(pages) for pages in written))


def _is_gone(store: Store, names: set[int]) -> bool:
    """Whether a store has nothing in it any more, when these have gone (and earlier ones before)."""
    store.gone |= names & {placement.name for placement in store.placements}
    return len(store.gone) == len(store.placements)
