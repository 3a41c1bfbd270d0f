"""Sums gradients through shared memory, window by window (`collectives/exchange`).

Each store of parameters has an exchange; a gradient that is given out is a view of its sum. Between
machines the first replica of each sends windows on to the others; one that is alone on its machine
sends them while the backward pass still runs, and large gradients become their sums.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.collectives.exchange import PLACED, StartSum, WindowExchange
from stratagem.errors import StrategyError
from stratagem.variables.ledger import Summed, Watched
from stratagem.variables.marks import addresses
from stratagem.variables.participant import Participant
from stratagem.variables.store import Homes, Placement, Store, laid_out

SUM_FLAG, ALL_FINITE_FLAG, IN_TIME_FLAG, ALL_SPARSE_FLAG = 0, 3, 4, 9
_IS_FINITE, _HAS_SPARSE = 1, 2  # the parts of what each replica tells of its part of the sum
_FINITE_ONES, _DENSE_ONES = {_IS_FINITE, _IS_FINITE | _HAS_SPARSE}, {0, _IS_FINITE}
# In the place of gradients that have been given up.
_FINITE, _NOT_FINITE = torch.zeros(()), torch.full((), torch.nan)


@final
class Windows:
    """The sums of one replica's gradients in memory that all replicas share.

    Args:
        replica: The replica.
    """

    def __init__(self, replica: Participant) -> None:
        self._replica = replica
        self._start_sum = self._sum_between if replica.between is not None else None
        self._early = _EarlyWindows(self._start_sum if replica.recipe.size == 1 else None)
        self._rows: list[_Row] = []
        self._watched: Set[int] = frozenset()  # gradients in the memory of the sums that nobody had written to
        self._is_spoiled = False

    def _sum_between(self, row: torch.Tensor) -> Callable[[], bool]:
        """Begins to sum a flat tensor over the machines, in place; the result waits, and tells if it is finite."""
        return self._replica.between.start_sum(row, self._replica.recipe.travels_as(row.dtype))  # type: ignore[union-attr]

    def add(self, store: Store, exchange: WindowExchange) -> None:
        """Takes the parameters of a store."""
        self._rows.append(_Row(store, exchange))

    def drop(self, store: Store) -> None:
        """Lets go of the parameters of a store."""
        self._rows = [each for each in self._rows if each.store is not store]

    def has(self, store: Store) -> bool:
        """Whether the gradients of a store are summed."""
        return store in map(_store, self._rows)

    def sum_of(self, store: Store) -> torch.Tensor | None:
        """The sums of a store, one after the other, but for those that are made in place; zeros between them."""
        return next((each.exchange.sum for each in self._rows if each.store is store), None)

    def begin(self, *, syncing: bool, counts: bool) -> None:
        if self._is_spoiled:
            raise StrategyError(
                "an earlier backward pass failed halfway, when its gradients were on their way to other machines; let "
                "its error end the run"
            )
        for row in self._rows:
            row.exchange.let_go()  # of a pass that has failed
            row.leave_to_users()
        self._early.begin(self._rows[:1] if syncing and counts else [])

    def abandon(self) -> None:
        self._early.put_back()
        for row in self._rows:
            self._is_spoiled |= row.exchange.give_up()

    def taken(self) -> Mapping[int, torch.Tensor]:
        return self._early.taken()

    def sum(self, gradients: Mapping[int, torch.Tensor]) -> Summed:
        signals = self._replica.signals
        late = self._early.end()
        has_sparse = any(map(_is_sparse, gradients.values()))
        if has_sparse:  # they are not summed here
            gradients = {name: each for name, each in gradients.items() if not each.is_sparse}
        locals_ = [row.flat(gradients) for row in self._rows]
        is_finite, present = True, []
        for row, vectors in zip(self._rows, locals_, strict=True):
            row.exchange.forget()
            there, own_part_is_finite = row.exchange.add_up(vectors, self._start_sum)
            present.append(there)
            is_finite &= own_part_is_finite
        told = set(signals.exchange_flag(SUM_FLAG, _IS_FINITE * is_finite | _HAS_SPARSE * has_sparse))
        is_finite, any_sparse = told <= _FINITE_ONES, not told <= _DENSE_ONES
        if self._replica.recipe.num_machines > 1:
            present = self._sum_between_machines(present, late=bool(late), any_sparse=any_sparse)
            any_sparse = bool(signals.flags(ALL_SPARSE_FLAG)[0])
            is_finite = bool(signals.flags(ALL_FINITE_FLAG)[0])
            if not signals.flags(IN_TIME_FLAG)[0]:  # on some machine
                is_finite &= self._add_late(late)
        names = itertools.chain.from_iterable(map(_Row.named, self._rows, present))
        return Summed(set(names), is_finite, any_sparse)

    def totals(self, names: Sequence[int]) -> list[torch.Tensor]:
        # New tensors each time, since gradients belong to one step; no views to autograd: the program may call
        # `detach_()`, and what it writes to one changes no other's version.
        views: dict[int, torch.Tensor] = {}
        for row in self._rows:
            views |= row.totals()
        return list(map(_torch.tensors.data_of, map(views.__getitem__, names)))

    def end(self) -> None:
        """Gradients have the sums that were made in place; the others stay where they are until the next pass."""
        for row in self._rows:
            row.exchange.let_go()

    def watch(self, gradients: Mapping[int, torch.Tensor], where: Sequence[int]) -> Watched:
        lies = dict(zip(gradients, where, strict=True))
        home: set[int] = set()
        for row in self._rows:
            home.update(lies if lies == row.addresses else (name for name, _ in lies.items() & row.addresses.items()))
        self._watched = home.difference(*map(_Row.written, self._rows))
        return Watched(self._watched, home)

    def written(self) -> Set[int]:
        return self._watched & set(itertools.chain.from_iterable(map(_Row.changed, self._rows)))

    def _sum_between_machines(
        self, present: Sequence[Sequence[bool]], *, late: bool, any_sparse: bool
    ) -> list[list[bool]]:
        """Sums on over the machines, in the first replica of each; the others wait for it.

        Args:
            present: Which gradients replicas of this machine have.
            late: Whether some were added to after they had been sent.
            any_sparse: Whether replicas of this machine have sparse ones.
        """
        signals, between = self._replica.signals, self._replica.between
        if between is not None:
            # How many machines were late, have sparse ones, and have each gradient: travels beside the last windows.
            counts = torch.tensor([late, any_sparse, *(each for there in present for each in there)], dtype=torch.int32)
            wait_for_counts = self._sum_between(counts)
            # A sum over all machines that is finite on one is so on all: what is not, no other number mends.
            finite = [row.exchange.finish() for row in self._rows]
            wait_for_counts()
            num_late, num_sparse, *anywhere = counts.tolist()
            signals.put_flag(ALL_FINITE_FLAG, int(all(finite)))
            signals.put_flag(IN_TIME_FLAG, int(not num_late))
            signals.put_flag(ALL_SPARSE_FLAG, int(num_sparse > 0))
            for row, there in zip(self._rows, present, strict=True):
                row.exchange.note_anywhere([int(each > 0) for each in anywhere[: len(there)]])
                anywhere = anywhere[len(there) :]
        signals.barrier()
        return [row.exchange.anywhere() for row in self._rows]

    def _add_late(self, late: Mapping[int, torch.Tensor]) -> bool:
        """Sums what was added to gradients after they had been sent, and adds it; tells whether the sum is finite."""
        signals, row = self._replica.signals, self._rows[0]  # no other is sent early
        kept = row.exchange.kept_sum() if self._replica.between is not None else None
        row.exchange.add_up(row.flat(late), self._start_sum)
        signals.barrier()
        if kept is not None:
            is_finite = row.exchange.finish()
            signals.put_flag(ALL_FINITE_FLAG, int(row.exchange.add_kept(kept) and is_finite))
        signals.barrier()
        return bool(signals.flags(ALL_FINITE_FLAG)[0])


@final
class _Row:
    """The gradients of one store, one after the other, and the exchange that sums them."""

    def __init__(self, store: Store, exchange: WindowExchange) -> None:
        self.store = store
        self.exchange = exchange
        placements = list(enumerate(store.placements))
        self._names = [placement.name for _, placement in placements]
        self._large = [(number, placement) for number, placement in placements if not exchange.is_small(number)]
        self._lay_out()

    def _lay_out(self) -> None:
        """Prepares the tensors that gradients are made of, each with a storage of its own."""
        homes = Homes(self.exchange.sum, self.store.placements)
        self.views = {name: homes.make(number) for number, name in enumerate(self._names)}
        self.addresses = {name: each.data_ptr() for name, each in self.views.items()}
        del homes  # which holds the storages too
        self._users = _torch.storages.StorageUsers(self.views.values())

    def leave_to_users(self) -> None:
        """Leaves its memory to whatever still has it, which is about to be written over.

        A gradient that has it alone gets memory of its own. What the program has made of one (`detach()`, `numpy()`)
        keeps its memory, with that gradient if it still exists: the sums lie elsewhere from then on.
        """
        tensors, kept = self.store.tensors, []
        for number, num_users in self._users.more():
            gradient: Any = None if (parameter := tensors[number]) is None else parameter.grad
            is_here = gradient is not None and self.addresses[self._names[number]] in addresses([gradient])
            if is_here and num_users == 1:
                _torch.tensors.set_data(gradient, gradient.clone())
            else:
                kept.append(number)
        if kept:
            self.exchange.leave(kept)
            self._lay_out()

    def totals(self) -> dict[int, torch.Tensor]:
        """The sums by name, each in its form."""
        in_place = self.exchange.sums_in_place()
        return self.views | {self._names[number]: each for number, each in in_place.items()} if in_place else self.views

    def written(self) -> set[int]:
        """The names of gradients that lie in pages that this replica has written to."""
        pages = self.exchange.written_pages()
        return {self._names[number] for number in self.exchange.in_pages(pages)} if len(pages) else set()

    def changed(self) -> list[int]:
        """The names of gradients that were written to, in whatever way."""
        return [self._names[number] for number in self.exchange.changed()]

    def flat(self, gradients: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """This replica's own gradients: large ones flat, in the order of their parameter's memory."""
        vectors = list(map(gradients.get, self._names))
        for number, placement in self._large:
            is_placed = vectors[number] is _FINITE or vectors[number] is _NOT_FINITE
            vectors[number] = PLACED if is_placed else _flat(vectors[number], placement)
        return vectors

    def named(self, present: Sequence[bool]) -> list[int]:
        """The names of those that are there."""
        return list(itertools.compress(self._names, present))


@final
class _EarlyWindows:
    """Sends gradients to other machines while the backward pass goes on, from a replica that is alone on its own.

    A gradient that has come is taken from its parameter. A large one becomes the memory in which its sum is made, or is
    copied to where that will be and given up: gradients take memory once.

    Args:
        start_sum: Begins to sum a flat tensor over the machines; `None` if nothing is sent early.
    """

    def __init__(self, start_sum: StartSum | None) -> None:
        self._start_sum = start_sum
        self._handles: list[Any] = []
        self._row: _Row | None = None
        self._arrived: dict[int, torch.Tensor] = {}  # by the number of the segment
        self._had: set[int] = set()  # which had gradients before the pass: the program may use them elsewhere
        self._sent: set[int] = set()  # of which a part is on its way
        self._placed: dict[int, torch.Tensor] = {}  # what stands for those that were given up
        self._late: dict[int, torch.Tensor] = {}

    def begin(self, rows: Sequence[_Row]) -> None:
        """Watches a pass over the parameters of a store."""
        self.end()
        for row in rows if self._start_sum is not None else ():
            if not row.exchange.can_send_early:
                continue  # a hook on each of many small tensors would cost more than their computation
            self._row = row
            row.exchange.forget()
            for number, parameter in enumerate(row.store.tensors):
                if parameter is not None and parameter.requires_grad:
                    if parameter.grad is not None:
                        self._had.add(number)
                    hook = _torch.gradient_hooks.LibraryHook(functools.partial(self._arrive, row, number))
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def taken(self) -> dict[int, torch.Tensor]:
        """The gradients that have come, by the name of the parameter, or what stands for them."""
        if self._row is None:
            return {}
        return self._by_name(self._placed | self._arrived)

    def end(self) -> dict[int, torch.Tensor]:
        """Ends the watch; what was added to gradients after they had been sent, by the name of the parameter."""
        if self._row is None:
            return {}
        for handle in self._handles:
            handle.remove()
        late = self._by_name(self._late)
        self._handles, self._row = [], None
        self._arrived, self._had, self._sent, self._placed, self._late = {}, set(), set(), {}, {}
        return late

    def put_back(self) -> None:
        """Ends the watch of a pass that has failed: parameters get back what has not been sent."""
        row = self._row
        if row is not None:
            unsent = self._placed.keys() - self._sent
            gradients = self._arrived | {number: row.exchange.taken_back(number) for number in unsent}
            for number, gradient in gradients.items():
                if (parameter := row.store.tensors[number]) is not None:
                    parameter.grad = gradient
        self.end()

    def _by_name(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        placements: Any = () if self._row is None else self._row.store.placements
        return {placements[number].name: gradient for number, gradient in gradients.items()}

    @torch.no_grad()
    def _arrive(self, row: _Row, number: int, parameter: torch.Tensor) -> None:
        gradient, placement = parameter.grad, row.store.placements[number]
        if gradient is None or gradient.is_sparse or self._start_sum is None:
            return
        parameter.grad = None
        exchange = row.exchange
        # A pass within the pass (checkpointing) may come back to a parameter.
        if number in self._sent:
            self._late[number] = _added(self._late.get(number), gradient, placement)
        elif exchange.is_small(number):
            self._arrived[number] = _added(self._arrived.get(number), gradient, placement)
        else:
            is_shared = number in self._had or not _torch.storages.is_alone_in_memory(gradient)
            vector = _in_one_row(laid_out(gradient, placement))
            if is_shared and exchange.is_in_place(number) and number not in self._placed:
                vector = vector.clone()
            is_finite = exchange.place(number, vector, add=number in self._placed)
            self._placed[number] = _FINITE if is_finite else _NOT_FINITE
        while (segments := exchange.next_segments()) and all(map(self._has_come, segments)):
            flat = {each: _in_one_row(self._arrived[each]) for each in segments if each in self._arrived}
            exchange.send_early(flat, self._start_sum)
            self._sent.update(segments)

    def _has_come(self, number: int) -> bool:
        return number in self._placed or number in self._arrived


def _added(before: torch.Tensor | None, gradient: torch.Tensor, placement: Placement) -> torch.Tensor:
    return laid_out(gradient if before is None else before + gradient, placement)


def _flat(gradient: torch.Tensor | None, placement: Placement) -> torch.Tensor | None:
    """A gradient as a flat vector in the order of its parameter's memory; not one that is sparse."""
    if gradient is None or gradient.is_sparse:
        return None
    return _in_one_row(laid_out(gradient, placement))


def _in_one_row(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.as_strided((gradient.numel(),), (1,))


_is_sparse, _store = operator.attrgetter("is_sparse"), operator.attrgetter("store")
