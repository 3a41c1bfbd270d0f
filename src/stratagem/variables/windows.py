"""Makes `loss.backward()` give every replica the gradient of the global batch.

Owns the wrapper around torch's backward: it scales the start of the backward pass by the replica's
part of the global batch (so that sums over replicas are means over examples), and when the pass is
done sums what came out over the replicas. Parameters that no replica used keep no gradient;
replicas without examples count for nothing, whatever their loss is.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.collectives.exchange import Exchange, StartSum
from stratagem.errors import StrategyError
from stratagem.variables.participant import Participant
from stratagem.variables.store import Placement, Store, laid_out, shaped

FINITE_FLAG, ALL_FINITE_FLAG, IN_TIME_FLAG = 0, 3, 4
_UNKNOWN_CULPRITS = [(0, "a sum that is too large")]


@final
class GradientStore:
    """The gradients of the parameters of one store.

    A gradient is either summed over the replicas, and then the same in all of them, or this replica's own:
    what passes without sync left, until the next sum takes it in.
    """

    def __init__(self, store: Store, exchange: Exchange) -> None:
        self.exchange = exchange
        self.store = store
        self.placements = store.placements
        self._views = [shaped(exchange.sum, placement) for placement in self.placements]
        start = exchange.sum.data_ptr()
        self._range = range(start, start + exchange.sum.nbytes)
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}
        self._own: set[int] = set()
        self._set_aside: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def begin(self, *, counts: bool) -> None:
        """Moves gradients out of the way that must not be mixed with those of the pass.

        Args:
            counts: Whether what this pass gives counts: not if the replica has no examples.
        """
        self._set_aside, self._hidden = {}, {}
        for given in self._given.values():
            # Somebody still has it, while its memory is about to be written over.
            if (gradient := given()) is not None and gradient.data_ptr() in self._range:
                gradient.data = gradient.clone()
        self._given = {}
        for number, parameter in enumerate(self.store.tensors):
            if parameter is None or parameter.grad is None:
                self._own.discard(number)
            elif number not in self._own:
                self._set_aside[number], parameter.grad = parameter.grad, None
            elif not counts:
                self._hidden[number], parameter.grad = parameter.grad, None

    def abandon(self) -> None:
        """Puts gradients back after a pass that has failed."""
        for number, parameter in enumerate(self.store.tensors):
            if parameter is not None and (number not in self._own or number in self._hidden):
                parameter.grad = self._set_aside.get(number, self._hidden.get(number))

    def discard_uncounted(self) -> None:
        """Leaves out what the pass gave, where it does not count."""
        for number, parameter in enumerate(self.store.tensors):
            if parameter is not None:
                parameter.grad = self._hidden.get(number)

    def take_as_summed(self, names: Iterable[int]) -> None:
        """Counts gradients that all replicas were given as summed."""
        names = set(names)
        self._own -= {number for number, placement in enumerate(self.placements) if placement.name in names}

    def flat_local(self) -> list[torch.Tensor | None]:
        """This replica's own gradients, each as a flat vector in the order of its parameter's memory."""
        pairs = zip(self.store.tensors, self.placements, strict=True)
        return [None if parameter is None else _flat(parameter, placement) for parameter, placement in pairs]

    @torch.no_grad()
    def give_out(self, present: Sequence[bool]) -> None:
        """Makes the sums everyone's gradients, with those that were there before."""
        for number, (parameter, view) in enumerate(zip(self.store.tensors, self._views, strict=True)):
            before = self._set_aside.get(number)
            if parameter is None:
                continue
            if not present[number]:
                parameter.grad = before
                continue
            self._own.discard(number)
            if before is not None:
                parameter.grad = before.add_(view)
            else:
                # A new tensor each time: gradients belong to one step.
                parameter.grad = view.detach()
                self._given[number] = weakref.ref(parameter.grad)
        self._set_aside, self._hidden = {}, {}

    def touched(self) -> list[bool]:
        """Which summed gradients a pass without sync has added to, in this replica."""
        return [
            number in self._set_aside and parameter is not None and parameter.grad is not None
            for number, parameter in enumerate(self.store.tensors)
        ]

    @torch.no_grad()
    def keep(self, touched: Sequence[bool], *, holds_sum: bool) -> None:
        """Ends a pass without sync.

        Args:
            touched: Which summed gradients any replica has added to.
            holds_sum: Whether this replica keeps the summed part, so that the next sum counts it once.
        """
        for number, parameter in enumerate(self.store.tensors):
            if parameter is None:
                continue
            summed, gradient = self._set_aside.get(number), parameter.grad
            if summed is None:
                if gradient is not None:
                    self._own.add(number)
                continue
            if touched[number]:
                self._own.add(number)
                if not holds_sum:
                    summed.zero_()
                if gradient is not None:
                    summed.add_(gradient)
            parameter.grad = summed
        self._set_aside, self._hidden = {}, {}


@final
class GradientSync:
    """Sums the gradients of one strategy's parameters after each backward pass."""

    def __init__(self, runtime: Participant) -> None:
        self._runtime = runtime
        self._start_sum = runtime.between.start_sum if runtime.between is not None else None
        self._early = EarlyGradients(self._start_sum if runtime.settings.size == 1 else None)
        self.stores: list[GradientStore] = []
        self.culprits: list[tuple[int, str]] = []
        self._is_spoiled = False

    def begin(self, *, syncing: bool) -> None:
        """Prepares a pass."""
        if self._is_spoiled:
            raise StrategyError(
                "an earlier backward pass failed halfway, when its gradients were on their way to other machines; let "
                "its error end the run"
            )
        counts = self._runtime.counted[self._runtime.rank]
        for store in self.stores:
            store.begin(counts=counts)
        self._early.begin(self.stores[:1] if syncing and counts else [])

    def abandon(self) -> None:
        """Cleans up after a pass that has failed."""
        self._early.end()
        for store in self.stores:
            store.abandon()
            self._is_spoiled |= store.exchange.give_up()

    def keep(self) -> None:
        """Ends a pass without sync: every replica keeps what it has."""
        self._discard_uncounted()
        own = torch.tensor([each for store in self.stores for each in store.touched()], dtype=torch.uint8)
        touched = torch.stack(self._runtime.collective.all_gather(own)).amax(dim=0).tolist()
        for store in self.stores:
            num = len(store.placements)
            store.keep(touched[:num], holds_sum=self._runtime.global_rank == 0)
            touched = touched[num:]

    def _discard_uncounted(self) -> None:
        if not self._runtime.counted[self._runtime.rank]:
            for store in self.stores:
                store.discard_uncounted()

    def sum(self) -> None:
        """Publishes, sums and gives out; every replica must come here."""
        signals = self._runtime.signals
        late = self._early.end()
        self._discard_uncounted()
        locals_ = [store.flat_local() for store in self.stores]
        finite, present = True, []
        for store, vectors in zip(self.stores, locals_, strict=True):
            store.exchange.forget()
            there, own_part_is_finite = store.exchange.add_up(vectors, self._start_sum)
            if self._runtime.settings.unused == "error":
                self._refuse_unused(store, vectors)
            present.append(there)
            finite &= own_part_is_finite
        signals.put_flag(FINITE_FLAG, int(finite))
        signals.barrier()
        is_finite = all(signals.flags(FINITE_FLAG))
        if self._runtime.settings.num_machines > 1:
            present, is_finite = self._sum_between_machines(present, locals_, late=late)
        self.culprits = [] if is_finite else self._find_culprits(locals_) or _UNKNOWN_CULPRITS
        for store, there in zip(self.stores, present, strict=True):
            store.give_out(there)

    def _sum_between_machines(
        self,
        present: Sequence[Sequence[bool]],
        vectors: Sequence[Sequence[torch.Tensor | None]],
        *,
        late: bool,
    ) -> tuple[list[list[bool]], bool]:
        """Sums on over the machines, in the first replica of each; the others wait for it.

        Args:
            present: Which gradients replicas of this machine have.
            vectors: This replica's own.
            late: Whether some were added to after they had been sent.
        """
        signals, between = self._runtime.signals, self._runtime.between
        if between is not None:
            # How many machines were late, and have each gradient: travels beside the last windows.
            counts = torch.tensor([late, *(each for there in present for each in there)], dtype=torch.int32)
            wait_for_counts = between.start_sum(counts)
            # A sum over all machines that is finite on one is so on all: what is not, no other number mends.
            finite = [store.exchange.finish() for store in self.stores]
            num_late, *anywhere = wait_for_counts().tolist()
            signals.put_flag(ALL_FINITE_FLAG, int(all(finite)))
            signals.put_flag(IN_TIME_FLAG, int(not num_late))
            for store, there in zip(self.stores, present, strict=True):
                store.exchange.note_anywhere([int(each > 0) for each in anywhere[: len(there)]])
                anywhere = anywhere[len(there) :]
        signals.barrier()
        if not signals.flags(IN_TIME_FLAG)[0]:  # on some machine; all sum again
            for store, own in zip(self.stores, vectors, strict=True):
                store.exchange.add_up(own, self._start_sum)
            signals.barrier()
            return self._sum_between_machines(present, vectors, late=False)
        return [store.exchange.anywhere() for store in self.stores], bool(signals.flags(ALL_FINITE_FLAG)[0])

    def _refuse_unused(self, store: GradientStore, vectors: Sequence[torch.Tensor | None]) -> None:
        own = torch.tensor([vector is not None for vector in vectors], dtype=torch.uint8)
        used = torch.stack(self._runtime.collective.all_gather(own)).T.tolist()
        counted = self._runtime.all_counted
        for placement, column in zip(store.placements, used, strict=True):
            having = [rank for rank, has in enumerate(column) if has and counted[rank]]
            missing = [rank for rank, has in enumerate(column) if counted[rank] and not has]
            if having and missing:
                raise StrategyError(
                    f"{placement.label!r} got a gradient on replica {having[0]} but not on {missing[0]}; "
                    f"use unused='zero' if this is meant"
                )

    def _find_culprits(self, locals_: Sequence[Sequence[torch.Tensor | None]]) -> list[tuple[int, str]]:
        """Which replicas had gradients that are not finite, and where first."""
        labels = [placement.label for store in self.stores for placement in store.placements]
        vectors = [vector for each in locals_ for vector in each]
        bad = [number for number, each in enumerate(vectors) if each is not None and not each.isfinite().all()]
        own = torch.tensor([bad[0] + 1 if bad else 0])
        firsts = [int(each) for each in self._runtime.collective.all_gather(own)]
        return [(rank, labels[first - 1]) for rank, first in enumerate(firsts) if first]


@final
class EarlyGradients:
    """Sends gradients to other machines while the backward pass goes on, from a replica that is alone on its own.

    Args:
        start_sum: Begins to sum a flat tensor over the machines; `None` if nothing is sent early.
    """

    def __init__(self, start_sum: StartSum | None) -> None:
        self._start_sum = start_sum
        self._handles: list[Any] = []
        self._arrived: dict[int, torch.Tensor] = {}
        self._sent: set[int] = set()
        self._late = False

    def begin(self, stores: Sequence[GradientStore]) -> None:
        """Watches a pass over the parameters of a store."""
        self.end()
        self._arrived, self._sent, self._late = {}, set(), False
        for store in stores if self._start_sum is not None else ():
            store.exchange.forget()
            for number, parameter in enumerate(store.store.tensors):
                if parameter is not None and parameter.requires_grad and not _torch.post_accumulate_hooks(parameter):
                    hook = functools.partial(self._arrive, store, number)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def end(self) -> bool:
        """Ends the watch; tells whether a gradient was added to after it had been sent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        late, self._late = self._late, False
        return late

    @torch.no_grad()
    def _arrive(self, store: GradientStore, number: int, parameter: torch.Tensor) -> None:
        gradient = _flat(parameter, store.placements[number])
        if gradient is None or self._start_sum is None:
            return
        self._late |= number in self._sent
        self._arrived[number] = gradient
        exchange = store.exchange
        while (segments := exchange.next_segments()) and all(each in self._arrived for each in segments):
            exchange.send_early(self._arrived, self._start_sum)
            self._sent.update(segments)


def _flat(parameter: torch.Tensor, placement: Placement) -> torch.Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise StrategyError(
            f"a parameter of shape {placement.shape} got a sparse gradient, which replicas cannot sum; "
            f"use sparse=False in its nn.Embedding"
        )
    return laid_out(gradient, placement).as_strided((placement.numel,), (1,))
