"""What a step of a Keras model changes besides weights: metrics, statistics of layers, counters, seeds.

Each replica has values of its own for the time of a step. Afterwards metrics, which are sums over
examples, are added up; statistics become the mean of what the replicas made of them, weighted by their
examples; counters are the same in all. The main program, which is a replica too, keeps what comes out.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.engine.context import ReplicaContext
from stratagem.training.keras.changes import kept_by
from stratagem.training.keras.keras_objects import tensor_of
from stratagem.training.keras.own_metrics import own_metrics

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
        others = _unique([each for layer in layers for each in layer._non_trainable_variables], but=[*metrics, *by_all])
        self._sums = [each for each in metrics if each.aggregation == "sum"]
        means = [each for each in metrics if each.aggregation == "mean"] + [each for each in others if _is_float(each)]
        self._means = means
        self._seeds = _unique(generator.state for layer in layers for generator in layer._seed_generators)
        scalars = [each for optimizer in optimizers for each in kept_by(optimizer) if not each.shape]
        self._same = _unique([*metrics, *by_all, *others, *scalars], but=[*self._sums, *means, *self._seeds])
        self._own = {id(each): torch.empty_like(tensor_of(each)).detach() for each in self._all()}
        self._is_settled = False
        self._model = model

    @functools.cached_property
    def metric_names(self) -> dict[str, None]:
        """What the logs of metrics are called, in order."""
        return dict.fromkeys(self._model.get_metrics_result())

    @contextlib.contextmanager
    def own_values(self, replica: ReplicaContext, num_examples: int) -> Iterator[None]:
        """Inside the block, variables have values of this replica's own; after it, those that all agree on.

        Args:
            replica: Which replica this is.
            num_examples: How many of the global batch it has.
        """
        variables, has_gradients = self._all(), torch.is_grad_enabled()
        everyones, own = [tensor_of(each) for each in variables], [self._own[id(each)] for each in variables]
        shift = replica.replica_id_in_sync_group * _SEED_STRIDE
        with torch.no_grad():
            _copy(everyones[len(self._sums) :], own[len(self._sums) :])
            self._start(own[: len(self._sums)], shift)
            versions = [_torch.version_of(self._own[id(each)]) for each in self._means]
            for variable, mine in zip(variables, own, strict=True):
                variable._value = mine
            try:
                with torch.set_grad_enabled(has_gradients):
                    yield
            finally:
                for variable, shared in zip(variables, everyones, strict=True):
                    variable._value = shared
            for each in self._seeds:
                self._own[id(each)].view(-1)[:1] -= shift
            if self._means:
                self._average(replica, num_examples, versions)

    def sums(self, num_examples: int) -> torch.Tensor | None:
        """What this replica adds to the metrics, in one vector; nothing if it had only a stand-in for examples."""
        if not self._sums:
            return None
        total = torch.cat([self._own[id(each)].flatten().double() for each in self._sums])
        return total if num_examples else torch.zeros_like(total)

    @torch.no_grad()
    def keep(self, sums: torch.Tensor | None) -> None:
        """In the main program, after a run: gives the variables what came out.

        Args:
            sums: What all replicas add to the metrics.
        """
        if sums is not None:
            totals = [tensor_of(each) for each in self._sums]
            parts = torch.split(sums, [each.numel() for each in totals])
            for total, part in zip(totals, parts, strict=True):
                total.add_(part.view(total.shape).to(total))
        others = [*self._means, *self._seeds, *self._same]
        _copy([self._own[id(each)] for each in others], [tensor_of(each) for each in others])

    def _all(self) -> list[Any]:
        return [*self._sums, *self._means, *self._seeds, *self._same]

    def _start(self, sums: list[torch.Tensor], shift: int) -> None:
        """Metrics begin at nothing; random numbers differ from those of other replicas."""
        if sums:
            _torch.foreach_zero_(sums)
        for each in self._seeds:
            self._own[id(each)].view(-1)[:1] += shift

    def _average(self, replica: ReplicaContext, num_examples: int, versions: Sequence[int]) -> None:
        """Makes this replica's statistics the mean over all; those that never change are left alone after a step."""
        pairs = [(tensor_of(each), self._own[id(each)]) for each in self._means]
        # What is not finite and stays so has not changed. Whoever has no examples counts for nothing.
        changes = [(own.double() - old).masked_fill_(own == old, 0.0).flatten() * num_examples for old, own in pairs]
        written = [float(_torch.version_of(own) != version) for (_, own), version in zip(pairs, versions, strict=True)]
        news = torch.tensor([float(num_examples), *written], dtype=torch.float64, device=changes[0].device)
        flat = torch.cat([*(changes if num_examples else map(torch.zeros_like, changes)), news])
        total = replica.all_reduce("sum", flat)
        *totals, num_all, counts = torch.split(total, [*(own.numel() for _, own in pairs), 1, len(pairs)])
        for (old, own), change in zip(pairs, totals, strict=True):
            own.copy_(old + (change / num_all).view(old.shape))
        if not self._is_settled:
            self._is_settled = True
            self._means = [each for each, count in zip(self._means, counts.tolist(), strict=True) if count]
            self._own = {id(each): self._own[id(each)] for each in self._all()}


def _unique(variables: Any, but: Sequence[Any] = ()) -> list[Any]:
    known = {id(each) for each in but}
    return [each for number, each in {id(each): each for each in variables}.items() if number not in known]


def _copy(values: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    if tensors:
        _torch.foreach_copy_(tensors, values)


def _is_float(variable: Any) -> bool:
    return tensor_of(variable).is_floating_point()
