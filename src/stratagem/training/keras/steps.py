"""One step of a Keras model in a replica: its slice of the global batch in, what it adds to the metrics out.

Gradients are exchanged by `loss.backward()` as in every step; what else a step changes is `step_state`'s.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from keras.src.backend.torch.trainer import TorchTrainer

from stratagem import _tree
from stratagem.engine.context import current_runs, get_replica_context
from stratagem.training.keras import loss_reductions, own_metrics, split_updates, synchronized_norm
from stratagem.training.keras.changes import Members, Settings, optimizers_in
from stratagem.training.keras.step_state import StepState

synchronized_norm.connect()
loss_reductions.connect()


@final
class Compiled(torch.nn.Module):
    """A Keras model with what `compile` gave it, as a distributed object.

    Args:
        model: The Keras model.
        parts: What it was compiled with, by attribute.
        variables: All that it has, as they are now.
        changed: Layers that the replicas have otherwise.
    """

    model: Any
    parts: dict[str, Any]
    variables: list[Any]
    changed: list[Members]
    settings: Settings
    states: dict[str, StepState]

    def __init__(
        self, model: Any, parts: Mapping[str, Any], variables: Sequence[Any], changed: Sequence[Members]
    ) -> None:
        super().__init__()
        # Past torch's own attributes: no part is to be found twice.
        self.__dict__["model"] = model
        self.__dict__["parts"] = dict(parts)
        self.__dict__["variables"] = list(variables)
        self.__dict__["changed"] = list(changed)
        self.__dict__["settings"] = Settings.now()
        self.__dict__["states"] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "states": {}}  # each replica has its own

    def install(self) -> Any:
        """The model, with these parts; and Keras set as it was when they were taken."""
        if self.settings != Settings.now():
            self.settings.apply()
        while self.changed:
            self.changed.pop().give()
        for name, part in self.parts.items():
            if getattr(self.model, name, None) is not part:
                self.model.__dict__[name] = part
        return self.model

    def state(self, kind: str) -> StepState:
        """What a kind of step (`train`, `test`, `predict`) changes, in this replica."""
        if kind not in self.states:
            optimizers = optimizers_in(self.parts) if kind == "train" else []
            for optimizer in optimizers:
                split_updates.take_over(optimizer)
            self.states[kind] = StepState(self.model, optimizers)
        return self.states[kind]


def step(kind: str, compiled: Compiled, data: Any) -> tuple[Any, torch.Tensor | None]:
    """Trains on, evaluates or predicts this replica's slice; the model's own step does the work.

    Returns:
        Predictions, or logs by name; and what the step adds to the metrics, whose logs are then left open.
    """
    model, replica = compiled.install(), get_replica_context()
    state, num_examples = compiled.state(kind), _num_examples(data)
    with contextlib.nullcontext() if kind == "train" else torch.no_grad():
        if replica is None or replica.num_replicas_in_sync == 1:
            return getattr(model, f"{kind}_step")(data), None
        with (
            state.own_values(replica, num_examples),
            loss_reductions.of_global_batch(replica, num_examples),
            own_metrics.of_global_batch(state.own_metrics, replica, num_examples),
            _without_results(model, kind, state),
            _something(data, num_examples) as batch,
        ):
            told = getattr(model, f"{kind}_step")(batch)
    if kind == "predict":
        return told if num_examples else _tree.map(lambda each: each[:0], told), None
    if kind == "train" and split_updates.writes_to_weights(model):
        current_runs[-1].publish_written()  # here, where all are: after the run they would have to meet again
    logs = {name: None if name in state.metric_names else value for name, value in told.items()}
    return logs, state.sums(num_examples)


@contextlib.contextmanager
def _without_results(model: Any, kind: str, state: StepState) -> Iterator[None]:
    """Spares Keras' own step the results of metrics at its end: they would be those of this replica alone."""
    names = (f"{kind}_step", "compute_metrics", "get_metrics_result")
    if kind == "predict" or any(getattr(type(model), name) is not getattr(TorchTrainer, name) for name in names):
        yield
        return
    model.__dict__["get_metrics_result"] = state.metric_names.copy
    try:
        yield
    finally:
        del model.__dict__["get_metrics_result"]


@contextlib.contextmanager
def _something(data: Any, num_examples: int) -> Iterator[Any]:
    """The slice, or one example of zeros where it is empty: Keras cannot do without. It counts for nothing."""
    if num_examples:
        yield data
    else:
        with synchronized_norm.uncounted():
            yield _tree.map_only(torch.Tensor, lambda each: each.new_zeros((1, *each.shape[1:])), data)


def _num_examples(data: Any) -> int:
    return next(len(leaf) for leaf in _tree.leaves(data) if isinstance(leaf, torch.Tensor) and leaf.dim())
