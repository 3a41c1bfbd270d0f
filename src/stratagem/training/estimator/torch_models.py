"""Models that a function describes with an `EstimatorSpec`: torch modules, and functions that replicas run.

Owns the steps and what of a torch model a checkpoint keeps.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast, final

import torch

from stratagem import _tree
from stratagem.errors import CheckpointMismatchError, EstimatorError
from stratagem.strategies.strategy import Strategy
from stratagem.training.checkpoints import require_fit
from stratagem.training.estimator.checks import accepted, described, labels_needed
from stratagem.training.estimator.feed import num_examples_in
from stratagem.training.estimator.models import Batch, Evaluation, Maker, Model
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.specs import EstimatorSpec, ModeKeys, is_metric

_NAN = float("nan")


@final
class OfFunction(Maker):
    """Builds models by calling a user's function.

    Args:
        model_fn: The function.
    Raises:
        EstimatorError: It needs an argument that there is not.
    """

    max_parts = 2

    def __init__(self, model_fn: Callable[..., EstimatorSpec]) -> None:
        arguments = dict.fromkeys(("features", "labels", "mode", "params", "config"))
        self.taken = tuple(accepted(model_fn, "model_fn", arguments))
        self._model_fn = model_fn

    def divider(self, strategy: Strategy) -> Strategy:
        return strategy

    def make(
        self, mode: ModeKeys, features: Any, labels: Any, params: dict[str, Any], config: RunConfig, strategy: Strategy
    ) -> Model:
        available = {"features": features, "labels": labels, "mode": mode, "params": params, "config": config}
        taken = accepted(self._model_fn, "model_fn", available)
        with labels_needed("model_fn", labels if mode != ModeKeys.PREDICT else ()):
            spec = self._model_fn(**taken)
        if not isinstance(spec, EstimatorSpec):
            raise EstimatorError(f"model_fn returns an EstimatorSpec, got {described(spec)}")
        if spec.mode != mode:
            raise EstimatorError(
                f"model_fn was called for mode {str(mode)!r} and returned a spec for {str(spec.mode)!r}; "
                f"return a spec for the mode that it is given"
            )
        return TorchModel(spec, strategy)


@final
class TorchModel(Model):
    """The model of a spec.

    Args:
        spec: What the model function returned.
        strategy: Where steps run.
    """

    def __init__(self, spec: EstimatorSpec, strategy: Strategy) -> None:
        self.mode = ModeKeys(spec.mode)
        self.module = spec.module
        self.optimizer = spec.optimizer
        self.hooks = {
            ModeKeys.TRAIN: spec.training_hooks,
            ModeKeys.EVAL: spec.evaluation_hooks,
            ModeKeys.PREDICT: spec.prediction_hooks,
        }[self.mode]
        self._spec = spec
        self._strategy = strategy
        self._step = _STEPS[self.mode](spec)

    def begin(self) -> None:
        self.module.train(self.mode == ModeKeys.TRAIN)

    def run(self, batch: Batch) -> Any:
        results = self._strategy.run(self._step, args=batch)
        if self.mode == ModeKeys.TRAIN and self._spec.scheduler is not None:
            # Here, not in the step: workers that do not take the same steps would each count their own.
            self._spec.scheduler.step()
        return results

    def loss(self, results: Any) -> float:
        if self.mode == ModeKeys.PREDICT:
            return _NAN
        means = results["means"]["loss"] if self.mode == ModeKeys.EVAL else results
        return float(self._strategy.reduce("mean", means))

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else _NAN

    def evaluation(self) -> Evaluation:
        return _TorchEvaluation(self._spec, self._strategy)

    def predictions(self, results: Any) -> Any:
        return self._strategy.gather(results)

    def outputs(self, features: Any) -> dict[str, Any]:
        spec = self._spec
        signatures = spec.export_outputs or {"serving_default": spec.predictions or (lambda outputs: outputs)}
        self.module.eval()
        with torch.no_grad():
            outputs = self.module(features)
            return {name: function(outputs) for name, function in signatures.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self.module.state_dict()
        return weights

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.module.load_state_dict({**self.module.state_dict(), **weights})

    def state(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "module": self.weights(),
            "optimizer": spec.optimizer.state_dict() if spec.optimizer else None,
            "optimizer_kind": type(spec.optimizer).__name__,
            "scheduler": spec.scheduler.state_dict() if spec.scheduler else None,
            "extra_state": {name: each.state_dict() for name, each in (spec.extra_state or {}).items()},
        }

    def restore(self, path: str, state: Mapping[str, Any]) -> None:
        own, saved = self.weights(), state["module"]
        if self.mode != ModeKeys.TRAIN:
            # What only training needs, as an auxiliary head, need not be there to evaluate.
            saved = {name: value for name, value in saved.items() if name in own}
        require_fit(path, saved, own)
        self._require_same_extra(path, state["extra_state"])
        if self.mode == ModeKeys.TRAIN:
            self._restore_training(path, state)
        self.module.load_state_dict(saved)
        for name, each in (self._spec.extra_state or {}).items():
            each.load_state_dict(state["extra_state"][name])

    def _require_same_extra(self, path: str, saved: Mapping[str, Any]) -> None:
        own = set(self._spec.extra_state or {})
        training = self.mode == ModeKeys.TRAIN
        if own - set(saved) or (training and set(saved) - own):
            raise CheckpointMismatchError(
                f"checkpoint {path!r} has extra_state of {sorted(saved) or 'nothing'}, the model function gave "
                f"{sorted(own) or 'none'}; use the same, or another model_dir with warm_start_from"
            )

    def _restore_training(self, path: str, state: Mapping[str, Any]) -> None:
        optimizer, scheduler = cast(torch.optim.Optimizer, self._spec.optimizer), self._spec.scheduler
        kind = type(optimizer).__name__
        if state["optimizer_kind"] != kind:
            raise CheckpointMismatchError(
                f"checkpoint {path!r} has the state of optimizer {state['optimizer_kind']}, the model function made "
                f"{kind}; use the same, or another model_dir with warm_start_from"
            )
        if (scheduler is None) != (state["scheduler"] is None):
            raise CheckpointMismatchError(
                f"checkpoint {path!r} has {'no' if state['scheduler'] is None else 'a'} scheduler, unlike the model "
                f"function; use the same, or another model_dir with warm_start_from"
            )
        try:
            optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointMismatchError(
                f"checkpoint {path!r} does not match the optimizer {kind}: {error}"
            ) from error
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])


@final
class _TorchEvaluation(Evaluation):
    def __init__(self, spec: EstimatorSpec, strategy: Strategy) -> None:
        self._strategy = strategy
        self._metrics = _metric_objects(spec)
        self._sums: dict[str, torch.Tensor] = {}
        self._num_examples = 0

    def add(self, batch: Batch, results: Any) -> None:
        num_examples = num_examples_in(batch, self._strategy)
        self._num_examples += num_examples
        for name, mean in self._strategy.reduce("mean", results["means"]).items():
            share = torch.as_tensor(mean, dtype=torch.float64) * num_examples
            self._sums[name] = self._sums[name] + share if name in self._sums else share
        if self._metrics:
            outputs = self._strategy.gather(results["outputs"])
            labels = self._strategy.gather(results["labels"]) if batch[1] is not None else None
            for metric in self._metrics.values():
                with labels_needed("a metric", labels):
                    metric.update(outputs, labels)

    def result(self) -> dict[str, Any]:
        means = {name: total / self._num_examples for name, total in self._sums.items()}
        computed = {name: torch.as_tensor(metric.compute()) for name, metric in self._metrics.items()}
        return {name: each.item() if each.dim() == 0 else each for name, each in {**means, **computed}.items()}


def _train_step(spec: EstimatorSpec) -> Callable[..., Any]:
    module, train_op = spec.module, spec.train_op
    loss_of = cast(Callable[[Any, Any], torch.Tensor], spec.loss)
    optimizer = cast(torch.optim.Optimizer, spec.optimizer)

    def step(features: Any, labels: Any) -> torch.Tensor:
        features, labels = _beside(module, (features, labels))
        optimizer.zero_grad()
        outputs = module(features)
        with labels_needed("loss", labels):
            loss = loss_of(outputs, labels)
        if train_op is not None:
            train_op(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not say its types
            optimizer.step()
        return loss.detach()

    return step


def _evaluation_step(spec: EstimatorSpec) -> Callable[..., Any]:
    module, loss_of = spec.module, cast(Callable[[Any, Any], torch.Tensor], spec.loss)
    whole = bool(_metric_objects(spec))
    functions = {name: each for name, each in (spec.eval_metric_ops or {}).items() if not is_metric(each)}

    def step(features: Any, labels: Any) -> dict[str, Any]:
        with torch.no_grad():
            features, labels = _beside(module, (features, labels))
            outputs = module(features)
            with labels_needed("loss, or a metric,", labels):
                means = {name: function(outputs, labels) for name, function in functions.items()}
                results = {"means": {"loss": loss_of(outputs, labels), **means}}
        return {**results, "outputs": outputs, "labels": labels} if whole else results

    return step


def _prediction_step(spec: EstimatorSpec) -> Callable[..., Any]:
    module, predictions_of = spec.module, spec.predictions

    def step(features: Any, labels: Any) -> Any:
        with torch.no_grad():
            outputs = module(_beside(module, features))
            return outputs if predictions_of is None else predictions_of(outputs)

    return step


_STEPS = {
    ModeKeys.TRAIN: _train_step,
    ModeKeys.EVAL: _evaluation_step,
    ModeKeys.PREDICT: _prediction_step,
}


def _metric_objects(spec: EstimatorSpec) -> Mapping[str, Any]:
    return {name: each for name, each in (spec.eval_metric_ops or {}).items() if is_metric(each)}


def _beside(module: torch.nn.Module, value: Any) -> Any:
    """A value on the device of a module."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type == "cpu":
        return value
    return _tree.map_only(torch.Tensor, lambda each: each.to(parameter.device), value)
