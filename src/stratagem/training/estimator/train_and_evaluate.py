"""Trains, and evaluates what has been trained in between; in a cluster, each task what is its part."""

import os
import time
from typing import Any, Final, final

from stratagem.cluster.resolvers.detection import found
from stratagem.cluster.spec import EVALUATOR
from stratagem.errors import EstimatorError
from stratagem.training.checkpoints import load_latest
from stratagem.training.estimator.checks import described
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.estimator.hooks import CheckpointSaverListener, RunContext
from stratagem.training.estimator.specs import EvalSpec, TrainSpec
from stratagem.training.estimator.training_state import step_in

_LOOK_S: Final = 0.5


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any]:
    """Trains, evaluates new checkpoints during training, and evaluates the last one at the end.

    `RunConfig(save_checkpoints_steps=...)` and `EvalSpec(throttle_secs=...)` say how often. Evaluation changes nothing
    in the training.

    Returns:
        The results of the last evaluation. In a cluster with an evaluator only that task evaluates, and the others
        return `{}`; so do workers of parameter servers, which never evaluate together.
    """
    if not isinstance(estimator, Estimator):
        raise EstimatorError(f"estimator is an Estimator, got {described(estimator)}")
    if not isinstance(train_spec, TrainSpec):
        raise EstimatorError(f"train_spec is a TrainSpec, got {described(train_spec)}")
    if not isinstance(eval_spec, EvalSpec):
        raise EstimatorError(f"eval_spec is an EvalSpec, got {described(eval_spec)}")
    resolver = found().resolver
    if resolver is not None and resolver.task_type == EVALUATOR:
        return _evaluate_every(estimator, eval_spec, train_spec.max_steps)
    strategy = estimator.config.train_distribute
    elsewhere = resolver is not None and EVALUATOR in resolver.cluster_spec().jobs
    if elsewhere or not (strategy is None or strategy.is_in_step):
        _train(estimator, train_spec)
        return {}
    evaluator = _Evaluator(estimator, eval_spec)
    _train(estimator, train_spec, evaluator)
    return evaluator.latest()


def _train(estimator: Estimator, spec: TrainSpec, *listeners: CheckpointSaverListener) -> None:
    told = [*spec.saving_listeners, *listeners]
    estimator.train(spec.input_fn, spec.hooks, max_steps=spec.max_steps, saving_listeners=told)


def _evaluate_every(estimator: Estimator, spec: EvalSpec, max_steps: int | None) -> dict[str, Any]:
    """Evaluates new checkpoints that other tasks write, until the last one of the training."""
    before = load_latest(estimator.model_dir)
    earlier = step_in(before) if before is not None and max_steps is not None else 0
    begins_s = time.monotonic() + spec.start_delay_secs
    evaluator, seen, step, is_last = _Evaluator(estimator, spec), None, None, False
    del before
    while True:
        now = _changed_at(estimator.model_dir)
        if now != seen and (checkpoint := load_latest(estimator.model_dir)) is not None:
            seen, step = now, step_in(checkpoint)
            is_last = checkpoint[1]["input"] is None and (step > earlier or step >= (max_steps or 0))
            del checkpoint  # the evaluation loads its own
        if step is not None and time.monotonic() >= begins_s:
            evaluator.look(step)
        if is_last:
            return evaluator.latest()
        time.sleep(_LOOK_S)


def _changed_at(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return None


@final
class _Evaluator(CheckpointSaverListener):
    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator = estimator
        self._spec = spec
        self._started_s = float("-inf")
        self._metrics: dict[str, Any] | None = None
        self._up_to_date = False

    def after_save(self, run_context: RunContext, global_step: int) -> None:
        self.look(global_step)

    def look(self, global_step: int) -> None:
        """Evaluates the checkpoint of a step, unless that was done, or the last time is not long ago."""
        self._up_to_date = self._metrics is not None and self._metrics["global_step"] == global_step
        if not self._up_to_date and time.monotonic() - self._started_s >= self._spec.throttle_secs:
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
