"""One step of a Keras model in a replica: its slice of the global batch in, what it adds to the metrics out.

Gradients are exchanged by `loss.backward()` as in every step; what else a step changes is `step_state`'s.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from keras.src.backend import Variable
from keras.src.backend.torch.trainer import TorchTrainer

from stratagem import _tree
from stratagem.engine.context import current_replica
from stratagem.training.keras import (
    loss_reductions,
    metric_state,
    replica_device,
    split_updates,
    step_metrics,
    synchronized_norm,
)
from stratagem.training.keras.changes import Members, Settings, optimizers_in
from stratagem.training.keras.keras_objects import tensor_of
from stratagem.training.keras.step_state import StepState

synchronized_norm.connect()
loss_reductions.connect()
replica_device.connect()


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
    functions: dict[str, Callable[[Any], Any]]

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
        self.__dict__["functions"] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "states": {}, "functions": {}}  # each replica has its own

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

    def function(self, kind: str) -> Callable[[Any], Any]:
        """The model's own step, compiled by torch if the model is to be."""
        own: Callable[[Any], Any] = getattr(self.model, f"{kind}_step")
        if not self.model.jit_compile:
            return own
        if kind not in self.functions:
            self.functions[kind] = torch.compile(own)
        return self.functions[kind]

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
        Predictions, or logs, `None` if they are what the model's metrics tell when all replicas are done; and what the
        step adds to the metrics.
    """
    model, replica = compiled.install(), current_replica()
    state = compiled.state(kind)
    with contextlib.nullcontext() if kind == "train" else torch.no_grad(), metric_state.for_loop():
        if replica is None or replica.num_replicas_in_sync == 1:
            return _as_logs(compiled.function(kind)(data)), None
        with (
            state.own_values(replica),
            loss_reductions.of_global_batch(replica),
            step_metrics.of_global_batch(state.own_metrics, replica),
            step_metrics.results(
                model, None if _is_of_keras(model, kind) else functools.partial(state.of_all, replica)
            ),
        ):
            told = _as_logs(compiled.function(kind)(data))
    if kind == "predict":
        return told, None
    if kind == "train" and split_updates.writes_to_weights(model):
        replica.publish_written()  # here, where all are: after the run they would have to meet again
    return told, state.sums(replica)


def kept_step(kind: str, compiled: Compiled, data: Any) -> tuple[Any, None]:
    """The same where others follow before the main program comes to it: replicas keep themselves what it changed."""
    told, sums = step(kind, compiled, data)
    if (replica := current_replica()) is not None:
        compiled.state(kind).keep_in_replicas(replica, sums)
    return told, None


def _as_logs(told: Any) -> Any:
    """What a step returned, with the values of variables as they are now."""
    return _tree.map_only(Variable, lambda each: tensor_of(each).detach().clone(), told)


def _is_of_keras(model: Any, kind: str) -> bool:
    """Whether a step is Keras' own: it ends with the results of metrics, which are not asked for in each replica."""
    names = (f"{kind}_step", "compute_metrics", "get_metrics_result")
    return all(getattr(type(model), name) is getattr(TorchTrainer, name) for name in names)
