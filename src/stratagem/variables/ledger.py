"""Knows of every gradient whose it is, and makes it that of the global batch.

A gradient is LOCAL (this replica's own, already weighted: what passes inside `no_sync` left) or
GLOBAL (summed over the replicas, and so the same in all). `begin_pass` moves gradients out of the way
that must not be mixed with those of the pass; `end_pass` sums what the pass gave over the replicas
and adds what was there before. Parameters that no replica used keep no gradient; what a replica
without examples computes counts for nothing.

How sums travel is up to a `Transport`: windows of shared memory, or buckets of torch.distributed.
Without one every replica trains alone, and all gradients are LOCAL.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, final

import torch

from stratagem import _torch
from stratagem.collectives.collective import Collective, is_finite
from stratagem.errors import StrategyError
from stratagem.variables.participant import Participant


class Summed(NamedTuple):
    """What came of a sum: whose gradients any replica had, and whether all of them are finite."""

    present: Set[int]
    is_finite: bool


class Transport(Protocol):
    """How gradients are summed over the replicas."""

    def begin(self, *, syncing: bool, counts: bool) -> None:
        """Prepares a pass.

        Args:
            syncing: Whether its gradients will be summed.
            counts: Whether what this replica computes in it counts.
        """

    def sum(self, gradients: Mapping[int, torch.Tensor]) -> Summed:
        """Sums this replica's own gradients, by name, with those of the others; every replica must come here."""

    def total(self, name: int) -> torch.Tensor:
        """The sum of one gradient, formed like its parameter, as a tensor of its own."""

    def end(self) -> None:
        """The sums have been given out."""

    def abandon(self) -> None:
        """Cleans up after a pass that has failed."""


def gather_numbers(collective: Collective, numbers: Sequence[int]) -> torch.Tensor:
    """The small numbers of all replicas, a row for each."""
    return torch.stack(collective.all_gather(torch.tensor(numbers, dtype=torch.int64)))


def mark(tensor: torch.Tensor | None) -> Any:
    """Differs when a tensor has been replaced or written to."""
    if tensor is None:
        return ()
    address = tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
    return address, _torch.version_of(tensor)


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
        self._local: set[int] = set()
        # Of the pass under way: GLOBAL gradients of passes before it, and LOCAL ones where it does not count.
        self._set_aside: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._counts = True
        # What gradients were after the last run, in the controller.
        self._marks: dict[int, Any] = {}
        # Parameters whose sums were not finite, and whose fault that was; the same in every replica.
        self._not_finite: dict[int, weakref.ref[torch.Tensor]] = {}
        self.culprits: list[tuple[int, str]] = []

    # Parameters

    def add(self, parameters: Mapping[int, torch.Tensor | None], labels: Mapping[int, str]) -> None:
        """Takes parameters by name, in the order of their making; `None` for those that the program has dropped."""
        for name, parameter in parameters.items():
            self._parameters[name] = _dropped if parameter is None else weakref.ref(parameter)
            self._labels[name] = labels[name]

    def drop(self, names: Set[int]) -> None:
        """Lets go of parameters."""
        for name in names & self._parameters.keys():
            del self._parameters[name], self._labels[name]
            self._marks.pop(name, None)
        self._local -= names

    def __contains__(self, name: int) -> bool:
        """Whether it has a parameter, though the program may have dropped it just now."""
        return name in self._parameters

    def parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The parameters that still exist, by name."""
        for name, reference in self._parameters.items():
            if (parameter := reference()) is not None:
                yield name, parameter

    # A backward pass

    def begin_pass(self, *, syncing: bool) -> None:
        """Moves gradients out of the way that must not be mixed with those of the pass."""
        self._counts = counts = self._replica.counted[self._replica.rank]
        if self._transport is not None:
            self._transport.begin(syncing=syncing, counts=counts)
        local = self._local if self._transport is not None else self._parameters.keys()
        self._set_aside, self._hidden = {}, {}
        for name, parameter in self.parameters():
            gradient = parameter.grad
            if gradient is None:
                self._local.discard(name)
            elif name not in local:
                self._set_aside[name], parameter.grad = gradient, None
            elif not counts:
                self._hidden[name], parameter.grad = gradient, None

    @torch.no_grad()
    def end_pass(self, *, syncing: bool) -> None:
        """Makes `.grad` what it must be when the pass returns; every replica must come here."""
        if not self._counts:
            for name, parameter in self.parameters():
                parameter.grad = self._hidden.get(name)
        if self._transport is None:
            self._judge_own()
        elif syncing:
            self._sum(self._transport)
        else:
            self._keep()
        self._set_aside, self._hidden = {}, {}

    def abandon_pass(self) -> None:
        """Puts gradients back after a pass that has failed."""
        for name, parameter in self.parameters():
            if (self._transport is not None and name not in self._local) or name in self._hidden:
                parameter.grad = self._set_aside.get(name, self._hidden.get(name))
        self._set_aside, self._hidden = {}, {}
        if self._transport is not None:
            self._transport.abandon()

    def _sum(self, transport: Transport) -> None:
        """Gives every replica the sums, with the gradients that were there before."""
        gradients = {name: each.grad for name, each in self.parameters() if each.grad is not None}
        present, all_finite = transport.sum(gradients)
        if self._replica.recipe.unused == "error":
            self._refuse_unused(gradients)
        if not all_finite:
            self._find_culprits(gradients)
        total, set_aside = transport.total, self._set_aside
        for name, parameter in self.parameters():
            before = set_aside.get(name)
            if name in present:
                parameter.grad = total(name) if before is None else before.add_(total(name))
            elif before is not None:
                parameter.grad = before
        self._local -= present
        transport.end()
        if not all_finite:
            self._note_not_finite()

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
        bad = [each for _, each in self.parameters() if each.grad is not None and not each.grad.isfinite().all()]
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
                    self._local.add(name)
                continue
            if anywhere[name]:
                self._local.add(name)
                if self._replica.global_rank:
                    before.zero_()
                if gradient is not None:
                    before.add_(gradient)
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
            if name in gradients and not gradients[name].isfinite().all()
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
            if parameter is None or parameter.grad is None or bool(parameter.grad.isfinite().all()):
                del self._not_finite[key]
        return not any(id(each) in self._not_finite for each in parameters)

    # Between runs

    def changed_gradients(self) -> dict[int, torch.Tensor | None]:
        """In the controller: what it did to gradients since the last run; most often it dropped them."""
        changed: dict[int, torch.Tensor | None] = {}
        for name, parameter in self.parameters():
            gradient = parameter.grad
            if mark(gradient) != self._marks.get(name, ()) and not _is_sparse(gradient):
                changed[name] = None if gradient is None else gradient.detach()
        self._local.difference_update(changed)
        return changed

    def receive_gradients(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """In a child: takes what the controller did to gradients; they are GLOBAL, since all have the same."""
        own = dict(self.parameters()) if gradients else {}
        for name, gradient in gradients.items():
            own[name].grad = None if gradient is None else gradient.to(own[name].device)
        self._local.difference_update(gradients)

    def note_gradients(self) -> None:
        """In the controller, after a run: all replicas now have the same."""
        self._marks = {name: mark(each.grad) for name, each in self.parameters() if each.grad is not None}

    def forget_gradients(self) -> None:
        """In the controller, after a run that failed: what others have is not known."""
        self._marks = dict.fromkeys(self._parameters, None)


def _dropped() -> None:
    """In the place of a reference to a parameter that is gone."""


def _has_gradient(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.grad is not None


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    """Whether it is of the kind that no sum takes: the next pass says so."""
    return gradient is not None and gradient.layout != torch.strided
