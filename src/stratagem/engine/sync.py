"""When replicas agree, and on what.

A plan (`SumGradients`, `AverageWeights`) is a value that a strategy chooses and every replica is sent;
`start` makes of it what one replica does: the weight of its loss, what happens around a backward pass
and before an update, and what all do together at the end of a step.
"""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, final

import torch

from stratagem.objects.tracking import untracked
from stratagem.variables.copies import Copies
from stratagem.variables.participant import Participant

_CHUNK_BYTES = 25 * 2**20


class Syncing(Participant, Protocol):
    """One replica, as its sync sees it."""

    @property
    def copies(self) -> Copies: ...

    @property
    def share(self) -> float:
        """This replica's part of the examples of the step."""

    @property
    def has_examples(self) -> bool:
        """Whether it has any of them, or a stand-in that counts for nothing."""

    @property
    def num_examples(self) -> float:
        """How many examples of the step it has; 1 if nobody knows."""

    @property
    def syncs(self) -> bool:
        """Whether replicas that train alone agree at the end of the step."""

    @property
    def meets(self) -> bool:
        """Whether replicas of all machines come together in the step, whatever else they do."""

    @property
    def stepped(self) -> bool:
        """Whether the step trains; the same in all replicas."""

    @property
    def skipped(self) -> bool:
        """Whether an update was left out because of gradients that are not finite."""

    def note_step(self) -> None:
        """Counts the step as one that trains."""


class Sync(ABC):
    """What one replica does so that all agree."""

    def __init__(self, replica: Syncing) -> None:
        self._replica = replica

    @property
    @abstractmethod
    def weight(self) -> float:
        """By which the loss of this replica counts in a backward pass."""

    @property
    def weight_of_update(self) -> float:
        """By which what this replica makes of its gradients counts."""
        return 1.0

    @property
    def is_mean(self) -> bool:
        """Whether the weights of all replicas are parts of one."""
        return False

    @abstractmethod
    def weigh(self, number: float) -> float:
        """The weight of a replica whose part of the global batch is a number; every one must come here."""

    @abstractmethod
    def end_step(self) -> bool:
        """At the end of a step: brings replicas to one state.

        Returns:
            Whether this replica has still to publish what it wrote, in a meeting of all.
        """

    def agree(self) -> None:  # noqa: B027  # most always do
        """Brings all replicas to one state now; every one must come here."""

    def take_written(self, names: Iterable[int]) -> None:  # noqa: B027  # most keep nothing
        """What the main program wrote to these parameters is what all replicas agree on now."""

    def forget(self) -> None:  # noqa: B027  # most keep nothing
        """After a call that failed: all replicas begin anew from what the main program has."""

    def begin_pass(self, *, syncing: bool, graph: bool = False, counts: bool = True) -> bool:
        """Prepares a backward pass.

        Args:
            syncing: Whether its gradients are to be exchanged.
            graph: Whether they will be differentiated themselves.
            counts: Whether this replica adds anything.
        Returns:
            Whether they will be exchanged.
        """
        return self._replica.copies.ledger.begin_pass(syncing=syncing, graph=graph, counts=counts)

    def end_pass(self, *, syncing: bool, graph: bool = False) -> None:
        """Makes `.grad` what it must be when the pass returns."""
        ledger = self._replica.copies.ledger
        if graph:
            ledger.end_pass_with_graph()
        else:
            ledger.end_pass(syncing=syncing)

    def abandon_pass(self) -> None:
        """Cleans up after a pass that has failed."""
        self._replica.copies.ledger.abandon_pass()

    def before_update(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the gradients of these parameters are fit to be applied."""
        return self._replica.copies.ledger.are_finite(parameters)


class SyncPlan(Protocol):
    """When replicas agree, as a strategy chooses it."""

    @property
    def lets_differ(self) -> bool:
        """Whether replicas may differ after a step."""

    def agrees(self, num_alone: int) -> bool:
        """Whether replicas agree at the end of a step before which they have trained alone for so many.

        The same in all replicas.
        """

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are exchanged in a backward pass; else every replica trains on its own."""

    def start(self, replica: Syncing) -> Sync:
        """What one replica does for it."""


@final
@dataclasses.dataclass(frozen=True)
class SumGradients:
    """Replicas agree in every backward pass: they sum their gradients.

    Args:
        mean: Whether each replica's loss counts by its part of the global batch; else all count fully.
    """

    mean: bool = True
    lets_differ: bool = dataclasses.field(default=False, init=False)
    sums_gradients: bool = dataclasses.field(default=True, init=False)

    def agrees(self, num_alone: int) -> bool:
        return True

    def start(self, replica: Syncing) -> Sync:
        return _Summing(replica, self.mean)


@final
class _Summing(Sync):
    def __init__(self, replica: Syncing, mean: bool) -> None:
        super().__init__(replica)
        self._mean = mean

    @property
    def weight(self) -> float:
        return self._replica.share if self._mean else 1.0

    @property
    def is_mean(self) -> bool:
        return self._mean

    def weigh(self, number: float) -> float:
        total = float(self._replica.collective.all_reduce(torch.tensor([number], dtype=torch.float64)))
        return number / total if total else 0.0

    def end_step(self) -> bool:
        return self._replica.copies.settle(self._replica.share)


# Makes an optimizer of parameters: `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`.
OuterOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


@final
@dataclasses.dataclass(frozen=True)
class AverageWeights:
    """Replicas train alone and agree on their weights after some steps.

    Args:
        every: After how many steps.
        outer: Makes the optimizer that takes the mean of their changes as its gradient (DiLoCo); `None` if they
            take the mean of their weights.
    """

    every: int
    outer: OuterOptimizer | None = None
    sums_gradients: bool = dataclasses.field(default=False, init=False)

    @property
    def lets_differ(self) -> bool:
        return self.every > 1

    def agrees(self, num_alone: int) -> bool:
        return num_alone + 1 >= self.every

    def start(self, replica: Syncing) -> Sync:
        return _Averaging(replica, self)


@final
class _Averaging(Sync):
    """Keeps the weights that all last agreed on; what is exchanged is how far each replica has come from them."""

    def __init__(self, replica: Syncing, plan: AverageWeights) -> None:
        super().__init__(replica)
        self._plan = plan
        self._agreed: dict[int, torch.Tensor] = {}
        self._outer: torch.optim.Optimizer | None = None
        self._num_examples = 0.0
        self._weighed: float | None = None

    @property
    def weight(self) -> float:
        """Each replica trains on its own rows; how many they are counts in the mean of the weights."""
        return 1.0

    @property
    def weight_of_update(self) -> float:
        return self._replica.share

    def weigh(self, number: float) -> float:
        self._weighed = number
        return 1.0

    def begin_pass(self, *, syncing: bool, graph: bool = False, counts: bool = True) -> bool:
        self._note_agreed()
        self._replica.note_step()  # whether an optimizer or the program itself then changes the weights
        return super().begin_pass(syncing=syncing, graph=graph, counts=counts)

    def end_step(self) -> bool:
        replica = self._replica
        if replica.stepped and not replica.skipped:
            self._num_examples += replica.num_examples if self._weighed is None else self._weighed
        self._weighed = None
        if not replica.has_examples:
            replica.copies.take_back_buffers()
        if replica.meets:
            replica.copies.join_counters()
        if replica.syncs and replica.stepped:
            self.agree()
        else:
            replica.copies.keep_own()
        return False

    def agree(self) -> None:
        replica = self._replica
        replica.copies.join_counters()
        total = float(replica.collective.all_reduce(torch.tensor([self._num_examples], dtype=torch.float64)))
        if total:
            share = self._num_examples / total
            self._agree(share)
            replica.copies.settle(share, all_buffers=True)
        else:
            replica.copies.keep_own()
        self._num_examples = 0.0

    def before_update(self, parameters: Iterable[torch.Tensor]) -> bool:
        self._note_agreed()  # gradients need not come from a backward pass
        return super().before_update(parameters)

    def take_written(self, names: Iterable[int]) -> None:
        own = dict(self._replica.copies.ledger.parameters())
        for name in names:
            if name in self._agreed and name in own:
                self._agreed[name].copy_(own[name].detach())

    def forget(self) -> None:
        self._agreed, self._outer, self._num_examples = {}, None, 0.0

    def _note_agreed(self) -> None:
        """Keeps the weights of parameters that are new, before anything is updated: all have the same."""
        ledger = self._replica.copies.ledger
        known = {name: each for name, each in self._agreed.items() if name in ledger}
        # Counters, of which there is no mean, all replicas count alike.
        new = {name: each for name, each in ledger.parameters() if name not in known and _has_mean(each)}
        if not new and len(known) == len(self._agreed):
            return
        added = {name: each.detach().clone() for name, each in new.items()}
        self._agreed = known | added
        trained = [added[name] for name, each in new.items() if each.requires_grad]
        if self._outer is not None and trained:
            self._outer.add_param_group({"params": trained})
        elif self._plan.outer is not None and trained:
            with untracked():  # it is this replica's own, also where the program runs steps inside a scope
                self._outer = self._plan.outer(trained)

    @torch.no_grad()
    def _agree(self, share: float) -> None:
        own = dict(self._replica.copies.ledger.parameters())
        groups = self._outer.param_groups if self._outer is not None else []
        by_outer = {id(each) for group in groups for each in group["params"]}
        for names in _chunks(self._agreed):
            agreed = [self._agreed[name] for name in names]
            # One that the program has dropped here, and not yet elsewhere, has not moved; nor has a replica without
            # examples, whose weights may be no numbers at all.
            moved = [
                own[name].detach() - each if share and name in own else torch.zeros_like(each)
                for name, each in zip(names, agreed, strict=True)
            ]
            mean = self._replica.collective.all_reduce(torch.cat([_flat(each) for each in moved]).mul_(share))
            parts = torch.split(mean, [_flat(each).numel() for each in agreed])
            for each, part in zip(agreed, parts, strict=True):
                change = torch.view_as_complex(part.view(-1, 2)) if each.is_complex() else part
                if id(each) in by_outer:
                    each.grad = change.view(each.shape).neg()
                else:
                    each.add_(change.view(each.shape))
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()
        for name, each in self._agreed.items():
            if name in own:
                own[name].copy_(each)


def _has_mean(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The real numbers of a tensor, one after the other."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _chunks(parameters: dict[int, torch.Tensor]) -> Iterator[list[int]]:
    """Names of parameters that are exchanged together: of one type, and not too much at a time."""
    kinds = {(each.dtype, each.device) for each in parameters.values()}
    for kind in sorted(kinds, key=str):
        sizes = {name: each.nbytes for name, each in parameters.items() if (each.dtype, each.device) == kind}
        ends = list(itertools.accumulate(sizes.values()))
        for _, group in itertools.groupby(zip(sizes, ends, strict=True), key=lambda pair: pair[1] // _CHUNK_BYTES):
            yield [name for name, _ in group]
