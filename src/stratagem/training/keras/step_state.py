"""What a step of a Keras model changes besides weights: metrics, statistics of layers, counters, seeds.

Each replica has values of its own for the time of a step. Afterwards metrics, which are sums over
examples, are added up; variables of layers are joined as their `aggregation` says (`variables.aggregation`),
statistics by their mean; counters are the same in all. The main program, which is a replica too, keeps what comes out.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem._caller import warn_caller
from stratagem.engine.context import ReplicaContext, current_replica
from stratagem.errors import StratagemWarning
from stratagem.training.keras.changes import innermost, kept_by
from stratagem.training.keras.keras_objects import tensor_of
from stratagem.training.keras.metric_state import AGGREGATIONS
from stratagem.training.keras.step_metrics import own_metrics
from stratagem.variables.aggregation import Aggregation, default_of

_SEED_STRIDE = 1_000_003


@final
class StepState:
    """The variables that one kind of step may change, and this replica's values of them.

    Args:
        model: The Keras model.
        optimizers: Those that the step uses.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any] = ()) -> None:
        self.own_metrics = own_metrics(model)
        by_all = _unique(each for metric in self.own_metrics for each in metric.variables)
        metrics = _unique(model.metrics_variables, but=by_all)
        layers = list(model._flatten_layers())
        self._sums = [each for each in metrics if each.aggregation == "sum"]
        self._seeds = _unique(generator.state for layer in layers for generator in layer._seed_generators)
        kept = [each for layer in layers for each in layer._non_trainable_variables]
        others = _unique([*metrics, *kept], but=[*by_all, *self._sums, *self._seeds])
        self._joined = [(each, _aggregation_of(each)) for each in others]
        self._overwritten = _overwritten(model, optimizers)
        self._joined += [(each, Aggregation.MAX) for each in self._overwritten]
        scalars = [each for optimizer in optimizers for each in kept_by(optimizer) if not each.shape]
        joined_ones = [each for each, _ in self._joined]
        self._same = _unique([*by_all, *others, *scalars], but=[*self._sums, *joined_ones, *self._seeds])
        self._own = {id(each): torch.empty_like(tensor_of(each)).detach() for each in self._all()}
        self._is_settled = False
        self._differs: dict[int, bool] = {}  # integers that nobody has said anything about, by `id`
        self._said: set[int] = set()
        self._everyones: dict[int, torch.Tensor] = {}
        self._is_of_all = False

    @contextlib.contextmanager
    def own_values(self, replica: ReplicaContext) -> Iterator[None]:
        """Inside the block, variables have values of this replica's own; after it, those that all agree on.

        Args:
            replica: Which replica this is.
        """
        variables, has_gradients = self._all(), torch.is_grad_enabled()
        everyones, own = [tensor_of(each) for each in variables], [self._own[id(each)] for each in variables]
        self._everyones = {id(each): tensor for each, tensor in zip(variables, everyones, strict=True)}
        shift = replica.replica_id_in_sync_group * _SEED_STRIDE
        with torch.no_grad():
            _copy(everyones[len(self._sums) :], own[len(self._sums) :])
            self._start(own[: len(self._sums)], shift)
            versions = [_torch.tensors.version_of(self._own[id(each)]) for each, _ in self._joined]
            for variable, mine in zip(variables, own, strict=True):
                variable._value = mine
            for each in self._overwritten:
                mine = self._own[id(each)]
                mine.requires_grad, mine.grad = self._everyones[id(each)].requires_grad, None
            try:
                with torch.set_grad_enabled(has_gradients):
                    yield
            finally:
                for variable, shared in zip(variables, everyones, strict=True):
                    variable._value = shared
            for each in self._seeds:
                self._own[id(each)].view(-1)[:1] -= shift
            if self._joined:
                self._join(replica, versions)

    @contextlib.contextmanager
    def of_all(self, replica: ReplicaContext, variables: Sequence[Any]) -> Iterator[None]:
        """Inside the block, in a step, sums have the values of all replicas; every one must come here.

        Args:
            replica: Which replica this is.
            variables: Of metrics.
        """
        asked = {id(each) for each in variables}
        sums = [each for each in self._sums if id(each) in asked] if not self._is_of_all else []
        if not sums:
            yield
            return
        with torch.no_grad():
            own = torch.cat([self._own[id(each)].flatten().double() for each in sums])
            parts = torch.split(replica.all_reduce("sum", own), [tensor_of(each).numel() for each in sums])
            for each, part in zip(sums, parts, strict=True):
                before = self._everyones[id(each)]
                each._value = (before + part.view(before.shape)).to(before.dtype)
        self._is_of_all = True
        try:
            yield
        finally:
            self._is_of_all = False
            for each in sums:
                each._value = self._own[id(each)]

    def sums(self, replica: ReplicaContext) -> torch.Tensor | None:
        """What this replica adds to the metrics, in one vector; nothing if it had only a stand-in for examples.

        After that, which of the integers it has otherwise than the first replica.
        """
        if not self._sums and not self._differs:
            return None
        sums = [self._own[id(each)].flatten().double() for each in self._sums]
        device = sums[0].device if sums else None
        differs = torch.tensor(list(self._differs.values()), dtype=torch.float64, device=device)
        total = torch.cat([*sums, differs])
        return total if replica.num_examples else torch.zeros_like(total)

    @torch.no_grad()
    def keep(self, sums: torch.Tensor | None, is_written: Callable[[Any], bool] = lambda _: True) -> None:
        """In the main program, after a run: gives the variables what came out.

        Args:
            sums: What all replicas add to the metrics.
            is_written: Tells which of them.
        """
        if sums is not None:
            totals = [tensor_of(each) for each in self._sums]
            *parts, differ = torch.split(sums, [*(each.numel() for each in totals), len(self._differs)])
            for each, total, part in zip(self._sums, totals, parts, strict=True):
                if is_written(each):
                    total.add_(part.view(total.shape).to(total))
            self._say({key for key, number in zip(self._differs, differ.tolist(), strict=True) if number})
        others = [*(each for each, _ in self._joined), *self._seeds, *self._same]
        chosen = [each for each in others if is_written(each)]
        _copy([self._own[id(each)] for each in chosen], [tensor_of(each) for each in chosen])

    def keep_in_replicas(self, replica: ReplicaContext, sums: torch.Tensor | None) -> None:
        """In a step: the same, in all replicas; every one must come here.

        Args:
            replica: This one.
            sums: What it adds to the metrics.
        """

        def is_written(variable: Any) -> bool:
            return replica.writes(tensor_of(variable), adds_up=variable.aggregation == "sum")

        self.keep(None if sums is None else replica.all_reduce("sum", sums), is_written)
        replica.publish_written()
        replica.note_agreed([tensor_of(each) for each in self._all()])

    def _all(self) -> list[Any]:
        return [*self._sums, *(each for each, _ in self._joined), *self._seeds, *self._same]

    def _start(self, sums: list[torch.Tensor], shift: int) -> None:
        """Metrics begin at nothing; random numbers differ from those of other replicas."""
        if sums:
            _torch.tensors.foreach_zero_(sums)
        for each in self._seeds:
            self._own[id(each)].view(-1)[:1] += shift

    def _join(self, replica: ReplicaContext, versions: Sequence[int]) -> None:
        """Makes this replica's values those of all; what nobody changes in the first step is left alone afterwards."""
        if not self._is_settled:
            self._settle(replica, versions)
        groups: dict[Any, list[Any]] = {}
        for each, how in self._joined:
            groups.setdefault((how, each.dtype), []).append(each)
        for (how, _), variables in groups.items():
            before = torch.cat([tensor_of(each).flatten() for each in variables])
            own = torch.cat([self._own[id(each)].flatten() for each in variables])
            total = replica.joined(how, before, own)
            sizes = [tensor_of(each).numel() for each in variables]
            parts = zip(variables, torch.split(own, sizes), torch.split(total, sizes), strict=True)
            for each, mine, everyones in parts:
                if id(each) in self._differs:
                    self._differs[id(each)] = bool((mine != everyones).any())
                self._own[id(each)].copy_(everyones.view(tensor_of(each).shape))

    def _settle(self, replica: ReplicaContext, versions: Sequence[int]) -> None:
        """Finds out, with the other replicas, which variables steps change."""
        self._is_settled = True
        pairs = zip(self._joined, versions, strict=True)
        now = _torch.tensors.version_of
        written = torch.tensor([now(self._own[id(each)]) != version for (each, _), version in pairs])
        is_any = replica.all_reduce("max", written.double()).tolist()
        left = [each for (each, _), changes in zip(self._joined, is_any, strict=True) if not changes]
        self._joined = [pair for pair, changes in zip(self._joined, is_any, strict=True) if changes]
        self._same += [each for each in left if not _is_float(each)]
        self._overwritten = [each for each in self._overwritten if all(each is not other for other in left)]
        self._own = {id(each): self._own[id(each)] for each in self._all()}
        self._differs = {id(each): False for each, how in self._joined if _is_unsaid(each, how)}

    def _say(self, differing: set[int]) -> None:
        """Tells once of integers that replicas have changed differently."""
        if (replica := current_replica()) is not None and not replica.is_in_main_program:
            return
        for each, _ in self._joined:
            if id(each) in differing - self._said:
                self._said.add(id(each))
                warn_caller(
                    f"replicas gave {each.path!r}, an integer variable of a layer, different values in a step; the "
                    f"value of the first replica is kept. If the variable counts something, make it with "
                    f"add_weight(..., "
                    f"aggregation='sum'), otherwise with aggregation='only_first_replica'",
                    StratagemWarning,
                )


def _aggregation_of(variable: Any) -> Aggregation:
    """How a variable that is no weight is joined."""
    return AGGREGATIONS.get(variable.aggregation, default_of(tensor_of(variable).dtype))


def _is_unsaid(variable: Any, how: Aggregation) -> bool:
    return how is Aggregation.FIRST and variable.aggregation not in AGGREGATIONS


def _overwritten(model: Any, optimizers: Sequence[Any]) -> list[Any]:
    """Variables whose gradients take their place, as scales and histories of float8, and what adds such up.

    No replica's gradient is a part of a sum: scales are the same in all, of histories the largest counts.
    """
    inner = [each for optimizer in optimizers for each in innermost(optimizer)]
    pairs = [
        pair
        for each in inner
        for pair in zip(each._trainable_variables, getattr(each, "_accumulated_gradients", ()), strict=False)
    ]
    variables = [each for each in model.trainable_variables if each.overwrite_with_gradient] if optimizers else []
    sums = [total for each, total in pairs if total is not None and each.overwrite_with_gradient]
    return _unique([*variables, *sums])


def _unique(variables: Any, but: Sequence[Any] = ()) -> list[Any]:
    known = {id(each) for each in but}
    return [each for number, each in {id(each): each for each in variables}.items() if number not in known]


def _copy(values: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if tensors:
        _torch.tensors.foreach_copy_(tensors, values)


def _is_float(variable: Any) -> bool:
    return tensor_of(variable).is_floating_point()
