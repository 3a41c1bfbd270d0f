"""Knows of every gradient whose it is, and makes it that of the global batch.

A gradient is GLOBAL (summed over the replicas, and so the same in all), LOCAL (this replica's own,
already weighted: what passes inside `no_sync` left) or FOREIGN (set by the program: this replica's own,
not weighted yet). `begin_pass` moves gradients out of the way that must not be mixed with those of the
pass; `end_pass` sums what the pass gave over the replicas, calls the hooks of parameters with the sums,
and adds what was there before. `sum_rest` does the same before an update, for what no pass has summed.
Parameters that no replica used keep no gradient; what a replica without examples computes counts for nothing.

How sums travel is up to a `Transport`: windows of shared memory, or buckets of torch.distributed.
Without one every replica trains alone, and all gradients are LOCAL.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from operator import call
from typing import Any, NamedTuple, Protocol, final

import torch

from stratagem import _torch
from stratagem.collectives import differentiable
from stratagem.collectives.collective import Collective, is_finite
from stratagem.errors import StrategyError
from stratagem.variables import sparse
from stratagem.variables.marks import Marks, addresses
from stratagem.variables.participant import Participant
from stratagem.variables.written import are_alike


class Summed(NamedTuple):
    """What came of a sum: whose gradients any replica had, whether all are finite, and whether any were sparse.

    Sparse ones have not been summed: they travel by themselves.
    """

    present: Set[int]
    is_finite: bool
    any_sparse: bool


class Watched(NamedTuple):
    """Gradients by name: those of which a transport finds every write, and all that lie in tensors of its own."""

    found: Set[int] = frozenset()
    home: Set[int] = frozenset()


class Transport(Protocol):
    """How gradients are summed over the replicas."""

    def begin(self, *, syncing: bool, counts: bool) -> None:
        """Prepares a pass.

        Args:
            syncing: Whether its gradients will be summed.
            counts: Whether what this replica computes in it counts.
        """

    def taken(self) -> Mapping[int, torch.Tensor]:
        """Gradients of the pass that it has taken from their parameters, by name.

        For one that it has given up something stands in that takes no memory; it is finite if the gradient was.
        """

    def sum(self, gradients: Mapping[int, torch.Tensor]) -> Summed:
        """Sums this replica's own gradients, by name, with those of the others; every replica must come here."""

    def totals(self, names: Sequence[int]) -> Iterable[torch.Tensor]:
        """The sums of some gradients, each formed like its parameter, as a tensor of its own."""

    def end(self) -> None:
        """The sums have been given out."""

    def watch(self, gradients: Mapping[int, torch.Tensor], where: Sequence[int]) -> Watched:
        """In the controller, after a run: begins to watch some of the gradients, with the `addresses` of all."""

    def written(self) -> Set[int]:
        """Which of those that it watches have been written to since, in whatever way."""

    def abandon(self) -> None:
        """Cleans up after a pass that has failed."""


def gather_numbers(collective: Collective, numbers: Sequence[int]) -> torch.Tensor:
    """The small numbers of all replicas, a row for each."""
    return torch.stack(collective.all_gather(torch.tensor(numbers, dtype=torch.int64)))


@final
class Ledger:
    """The gradients of one replica's parameters.

    Args:
        replica: The replica.
        transport: How they are summed; `None` if they are not.
    """

    def __init__(self, replica: Participant, transport: Transport | None) -> None:
        self._replica = replica
        self._transport = transport
        self._parameters: dict[int, Callable[[], torch.Tensor | None]] = {}
        self._labels: dict[int, str] = {}
        self._names: dict[int, int] = {}  # of parameters, by `id`
        self._global: dict[int, weakref.ref[torch.Tensor]] = {}
        self._local: dict[int, weakref.ref[torch.Tensor]] = {}
        # In the controller: what were LOCAL ones before it changed them or a run failed. Nobody has the sum.
        self._spoiled: dict[int, weakref.ref[torch.Tensor]] = {}
        # Of the pass under way: GLOBAL gradients of passes before it, and LOCAL ones where it does not count.
        self._set_aside: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._hooks: dict[int, _torch.gradient_hooks.TensorHooks] = {}
        self._counts = True
        # What gradients were after the last run, in the controller, unless nobody knows what others have.
        self._marks = Marks()
        self._are_marked = True
        # Parameters whose sums were not finite, and whose fault that was; the same in every replica.
        self._not_finite: dict[int, weakref.ref[torch.Tensor]] = {}
        self.culprits: list[tuple[int, str]] = []

    # Parameters

    def add(self, parameters: Mapping[int, torch.Tensor | None], labels: Mapping[int, str]) -> None:
        """Takes parameters by name, in the order of their making; `None` for those that the program has dropped."""
        for name, parameter in parameters.items():
            self._parameters[name] = _dropped if parameter is None else weakref.ref(parameter)
            self._labels[name] = labels[name]
            self._names[id(parameter)] = name

    def drop(self, names: Set[int]) -> None:
        """Lets go of parameters."""
        for name in names & self._parameters.keys():
            for known in (self._parameters, self._labels, self._global, self._local, self._spoiled):
                known.pop(name, None)
        self._names = {key: name for key, name in self._names.items() if name not in names}

    def __contains__(self, name: int) -> bool:
        """Whether it has a parameter, though the program may have dropped it just now."""
        return name in self._parameters

    def has_any_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of some tensors is a parameter of it."""
        return any(self._name_of(each) is not None for each in tensors)

    def parameters(self) -> Iterable[tuple[int, torch.Tensor]]:
        """The parameters that still exist, by name."""
        found: dict[int, Any] = dict(zip(self._parameters, map(call, self._parameters.values()), strict=True))
        if type(None) in set(map(type, found.values())):
            found = {name: each for name, each in found.items() if each is not None}
        return found.items()

    def labelled(self) -> list[tuple[str, torch.Tensor | None]]:
        """All parameters with their labels, in one order for all replicas; `None` for those that are gone."""
        return [(self._labels[name], reference()) for name, reference in self._parameters.items()]

    def _name_of(self, parameter: torch.Tensor) -> int | None:
        name = self._names.get(id(parameter))
        return name if name is not None and self._parameters[name]() is parameter else None

    # A backward pass

    def begin_pass(self, *, syncing: bool, graph: bool = False, counts: bool = True, hooks: bool = True) -> bool:
        """Moves gradients out of the way that must not be mixed with those of the pass.

        Args:
            syncing: Whether its gradients are to be summed.
            graph: Whether they will be differentiated themselves.
            counts: Whether this replica adds anything.
            hooks: Whether hooks of parameters are called with the sums.
        Returns:
            Whether they will be summed: those that hooks wait for are, whatever was asked.
        """
        self._counts = counts = counts and self._replica.counted[self._replica.rank]
        self._set_aside, self._hidden = {}, {}
        if self._transport is None:
            for name, parameter in self.parameters() if not counts else ():
                if parameter.grad is not None:
                    self._hidden[name], parameter.grad = parameter.grad, None
            return syncing
        own = dict(self.parameters())
        self._hooks = _taken_hooks(own) if hooks else {}
        syncing = syncing or graph or bool(self._hooks)
        self._transport.begin(syncing=syncing and not graph, counts=counts)
        gradients = _gradients_of(own)
        if set(map(type, gradients.values())) <= {type(None)}:  # most often: the program has let go of them
            self._local.clear()
            return syncing
        for name, parameter in own.items():
            gradient = gradients[name]
            if gradient is None:
                self._local.pop(name, None)
                continue
            if self._is(self._global, name, gradient):
                self._set_aside[name], parameter.grad = gradient, None
                continue
            if not self._is(self._local, name, gradient):
                gradient = parameter.grad = self._weighted(name, gradient)
                self._local[name] = weakref.ref(gradient)
            if not counts:
                self._hidden[name], parameter.grad = gradient, None
        return syncing

    @staticmethod
    def _is(known: Mapping[int, "weakref.ref[torch.Tensor]"], name: int, gradient: torch.Tensor) -> bool:
        reference = known.get(name)
        return reference is not None and reference() is gradient

    def _weighted(self, name: int, gradient: torch.Tensor) -> torch.Tensor:
        """What a gradient that the program has set adds to the sum."""
        if name in self._local or self._is(self._spoiled, name, gradient):
            raise StrategyError(
                f"the gradient of {self._labels[name]!r} that a pass inside no_sync() has left was replaced, changed "
                f"outside strategy.run, or left by a run that failed; it is this replica's part of a sum, so change "
                f"it in place in a step, after a pass that synchronises, or drop it with zero_grad()"
            )
        weight = self._replica.weight
        return (gradient * weight).detach() if weight else torch.zeros_like(gradient)

    def end_pass(self, *, syncing: bool) -> None:
        """Makes `.grad` what it must be when the pass returns; every replica must come here."""
        with torch.no_grad():
            hooks = self._put_back_hooks()
            if not self._counts:
                self._show_hidden()
            if self._transport is None:
                self._judge_own()
            elif syncing:
                self._sum(self._transport, hooks)
            else:
                self._keep()
            self._set_aside, self._hidden = {}, {}
            if hooks:
                self._call_hooks_after(hooks)

    def end_pass_with_graph(self) -> None:
        """The same, for gradients that will be differentiated themselves."""
        hooks = self._put_back_hooks()
        if self._transport is None:
            self._set_aside, self._hidden = {}, {}
            return
        if not self._counts:
            with torch.no_grad():
                self._show_hidden()
        try:
            self._sum_with_graph(hooks)
        except BaseException:  # as in `_sum`
            self.abandon_pass()
            raise
        self._set_aside, self._hidden = {}, {}
        if hooks:
            self._call_hooks_after(hooks)

    def _sum_with_graph(self, hooks: Mapping[int, "_torch.gradient_hooks.TensorHooks"]) -> None:
        own = dict(self.parameters())
        rows = gather_numbers(self._replica.collective, [_has_gradient(own.get(name)) for name in self._parameters])
        for name, is_there in zip(self._parameters, rows.amax(dim=0).tolist(), strict=True):
            parameter, before = own.get(name), self._set_aside.get(name)
            if parameter is None:
                continue  # gone in all replicas: one that is differentiated is used
            if is_there:
                # Every replica has to take part in the passes that come back through the sum.
                gradient = torch.zeros_like(parameter).requires_grad_() if parameter.grad is None else parameter.grad
                counted = self._replica.all_counted
                total = differentiable.all_reduce(self._replica.collective, gradient, counted=counted)
                total = hooks[name].call(total) if name in hooks else total
                parameter.grad = total if before is None else before + total
                self._note_global({name: parameter.grad})
            elif before is not None:
                parameter.grad = before

    def abandon_pass(self) -> None:
        """Puts gradients back after a pass that has failed."""
        self._put_back_hooks()
        if self._transport is not None:
            self._transport.abandon()
        for name, parameter in self.parameters():
            if (self._transport is not None and name not in self._local) or name in self._hidden:
                parameter.grad = self._set_aside.get(name, self._hidden.get(name))
        self._set_aside, self._hidden = {}, {}

    def _show_hidden(self) -> None:
        """In a replica without examples: drops what the pass gave, and shows what was there."""
        for name, parameter in self.parameters():
            parameter.grad = self._hidden.get(name)

    def _put_back_hooks(self) -> dict[int, "_torch.gradient_hooks.TensorHooks"]:
        hooks, self._hooks = self._hooks, {}
        for each in hooks.values():
            each.put_back()
        return hooks

    def _call_hooks_after(self, hooks: Mapping[int, "_torch.gradient_hooks.TensorHooks"]) -> None:
        for name, parameter in self.parameters():
            if name in hooks and parameter.grad is not None:
                hooks[name].call_after(parameter)

    def _sum(self, transport: Transport, hooks: Mapping[int, "_torch.gradient_hooks.TensorHooks"]) -> None:
        """Gives every replica the sums, with the gradients that were there before."""
        own = dict(self.parameters())
        gradients = {name: gradient for name, gradient in _gradients_of(own).items() if gradient is not None}
        gradients |= transport.taken()
        try:
            present, all_finite, any_sparse = transport.sum(gradients)
            if self._replica.recipe.unused == "error":
                self._refuse_unused(gradients)
            totals = self._sum_sparse(gradients, present) if any_sparse else {}
        except BaseException:  # another replica has failed: here, too, the gradients are those of before
            self.abandon_pass()
            raise
        all_finite = all_finite and all(map(sparse.is_finite, totals.values()))
        if not all_finite:
            self._find_culprits(gradients)
        dense = [name for name in own if name in present and name not in totals]
        totals |= zip(dense, transport.totals(dense), strict=True)
        if hooks or self._set_aside:
            totals = self._completed(totals, hooks)
        for name, gradient in totals.items():
            own[name].grad = gradient
        self._note_global(totals)
        transport.end()
        if not all_finite:
            self._note_not_finite()

    def _completed(
        self, totals: Mapping[int, torch.Tensor], hooks: Mapping[int, "_torch.gradient_hooks.TensorHooks"]
    ) -> dict[int, torch.Tensor]:
        """Sums as hooks make them, added to the gradients that were there before; those that have no sum stay."""
        completed = dict(self._set_aside)
        for name, gradient in totals.items():
            total, before = hooks[name].call(gradient) if name in hooks else gradient, self._set_aside.get(name)
            if before is not None:
                total = before + total if before.is_sparse else before.add_(total)
            completed[name] = total
        return completed

    def _sum_sparse(self, gradients: Mapping[int, torch.Tensor], dense: Set[int]) -> dict[int, torch.Tensor]:
        """The sums of the gradients that are sparse, in any replica."""
        collective = self._replica.collective
        own = [name in gradients and gradients[name].is_sparse for name in self._parameters]
        anywhere = gather_numbers(collective, own).amax(dim=0).tolist()
        names = [name for name, is_sparse in zip(self._parameters, anywhere, strict=True) if is_sparse]
        for name in names:
            if name in dense:
                raise StrategyError(
                    f"the gradient of {self._labels[name]!r} is sparse on one replica and dense on another; use its "
                    f"layer alike in all"
                )
        travels_as = self._replica.recipe.travels_as
        return {name: sparse.all_reduce(collective, gradients.get(name), travels_as) for name in names}

    def _note_global(self, gradients: Mapping[int, torch.Tensor]) -> None:
        self._global.update(zip(gradients, map(weakref.ref, gradients.values()), strict=True))
        for name in gradients.keys() & self._local.keys():
            del self._local[name]

    # Gradients that no pass has summed

    def are_summed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all gradients of some parameters are GLOBAL."""
        if self._transport is None:
            return True
        parameters = list(parameters)
        gradients = list(map(_torch.tensors.gradient_of, parameters))
        names: Any = map(self._names.get, map(id, parameters))
        known = map(self._global.get, names, itertools.repeat(_dropped))
        if all(map(operator.is_, gradients, map(call, known))):
            return True  # most often all have one, which was summed just now
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                name = self._name_of(parameter)
                if name is not None and not self._is(self._global, name, gradient):
                    return False
        return True

    def has_foreign(self) -> bool:
        """Whether the program has set a gradient that nobody has summed."""
        return self._transport is not None and next(self._foreign(), None) is not None

    def _foreign(self) -> Iterator[tuple[int, torch.Tensor]]:
        for name, parameter in self.parameters():
            gradient = parameter.grad
            if gradient is None or name in self._local:
                continue
            if not self._is(self._global, name, gradient) and not self._is(self._spoiled, name, gradient):
                yield name, gradient

    def sum_rest(self) -> None:
        """Sums gradients that no pass has summed; every replica must come here.

        Where losses are added up instead of averaged, gradients that all replicas have set alike are taken as they are.
        """
        if self._transport is None:
            return
        foreign = dict(self._foreign())
        own = {} if self._replica.is_mean else {name: each.clone() for name, each in foreign.items()}
        self.begin_pass(syncing=True, hooks=False)
        self.end_pass(syncing=True)
        if own:
            self._take_what_all_have_set(own)
        self._keep_tensors(foreign)

    @torch.no_grad()
    def _keep_tensors(self, foreign: Mapping[int, torch.Tensor]) -> None:
        """Puts sums into the tensors that the program has set, which it may use elsewhere."""
        for name, parameter in self.parameters():
            total, kept = parameter.grad, foreign.get(name)
            if kept is not None and total is not None and _may_be_written(kept, parameter, total):
                parameter.grad = kept.copy_(total)
                self._note_global({name: kept})

    @torch.no_grad()
    def _take_what_all_have_set(self, foreign: Mapping[int, torch.Tensor]) -> None:
        own, size = dict(self.parameters()), sum(self._replica.all_counted)
        travels_as = self._replica.recipe.travels_as
        alike = [
            name not in foreign
            or not self._counts
            or _are_alike(foreign[name] * size, own[name].grad, travels_as(foreign[name].dtype))
            for name in self._parameters
        ]
        everywhere = gather_numbers(self._replica.collective, alike).amin(dim=0).tolist()
        for name, is_alike in zip(self._parameters, everywhere, strict=True):
            if is_alike and name in foreign:
                own[name].grad.div_(size)  # type: ignore[union-attr]

    def _judge_own(self) -> None:
        """Finds gradients of a replica that trains alone which are not finite."""
        if self._replica.recipe.on_nonfinite == "apply":
            return
        for name, parameter in self.parameters():
            if parameter.grad is not None and not is_finite(parameter.grad):
                self.culprits = [(self._replica.global_rank, self._labels[name])]
                self._note_not_finite()
                return

    def _note_not_finite(self) -> None:
        bad = [each for _, each in self.parameters() if each.grad is not None and not sparse.is_finite(each.grad)]
        self._not_finite |= {id(each): weakref.ref(each) for each in bad}

    def _keep(self) -> None:
        """Ends a pass without a sum: what it gave is LOCAL.

        Where it added to a gradient that is GLOBAL, only replica 0 keeps the global part, so that the
        next sum counts it once.
        """
        own = dict(self.parameters())
        touched = gather_numbers(
            self._replica.collective,
            [name in self._set_aside and _has_gradient(own.get(name)) for name in self._parameters],
        )
        anywhere = dict(zip(self._parameters, touched.amax(dim=0).tolist(), strict=True))
        for name, parameter in own.items():
            before, gradient = self._set_aside.get(name), parameter.grad
            if before is None:
                if gradient is not None:
                    self._local[name] = weakref.ref(gradient)
                continue
            if anywhere[name]:
                if self._replica.global_rank:
                    before.zero_()
                if gradient is not None:
                    before.add_(gradient)
                self._local[name] = weakref.ref(before)
                self._global.pop(name, None)
            parameter.grad = before

    # What all replicas know

    def _refuse_unused(self, gradients: Mapping[int, torch.Tensor]) -> None:
        rows = gather_numbers(self._replica.collective, [name in gradients for name in self._parameters])
        ranks = [rank for rank, counts in enumerate(self._replica.all_counted) if counts]
        for label, column in zip(self._labels.values(), rows.T.tolist(), strict=True):
            having = [rank for rank in ranks if column[rank]]
            missing = [rank for rank in ranks if not column[rank]]
            if having and missing:
                raise StrategyError(
                    f"{label!r} got a gradient on replica {having[0]} but not on {missing[0]}; "
                    f"use unused='zero' if this is meant"
                )

    def _find_culprits(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Which replicas had gradients that are not finite, and where first."""
        bad = [
            number
            for number, name in enumerate(self._parameters, start=1)
            if name in gradients and not sparse.is_finite(gradients[name])
        ]
        firsts = gather_numbers(self._replica.collective, [bad[0] if bad else 0]).flatten().tolist()
        labels = list(self._labels.values())
        found = [(rank, labels[first - 1]) for rank, first in enumerate(firsts) if first]
        self.culprits = found or [(0, "a sum that is too large")]

    # An update

    def are_finite(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether no gradient that would be applied to these parameters is known not to be finite."""
        if not self._not_finite:
            return True
        for key, reference in list(self._not_finite.items()):
            parameter = reference()
            if parameter is None or parameter.grad is None or sparse.is_finite(parameter.grad):
                del self._not_finite[key]
        return not any(id(each) in self._not_finite for each in parameters)

    # Between runs

    def changed_gradients(self) -> dict[int, torch.Tensor | None]:
        """In the controller: what it did to gradients since the last run; most often it dropped them."""
        changed: dict[int, torch.Tensor | None] = {}
        gradients = _gradients_of(dict(self.parameters()))
        names: Iterable[int] = gradients
        if self._are_marked:
            found = {*self._marks.differing(gradients), *(self._transport.written() if self._transport else ())}
            names = [name for name in gradients if name in found] if found else ()
        for name in names:
            gradient = gradients[name]
            if gradient is not None and (name in self._local or self._is(self._spoiled, name, gradient)):
                self._local.pop(name, None)
                changed[name], self._spoiled[name] = None, weakref.ref(gradient)
                continue
            changed[name] = None if gradient is None else gradient.detach()
            self._note_given(name, gradient)
        return changed

    def receive_gradients(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """In a child: takes what the controller did to gradients; they are GLOBAL, since all have the same."""
        own = dict(self.parameters()) if gradients else {}
        for name, gradient in gradients.items():
            own[name].grad = given = None if gradient is None else gradient.to(own[name].device)
            self._note_given(name, given)

    def _note_given(self, name: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            self._local.pop(name, None)
        else:
            self._note_global({name: gradient})

    def note_gradients(self) -> None:
        """In the controller, after a run: all replicas now have the same."""
        now = _gradients_of(dict(self.parameters()))
        gradients = {name: each for name, each in now.items() if each is not None}
        where = addresses(gradients.values())
        watched = self._transport.watch(gradients, where) if self._transport else Watched()
        self._marks.note(gradients, where, gradients.keys() - watched.found, watched.home)
        self._are_marked = True

    def forget_gradients(self) -> None:
        """In the controller, after a run that failed: what others have is not known."""
        self._are_marked = False

    def close(self) -> None:
        """Gradients are the program's own from now on."""
        self._marks.close()


def _dropped() -> None:
    """In the place of a reference to a parameter that is gone."""


def _gradients_of(parameters: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
    return dict(zip(parameters, map(_torch.tensors.gradient_of, parameters.values()), strict=True))


def _has_gradient(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.grad is not None


def _may_be_written(gradient: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a gradient can be overwritten, each element by itself, and nothing of others with it."""
    if gradient.layout != torch.strided or gradient.is_inference():
        return False
    is_expanded = any(size > 1 and not stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    storage = gradient.untyped_storage().data_ptr()
    return not is_expanded and all(
        each.layout != torch.strided or each.untyped_storage().data_ptr() != storage for each in others
    )


def _are_alike(one: torch.Tensor, other: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether two gradients are the same, as far as the type tells as which they travel."""
    if other is None or other.layout != torch.strided or not other.numel():
        return False
    return bool(are_alike(one.to(dtype), other.to(dtype)).all())


def _taken_hooks(own: Mapping[int, torch.Tensor]) -> "dict[int, _torch.gradient_hooks.TensorHooks]":
    """The program's hooks of parameters, taken off: they wait for the sums."""
    there = list(itertools.compress(own, map(any, map(_torch.gradient_hooks.hooks_of, own.values()))))
    if not there:
        return {}
    taken = {name: _torch.gradient_hooks.take_hooks(own[name]) for name in there}
    return {name: hooks for name, hooks in taken.items() if hooks is not None}
