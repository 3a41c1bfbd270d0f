"""Trains, evaluates and uses a model that a function describes, and keeps all of it in a folder.

Owns the life of a session: find the checkpoint, open the input, build and restore the model, run.
"""

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from stratagem._caller import warn_caller
from stratagem.errors import StratagemWarning, StrategyError
from stratagem.inputs.loading import random_state_kept
from stratagem.strategies import context
from stratagem.strategies.one_device import get_strategy
from stratagem.strategies.strategy import Strategy
from stratagem.training.checkpoints import latest_checkpoint, save_checkpoint
from stratagem.training.estimator import exporting, random_state, states
from stratagem.training.estimator.checks import (
    EstimatorError,
    accepted,
    described,
    require_count,
    require_input_fn,
)
from stratagem.training.estimator.feed import Feed, example_of
from stratagem.training.estimator.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    LoggingTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    require_hooks,
)
from stratagem.training.estimator.run_config import RunConfig, usable_folder
from stratagem.training.estimator.session import Evaluation, Session, chosen, rows
from stratagem.training.estimator.specs import EstimatorSpec, ModeKeys, WarmStartSettings
from stratagem.training.estimator.summaries import SummarySaverHook, summary_writer, write_scalars

_log = logging.getLogger("stratagem")
_DEFAULT_SAVE_SECS = 600.0
_State = tuple[str, dict[str, Any]]


class _InputUsedUpError(Exception):
    """The training that is taken up again had used all of its input."""


@final
class Estimator:
    """Trains, evaluates and predicts with the model of a function, on the strategy of its configuration.

    `model_fn(features, labels, mode, params, config)` is called once for each training, evaluation
    or prediction, inside the strategy's scope, and returns an `EstimatorSpec`; it takes as many of
    these arguments as it names. Features and labels are the part of the first batch that one
    replica gets, to build a module of the right size; what happens in each step is said by the
    functions in the spec. Checkpoints in `model_dir` carry a model from one call to the next, and
    a training that was cut short goes on with the next batch.

    Args:
        model_fn: The model.
        model_dir: Where checkpoints and summaries are kept.
        config: How to run; holds the strategies.
        params: Passed on to `model_fn` and to input functions.
        warm_start_from: A checkpoint of another model, a folder of them, or `WarmStartSettings`:
            where the weights of a new model come from.
    Raises:
        EstimatorError: An argument is of the wrong kind, or `model_dir` cannot be used.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
    ) -> None:
        if not callable(model_fn):
            raise EstimatorError(f"model_fn is a function that returns an EstimatorSpec, got {described(model_fn)}")
        if config is not None and not isinstance(config, RunConfig):
            raise EstimatorError(f"config is a RunConfig, got {described(config)}")
        if params is not None and not isinstance(params, Mapping):
            raise EstimatorError(f"params is a dict, got {described(params)}")
        config = config or RunConfig()
        self.model_dir = usable_folder(model_dir, config)
        self.config = config.replace(model_dir=self.model_dir)
        self.params = copy.deepcopy(dict(params or {}))
        taken = accepted(model_fn, "model_fn", dict.fromkeys(("features", "labels", "mode", "params", "config")))
        if params is not None and "params" not in taken:
            raise EstimatorError(f"params were given, but model_fn takes only {', '.join(taken) or 'nothing'}")
        self._model_fn = model_fn
        self._warm_start = WarmStartSettings(warm_start_from) if isinstance(warm_start_from, str) else warm_start_from

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] = (),
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] = (),
    ) -> "Estimator":
        """Trains until the input ends, a hook asks for the end, or the steps are done.

        Args:
            input_fn: Returns the data, or an `Input` that says how to use it; may take `mode`,
                `params` and `config`.
            hooks: What to call at the moments of the training.
            steps: How many steps from where the last checkpoint is.
            max_steps: The global step to train to; nothing is done if it has been reached.
            saving_listeners: Who is told of checkpoints.
        Returns:
            The Estimator.
        """
        require_input_fn(input_fn)
        require_hooks("hooks", hooks)
        if steps is not None and max_steps is not None:
            raise EstimatorError(f"give steps or max_steps, got both: {steps!r} and {max_steps!r}")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None:
                require_count(name, value)
        self._require_outside("train")
        found = states.find_checkpoint(None, self.model_dir)
        if max_steps is not None and found is not None and found[1]["global_step"] >= max_steps:
            _log.info("the model has been trained for %d steps already", found[1]["global_step"])
            return self
        with contextlib.ExitStack() as stack:
            strategy = self.config.train_distribute or get_strategy()
            try:
                session = self._open(ModeKeys.TRAIN, input_fn, strategy, found, stack)
            except _InputUsedUpError:
                return self._finish(found)
            ours: list[SessionRunHook] = [*hooks, *session.spec.training_hooks]
            if self.config.log_step_count_steps:
                ours.append(LoggingTensorHook(every_n_iter=self.config.log_step_count_steps))
                ours.append(StepCounterHook(self.config.log_step_count_steps))
            if self.config.save_summary_steps:
                writer = stack.enter_context(summary_writer(self.model_dir))
                ours.append(SummarySaverHook(writer, self.config.save_summary_steps))
            if steps is not None or max_steps is not None:
                ours.append(StopAtStepHook(steps, max_steps))
            ours.append(self._saver(saving_listeners))
            for _ in session.run(ours):
                pass
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] = (),
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The loss and the metrics over the examples of an input, and the global step of the model.

        Args:
            input_fn: Returns the data, as in `train`.
            steps: How many batches of it; `None` takes all.
            hooks: What to call at the moments of the evaluation.
            checkpoint_path: Which checkpoint; by default the newest.
            name: Keeps the summaries of several evaluations apart.
        """
        require_input_fn(input_fn)
        require_hooks("hooks", hooks)
        if steps is not None:
            require_count("steps", steps)
        self._require_outside("evaluate")
        found = self._find_trained(checkpoint_path)
        with contextlib.ExitStack() as stack:
            stack.enter_context(random_state_kept())
            strategy = self.config.eval_distribute or get_strategy()
            session = self._open(ModeKeys.EVAL, input_fn, strategy, found, stack)
            self._require_end(session, steps)
            evaluation = Evaluation(session)
            for number, (batch, results) in enumerate(session.run([*hooks, *session.spec.evaluation_hooks]), 1):
                evaluation.add(batch, results)
                if number == steps:
                    session.request_stop()
            metrics = {**evaluation.result(), "global_step": session.global_step}
            if self.config.save_summary_steps:
                folder = os.path.join(self.model_dir, f"eval_{name}" if name else "eval")
                write_scalars(stack.enter_context(summary_writer(folder)), metrics, session.global_step)
        _log.info("evaluated: %s", ", ".join(f"{key} = {value}" for key, value in metrics.items()))
        return metrics

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] = (),
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Predicts, one example after the other, in the order of the input.

        Args:
            input_fn: Returns the data, as in `train`; labels in it are not used.
            predict_keys: Only these, of predictions that are a dict.
            hooks: What to call at the moments of the prediction.
            checkpoint_path: Which checkpoint; by default the newest.
            yield_single_examples: Whether to give single examples, or whole batches.
        Returns:
            A generator: batches are computed when they are asked for.
        """
        require_input_fn(input_fn)
        require_hooks("hooks", hooks)
        self._require_outside("predict")
        return self._predict(input_fn, predict_keys, hooks, self._find_trained(checkpoint_path), yield_single_examples)

    def _predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None,
        hooks: Sequence[SessionRunHook],
        found: _State | None,
        singly: bool,
    ) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            strategy = self.config.eval_distribute or get_strategy()
            with random_state_kept():
                session = self._open(ModeKeys.PREDICT, input_fn, strategy, found, stack)
            for _, results in session.run([*hooks, *session.spec.prediction_hooks]):
                predictions = chosen(strategy.gather(results), predict_keys)
                yield from rows(predictions) if singly else (predictions,)

    def export(self, export_dir: str | os.PathLike[str], checkpoint_path: str | None = None) -> str:
        """Writes the trained model for use elsewhere; returns the folder.

        It holds `weights.safetensors`, the module's `state_dict`, and `signature.json` with dtype and
        shape of all that goes in and comes out.

        Args:
            export_dir: A folder that is new or empty.
            checkpoint_path: Which checkpoint; by default the newest.
        """
        self._require_outside("export")
        path = exporting.require_free(export_dir)
        found = states.find_checkpoint(checkpoint_path, self.model_dir)
        if found is None:
            raise EstimatorError(f"export needs a trained model, and {self.model_dir!r} has no checkpoint; call train")
        structure = found[1]["features"]
        with random_state_kept():
            spec = self._build(ModeKeys.PREDICT, exporting.example_from(structure), None)
        states.restore_model(spec, *found)
        return exporting.write_export(path, spec, structure, found[1]["global_step"])

    def latest_checkpoint(self) -> str | None:
        """The path of the newest undamaged checkpoint."""
        return latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """The names of the weights in the newest checkpoint."""
        return list(self._trained_weights())

    def get_variable_value(self, name: str) -> torch.Tensor:
        """A weight in the newest checkpoint."""
        weights = self._trained_weights()
        if name not in weights:
            raise EstimatorError(f"the model has no weight {name!r}; it has {', '.join(weights)}")
        value: torch.Tensor = weights[name]
        return value

    def _trained_weights(self) -> dict[str, Any]:
        found = states.find_checkpoint(None, self.model_dir)
        if found is None:
            raise EstimatorError(f"{self.model_dir!r} has no checkpoint; call train first")
        weights: dict[str, Any] = found[1]["module"]
        return weights

    def _open(
        self,
        mode: ModeKeys,
        input_fn: Callable[..., Any],
        strategy: Strategy,
        found: _State | None,
        stack: contextlib.ExitStack,
    ) -> Session:
        """Opens the input, builds the model and restores it. What must be closed is left to the stack."""
        if self.config.random_seed is not None:
            random_state.seed(self.config.random_seed)
        resumed = found[1] if found is not None and mode == ModeKeys.TRAIN else None
        # The model starts from the same numbers, however many its input draws.
        with random_state_kept():
            feed, first = self._feed(mode, input_fn, strategy, resumed, stack)
            example = example_of(first)
            after_input = random_state.current()
        with strategy.scope():
            spec = self._build(mode, *example)
        if found is not None:
            states.restore_model(spec, *found)
        elif self._warm_start is not None:
            names = states.warm_start(spec, self._warm_start)
            _log.info("warm start of %s", ", ".join(names))
        if resumed is not None:
            random_state.restore(after_input)
        structure = states.structure_of(example[0])

        def save(session: Session, finished: bool) -> str:
            state = states.state_of(session, structure, finished=finished)
            keep_max = self.config.keep_checkpoint_max
            return save_checkpoint(self.model_dir, session.global_step, state, keep_max=keep_max)

        return Session(strategy, spec, feed, first, found[1]["global_step"] if found else 0, save)

    def _feed(
        self,
        mode: ModeKeys,
        input_fn: Callable[..., Any],
        strategy: Strategy,
        resumed: dict[str, Any] | None,
        stack: contextlib.ExitStack,
    ) -> tuple[Feed, tuple[Any, Any]]:
        """The input with its first batch; of a training that was cut short, with the next one."""

        position = resumed["input"] if resumed is not None else None
        seed = random_state.draw() if position is None else position["seed"]

        def opened() -> Feed:
            feed = Feed(input_fn, {"mode": mode, "params": dict(self.params), "config": self.config}, strategy, seed)
            stack.callback(feed.close)
            return feed

        feed = opened()
        if position is not None and not feed.go_to(position):
            warn_caller(
                f"the last training was cut short after pass {position['num_epochs']}, batch "
                f"{position['num_batches']} of its input; this input has fewer and is used from its beginning",
                StratagemWarning,
            )
            feed = opened()
        if resumed is not None:
            random_state.restore(resumed["random"])
        first = feed.next()
        if first is None and position is not None:
            raise _InputUsedUpError
        if first is None:
            raise EstimatorError("input_fn gave no batch; a training, an evaluation or a prediction needs one")
        return feed, first

    def _build(self, mode: ModeKeys, features: Any, labels: Any) -> EstimatorSpec:
        available = {
            "features": features,
            "labels": None if mode == ModeKeys.PREDICT else labels,
            "mode": mode,
            "params": copy.deepcopy(self.params),
            "config": self.config,
        }
        spec = self._model_fn(**accepted(self._model_fn, "model_fn", available))
        if not isinstance(spec, EstimatorSpec):
            raise EstimatorError(f"model_fn returns an EstimatorSpec, got {described(spec)}")
        if spec.mode != mode:
            raise EstimatorError(
                f"model_fn was called for mode {str(mode)!r} and returned a spec for {str(spec.mode)!r}; "
                f"pass the mode on that it is given"
            )
        return spec

    def _saver(self, listeners: Sequence[CheckpointSaverListener]) -> CheckpointSaverHook:
        steps, secs = self.config.save_checkpoints_steps, self.config.save_checkpoints_secs
        if steps is None and secs is None:
            secs = _DEFAULT_SAVE_SECS
        return CheckpointSaverHook(save_steps=steps, save_secs=secs, listeners=listeners)

    def _finish(self, found: _State | None) -> "Estimator":
        """Brings a training to its end that was cut short after its last batch, before it could do so itself."""
        if found is not None:
            save_checkpoint(self.model_dir, found[1]["global_step"], {**found[1], "input": None})
        return self

    def _find_trained(self, checkpoint_path: str | None) -> _State | None:
        found = states.find_checkpoint(checkpoint_path, self.model_dir)
        if found is None:
            warn_caller(
                f"{self.model_dir!r} has no checkpoint; the model is used as model_fn makes it", StratagemWarning
            )
        return found

    def _require_end(self, session: Session, steps: int | None) -> None:
        if steps is None and session.feed.spec.num_epochs is None:
            raise EstimatorError("the input has num_epochs=None and does not end; give steps, or num_epochs=1")

    def _require_outside(self, what: str) -> None:
        if context.has_strategy():
            raise StrategyError(
                f"Estimator.{what} was called inside a strategy's scope or run; call it outside, and give the "
                f"strategy as RunConfig(train_distribute=..., eval_distribute=...)"
            )
