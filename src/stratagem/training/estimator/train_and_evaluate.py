"""Trains, and evaluates what has been trained in between."""

import time
from typing import Any, final

from stratagem.errors import EstimatorError
from stratagem.training.estimator.checks import described
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.estimator.hooks import CheckpointSaverListener, RunContext
from stratagem.training.estimator.specs import EvalSpec, TrainSpec


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any]:
    """Trains in one go, and evaluates new checkpoints on the way and the last one at the end.

    How often is decided by the checkpoints (`RunConfig(save_checkpoints_steps=...)`) and by
    `EvalSpec(throttle_secs=...)`. Evaluating changes nothing in the training.

    Returns:
        What the last evaluation gave.
    """
    if not isinstance(estimator, Estimator):
        raise EstimatorError(f"estimator is an Estimator, got {described(estimator)}")
    if not isinstance(train_spec, TrainSpec):
        raise EstimatorError(f"train_spec is a TrainSpec, got {described(train_spec)}")
    if not isinstance(eval_spec, EvalSpec):
        raise EstimatorError(f"eval_spec is an EvalSpec, got {described(eval_spec)}")
    evaluator = _Evaluator(estimator, eval_spec)
    estimator.train(train_spec.input_fn, train_spec.hooks, max_steps=train_spec.max_steps, saving_listeners=[evaluator])
    return evaluator.latest()


@final
class _Evaluator(CheckpointSaverListener):
    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator = estimator
        self._spec = spec
        self._started_s = float("-inf")
        self._metrics: dict[str, Any] | None = None
        self._up_to_date = False

    def after_save(self, run_context: RunContext, global_step: int) -> None:
        self._up_to_date = False
        if time.monotonic() - self._started_s >= self._spec.throttle_secs:
            self._evaluate()

    def latest(self) -> dict[str, Any]:
        """The metrics of the newest checkpoint."""
        return self._metrics if self._metrics is not None and self._up_to_date else self._evaluate()

    def _evaluate(self) -> dict[str, Any]:
        self._started_s = time.monotonic()
        spec = self._spec
        self._metrics = self._estimator.evaluate(spec.input_fn, steps=spec.steps, hooks=spec.hooks, name=spec.name)
        self._up_to_date = True
        return self._metrics
