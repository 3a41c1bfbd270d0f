"""One step of a Keras model in a replica: its slice of the global batch in, everyone's metrics out.

Gradients are exchanged by `loss.backward()` as in every step. What Keras sums up besides is made
everyone's here: metrics are sums over examples, so their changes add up; the statistics of
normalisation layers become the mean of what the replicas made of them, weighted by their examples.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from stratagem.strategies.context import current_runs, get_replica_context
from stratagem.training import keras_norm, keras_updates
from stratagem.training.keras_wire import tensor_of

_SEED_STRIDE = 1_000_003

keras_norm.connect()


@final
class Compiled(torch.nn.Module):
    """A Keras model with what `compile` gave it, as a distributed object.

    A model can be compiled anew after the replicas have got it, or make variables later; they then get a new
    one of these.

    Args:
        model: The Keras model.
        variables: All that it has.
    """

    model: Any
    parts: dict[str, Any]
    variables: list[Any]

    NAMES = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")

    def __init__(self, model: Any, variables: Sequence[Any]) -> None:
        super().__init__()
        # Past torch's own attributes: no part is to be found twice.
        self.__dict__["model"] = model
        self.__dict__["parts"] = {name: getattr(model, name, None) for name in self.NAMES}
        self.__dict__["variables"] = list(variables)

    def is_current(self, variables: Sequence[Any]) -> bool:
        """Whether the model still has these parts, and these variables."""
        return (
            all(getattr(self.model, name, None) is part for name, part in self.parts.items())
            and len(variables) == len(self.variables)
            and all(one is other for one, other in zip(variables, self.variables, strict=True))
        )

    def install(self) -> Any:
        """The model, with these parts."""
        for name, part in self.parts.items():
            if getattr(self.model, name, None) is not part:
                self.model.__dict__[name] = part
        keras_updates.take_over(self.parts["optimizer"])
        return self.model


def variables_of(model: Any) -> list[Any]:
    """All variables of a model: weights, and what its metrics and its optimizer keep."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *model.metrics_variables, *(optimizer.variables if optimizer is not None else ())]
    return list({id(each): each for each in found}.values())


def train_step(compiled: Compiled, data: Any) -> Any:
    """Trains on this replica's slice; the model's own `train_step` does the work."""
    model = compiled.install()
    with _shared_state(model, data), _something(data) as batch:
        logs = model.train_step(batch)
    _publish()
    return _final_logs(model, logs)


def test_step(compiled: Compiled, data: Any) -> Any:
    """Evaluates this replica's slice."""
    model = compiled.install()
    with torch.no_grad(), _shared_state(model, data), _something(data) as batch:
        logs = model.test_step(batch)
    _publish()
    return _final_logs(model, logs)


def predict_step(compiled: Compiled, data: Any) -> Any:
    """The predictions for this replica's slice."""
    model = compiled.install()
    with torch.no_grad(), _something(data) as batch:
        outputs = model.predict_step(batch)
    return outputs if _num_examples(data) else pytree.tree_map(lambda each: each[:0], outputs)


def _publish() -> None:
    """Makes what is the same in all replicas now (metrics, counters) everyone's, while all are here."""
    if current_runs and current_runs[-1].settings.size > 1:
        current_runs[-1].publish_written()


def _final_logs(model: Any, logs: Any) -> Any:
    """What a step tells: the metrics as they are for all replicas, and the rest as the step gave it."""
    final = {**logs, **{name: value for name, value in model.get_metrics_result().items() if name in logs}}
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in final.items()}


@contextlib.contextmanager
def _shared_state(model: Any, data: Any) -> Iterator[None]:
    """Lets a step change metrics and statistics on its own, and then makes the changes everyone's."""
    context = get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        yield
        return
    rank, num_examples, has_gradients = context.replica_id_in_sync_group, _num_examples(data), torch.is_grad_enabled()
    metrics = list(model.metrics_variables)
    known = {id(each) for each in metrics}
    others = [each for each in model.non_trainable_variables if id(each) not in known]
    statistics = [each for each in others if tensor_of(each).is_floating_point()]
    seeds = [each for each in others if not tensor_of(each).is_floating_point()]
    with _own_values((*metrics, *statistics, *seeds)) as everyones, torch.no_grad():
        for each in metrics:
            tensor_of(each).zero_()
        for each in seeds:
            tensor_of(each).view(-1)[:1] += rank * _SEED_STRIDE
        with torch.set_grad_enabled(has_gradients):
            yield
        for each, tensor in zip(seeds, everyones[len(metrics) + len(statistics) :], strict=True):
            tensor.copy_(tensor_of(each)).view(-1)[:1] -= rank * _SEED_STRIDE
        totals, means = everyones[: len(metrics)], everyones[len(metrics) : len(metrics) + len(statistics)]
        changes = [tensor_of(each).double() for each in metrics]
        changes += [(tensor_of(now).double() - old) * num_examples for now, old in zip(statistics, means, strict=True)]
        changes.append(torch.tensor(float(num_examples), dtype=torch.float64))
        if not num_examples:  # then the means of nothing count for nothing, whatever they are
            changes = [torch.zeros_like(each) for each in changes]
        *changes, num_all = _summed(changes)
        for tensor, change in zip(totals, changes, strict=False):
            tensor.copy_(tensor + change)
        for tensor, change in zip(means, changes[len(metrics) :], strict=True):
            tensor.copy_(tensor + change / num_all)


@contextlib.contextmanager
def _own_values(variables: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Gives variables values of this replica's own for the time of a step; yields the tensors of all."""
    everyones = [tensor_of(each) for each in variables]
    for variable, tensor in zip(variables, everyones, strict=True):
        variable._value = torch.nn.Parameter(tensor.detach().clone(), requires_grad=False)
    try:
        yield everyones
    finally:
        for variable, tensor in zip(variables, everyones, strict=True):
            variable._value = tensor


def _summed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sums over all replicas, exchanged in one go."""
    context = get_replica_context()
    flat = torch.cat([each.flatten() for each in tensors])
    total = flat if context is None else context.all_reduce("sum", flat)
    parts = torch.split(total, [each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


@contextlib.contextmanager
def _something(data: Any) -> Iterator[Any]:
    """The slice, or one example of zeros where it is empty: Keras cannot do without. It counts for nothing."""
    if _num_examples(data):
        yield data
    else:
        with keras_norm.uncounted():
            yield pytree.tree_map_only(torch.Tensor, lambda each: each.new_zeros((1, *each.shape[1:])), data)


def _num_examples(data: Any) -> int:
    return next(len(leaf) for leaf in pytree.tree_leaves(data) if isinstance(leaf, torch.Tensor) and leaf.dim())
