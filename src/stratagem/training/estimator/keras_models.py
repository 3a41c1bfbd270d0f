"""Keras models as those of an Estimator: Keras' own functions take each step, on the replicas of the strategy.

A Keras model that is made in a scope is trained by all replicas when its `train_on_batch` is called (`keras.fit`), so
that nothing of Keras' steps is repeated here. Batches stay whole until Keras has them.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, final

import keras
import numpy as np
import torch
from keras.src.models.functional import Functional

from stratagem.errors import CheckpointMismatchError, EstimatorError
from stratagem.objects import per_replica
from stratagem.strategies.one_device import get_strategy
from stratagem.strategies.strategy import Strategy
from stratagem.training.checkpoints import require_fit
from stratagem.training.estimator.checks import described, labels_needed
from stratagem.training.estimator.models import Batch, Evaluation, Maker, Model
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.specs import ModeKeys
from stratagem.training.keras.changes import kept_by


@final
class OfKeras(Maker):
    """Builds copies of a Keras model.

    Args:
        source: A compiled model, of which copies start with the weights that it has now; or a function that
            makes one.
    Raises:
        EstimatorError: It is neither, or Keras does not run on torch.
    """

    max_parts = 3

    def __init__(self, source: Any) -> None:
        if keras.backend.backend() != "torch":
            raise EstimatorError(
                f"Keras runs on {keras.backend.backend()!r}; an Estimator takes Keras models on torch. Set "
                f"KERAS_BACKEND=torch before Keras is imported"
            )
        self._make: Callable[[], Any] = source
        self._weights: list[np.ndarray] = []
        if isinstance(source, keras.Model):
            _require_compiled(source)
            self._weights = source.get_weights()
            self._make = lambda: _copied(source)
        elif not callable(source):
            raise EstimatorError(
                f"keras_model is a compiled Keras model, or a function that makes one, got {described(source)}"
            )

    def divider(self, strategy: Strategy) -> Strategy:
        default: Strategy = get_strategy()
        return default

    def make(
        self, mode: ModeKeys, features: Any, labels: Any, params: dict[str, Any], config: RunConfig, strategy: Strategy
    ) -> Model:
        model = self._make()
        if not isinstance(model, keras.Model):
            raise EstimatorError(f"the function given as keras_model returns a Keras model, got {described(model)}")
        _require_compiled(model)
        with torch.no_grad():
            model(features)  # builds what is not built yet
        if self._weights:
            model.set_weights(self._weights)
        if mode == ModeKeys.TRAIN and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return KerasModel(mode, model)


@final
class KerasModel(Model):
    """A Keras model for one mode.

    In an evaluation the loss after a step is that of all batches so far, as Keras computes it.

    Args:
        mode: What it is used for.
        model: The model, compiled and built.
    """

    hooks = ()

    def __init__(self, mode: ModeKeys, model: Any) -> None:
        self.mode = mode
        self.module = model
        self.optimizer = model.optimizer
        self._model = model
        self._step = {ModeKeys.TRAIN: self._train, ModeKeys.EVAL: self._test, ModeKeys.PREDICT: self._predict}[mode]

    def begin(self) -> None:
        self._model.train(self.mode == ModeKeys.TRAIN)

    def run(self, batch: Batch) -> Any:
        whole = per_replica.load_deferred(per_replica.select(batch, 0))
        with labels_needed("the step of Keras", whole[1] if self.mode != ModeKeys.PREDICT else ()):
            return self._step(*whole)

    def loss(self, results: Any) -> float:
        return float("nan") if self.mode == ModeKeys.PREDICT else float(results["loss"])

    @property
    def learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    def evaluation(self) -> Evaluation:
        self._model.reset_metrics()
        return _KerasEvaluation()

    def predictions(self, results: Any) -> Any:
        return keras.tree.map_structure(torch.as_tensor, results)

    def outputs(self, features: Any) -> dict[str, Any]:
        with torch.no_grad():
            return {"serving_default": self._model(features)}

    def weights(self) -> dict[str, torch.Tensor]:
        return {variable.path: variable.value.detach() for variable in self._model.variables}

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        for variable in self._model.variables:
            if variable.path in weights:
                variable.assign(weights[variable.path])

    def state(self) -> dict[str, Any]:
        return {
            "module": self.weights(),
            "optimizer": [variable.value.detach() for variable in kept_by(self.optimizer)],
            "optimizer_kind": type(self.optimizer).__name__,
        }

    def restore(self, path: str, state: Mapping[str, Any]) -> None:
        own, saved = self.weights(), state["module"]
        # By their order: names that Keras gives count up with every model that a program makes.
        if _shapes(own.values()) != _shapes(saved.values()):
            require_fit(path, saved, own)
            raise CheckpointMismatchError(f"checkpoint {path!r} has the weights of the model in another order")
        if self.mode == ModeKeys.TRAIN:
            self._restore_optimizer(path, state)
        for variable, value in zip(self._model.variables, saved.values(), strict=True):
            variable.assign(value)

    def _restore_optimizer(self, path: str, state: Mapping[str, Any]) -> None:
        kind, variables = type(self.optimizer).__name__, kept_by(self.optimizer)
        same = _shapes(state["optimizer"]) == _shapes(variable.value for variable in variables)
        if state["optimizer_kind"] != kind or not same:
            raise CheckpointMismatchError(
                f"checkpoint {path!r} has the state of optimizer {state['optimizer_kind']} with "
                f"{len(state['optimizer'])} variables, the model has {kind} with {len(variables)}; use the same, or "
                f"another model_dir with warm_start_from"
            )
        for variable, value in zip(variables, state["optimizer"], strict=True):
            variable.assign(value)

    def _train(self, features: Any, labels: Any, weights: Any) -> Any:
        return self._model.train_on_batch(features, labels, weights, return_dict=True)

    def _test(self, features: Any, labels: Any, weights: Any) -> Any:
        if self._model.test_function is None:
            return self._model.test_on_batch(features, labels, weights, return_dict=True)
        return self._model.test_function([(features, labels, weights)])

    def _predict(self, features: Any, labels: Any, weights: Any) -> Any:
        return self._model.predict_on_batch(features)


@final
class _KerasEvaluation(Evaluation):
    """Keras adds up by itself: what it says after a batch is of all batches so far."""

    def __init__(self) -> None:
        self._logs: dict[str, Any] = {}

    def add(self, batch: Batch, results: Any) -> None:
        self._logs = dict(results)

    def result(self) -> dict[str, Any]:
        return {name: float(value) for name, value in self._logs.items()}


def _require_compiled(model: Any) -> None:
    if not model.compiled:
        raise EstimatorError(f"keras_model is a compiled model; call {model.name!r}.compile(optimizer=..., loss=...)")


def _copied(model: Any) -> Any:
    """A new model of the same kind, compiled alike, without the weights."""
    try:
        clone = _cloned(model)
        options = {name: _copied_option(option) for name, option in model._compile_config.config.items()}
        clone.compile(**options)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise EstimatorError(
            f"model {model.name!r} cannot be copied: {error}. Give keras_model a function that makes the compiled model"
        ) from error
    return clone


def _cloned(model: Any) -> Any:
    arguments = model._auto_config  # of its constructor, where all of them are plain values
    if isinstance(model, keras.Sequential | Functional) or arguments is None or _has_own_config(model):
        return keras.models.clone_model(model)
    return type(model)(**arguments.config)


def _has_own_config(model: Any) -> bool:
    return type(model).get_config is not keras.Model.get_config


def _copied_option(option: Any) -> Any:
    # By hand: Keras keeps options in lists and dicts of its own, which are leaves for torch.
    if isinstance(option, keras.optimizers.Optimizer | keras.metrics.Metric):
        return type(option).from_config(option.get_config())
    if isinstance(option, list | tuple):
        return type(option)(map(_copied_option, option))
    if isinstance(option, dict):
        return {key: _copied_option(each) for key, each in option.items()}
    return copy.copy(option)


def _shapes(tensors: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]
