"""Trains, evaluates and uses a model, and keeps all of it in a folder.

Owns the calls of the user and the restarts of a training. Sessions are opened by `opening`.
"""

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, final

import torch

from stratagem import _tensorflow_names
from stratagem._caller import warn_caller
from stratagem._checks import require_count
from stratagem.engine import context, random_state
from stratagem.errors import EstimatorError, LostError, StratagemWarning, StrategyError
from stratagem.strategies.one_device import get_strategy
from stratagem.strategies.strategy import Strategy
from stratagem.training.checkpoints import latest_checkpoint, save_checkpoint
from stratagem.training.estimator import exporting, training_state
from stratagem.training.estimator.checks import described, require_input_fn
from stratagem.training.estimator.estimator_session import EstimatorSession, chosen, rows
from stratagem.training.estimator.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    LoggingTensorHook,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    require_hooks,
    require_listeners,
)
from stratagem.training.estimator.models import Maker
from stratagem.training.estimator.opening import InputUsedUpError, SessionOpener
from stratagem.training.estimator.preemption import PreemptionHook
from stratagem.training.estimator.restarts import Restarts
from stratagem.training.estimator.run_config import FROM_CHECKPOINT, RunConfig, usable_folder
from stratagem.training.estimator.specs import EstimatorSpec, ModeKeys, WarmStartSettings
from stratagem.training.estimator.summaries import SummarySaverHook, summary_writer, write_scalars
from stratagem.training.estimator.torch_models import OfFunction
from stratagem.training.estimator.training_state import State, step_in

_log = logging.getLogger("stratagem")
_DEFAULT_SAVE_SECS = 600.0


@final
class Estimator:
    """Trains, evaluates and predicts with the model that a function makes, on the strategy of its configuration.

    `model_fn(features, labels, mode, params, config)` is called once for each training, evaluation
    or prediction, inside the strategy's scope, and returns an `EstimatorSpec`. It may leave out arguments
    that it does not need. Features and labels are one replica's part of the first batch, for building
    a module of the right size; the functions in the spec say what happens in each step.
    Checkpoints in `model_dir` keep the model between calls, and
    a training that was cut short goes on with the next batch.

    Args:
        model_fn: The model.
        model_dir: Where checkpoints and summaries are kept; by default a temporary folder, which ends with the program.
        config: How to run; holds the strategies.
        params: Passed on to `model_fn` and to input functions.
        warm_start_from: A checkpoint of another model, a folder of them, or `WarmStartSettings`:
            where the weights of a new model come from.
    Raises:
        EstimatorError: An argument is of the wrong kind, or `model_dir` cannot be used.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec] | Maker,
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ) -> None:
        if not isinstance(model_fn, Maker) and not callable(model_fn):
            raise EstimatorError(f"model_fn is a function that returns an EstimatorSpec, got {described(model_fn)}")
        if config is not None and not isinstance(config, RunConfig):
            raise EstimatorError(f"config is a RunConfig, got {described(config)}")
        if params is not None and not isinstance(params, Mapping):
            raise EstimatorError(f"params is a dict, got {described(params)}")
        config = config or RunConfig()
        self.model_dir = usable_folder(model_dir, config)
        self.config = config.replace(model_dir=self.model_dir)
        self.params = copy.deepcopy(dict(params or {}))
        maker = model_fn if isinstance(model_fn, Maker) else OfFunction(model_fn)
        if params is not None and isinstance(maker, OfFunction) and "params" not in maker.taken:
            raise EstimatorError(f"params were given, but model_fn takes only {', '.join(maker.taken) or 'nothing'}")
        warm_start = warm_start_from
        if warm_start is not None and not isinstance(warm_start, WarmStartSettings):
            warm_start = WarmStartSettings(warm_start)
        self._opener = SessionOpener(maker, self.model_dir, self.config, self.params, warm_start)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
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
        Raises:
            PreemptedExit: SIGTERM came; the last step is saved, and the program is to end and to be started again.
        """
        require_input_fn(input_fn)
        hooks = require_hooks("hooks", hooks)
        saving_listeners = require_listeners(saving_listeners)
        if steps is not None and max_steps is not None:
            raise EstimatorError(f"give steps or max_steps, got both: {steps!r} and {max_steps!r}")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None:
                require_count(EstimatorError, **{name: value})
        self._require_outside("train")
        pending = [self._find(None, self.config.train_distribute)]
        step = step_in(pending[0])
        last_step = step + steps if steps is not None else max_steps
        if last_step is not None and step >= last_step:
            _log.info("the model has been trained for %d steps already", step)
            return self
        restarts, begun = Restarts(self.config), list[SessionRunHook]()
        while True:
            try:
                self._train(input_fn, hooks, last_step, saving_listeners, pending, begun)
                return self
            except LostError as error:
                num_left = restarts.num_left_after(error)
                self._revive(error)
                cause = str(error)
            pending = [self._find(None, self.config.train_distribute)]
            warn_caller(
                f"{cause}. Training is restarted from step {step_in(pending[0])}; "
                f"{num_left} of {self.config.max_restarts} restarts are left",
                StratagemWarning,
            )

    def _train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook],
        last_step: int | None,
        listeners: Sequence[CheckpointSaverListener],
        pending: list[State | None],
        begun: list[SessionRunHook],
    ) -> None:
        """Trains until the end, or until something is lost.

        Args:
            input_fn: Returns the data.
            hooks: Those of the user.
            last_step: Where to end.
            listeners: Who is told of checkpoints.
            pending: The checkpoint to start from; taken out, so that it does not stay in memory as long as this lasts.
            begun: Hooks that have begun.
        """
        with contextlib.ExitStack() as stack:
            strategy = self.config.train_distribute or get_strategy()
            found = pending.pop()
            try:
                session = self._opener.open(ModeKeys.TRAIN, input_fn, strategy, found, stack)
            except InputUsedUpError:
                self._finish(found)
                _warn_of_early_end(step_in(found), last_step)
                return
            if found is None and self.config.restart == FROM_CHECKPOINT:
                session.save(finished=False)
            del found
            ours = [*hooks, *session.model.hooks]
            if self.config.log_step_count_steps:
                ours.append(LoggingTensorHook(every_n_iter=self.config.log_step_count_steps))
                ours.append(StepCounterHook(self.config.log_step_count_steps))
            if self.config.save_summary_steps:
                start = session.global_step
                writer = stack.enter_context(summary_writer(self.model_dir, start)) if strategy.is_chief else None
                ours.append(SummarySaverHook(writer, self.config.save_summary_steps))
            if last_step is not None:
                ours.append(StopAtStepHook(last_step=last_step))
            preemption = stack.enter_context(PreemptionHook())
            ours.append(preemption)
            _add_saver(ours, self.config, listeners)
            for _ in _begun(session, ours, begun):
                pass
            preemption.exit_if_asked()
            if not session.stop_requested:
                _warn_of_early_end(session.global_step, last_step)

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
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
        hooks = require_hooks("hooks", hooks)
        if steps is not None:
            require_count(EstimatorError, steps=steps)
        self._require_outside("evaluate")
        found = self._find_trained(checkpoint_path)
        with contextlib.ExitStack() as stack:
            stack.enter_context(random_state.kept())
            strategy = self._evaluating()
            session = self._opener.open(ModeKeys.EVAL, input_fn, strategy, found, stack)
            del found  # the model has it
            self._require_end(session, steps)
            evaluation = session.model.evaluation()
            for number, (batch, results) in enumerate(_begun(session, [*hooks, *session.model.hooks]), 1):
                evaluation.add(batch, results)
                if number == steps:
                    session.request_stop()
            metrics = {**evaluation.result(), "global_step": session.global_step}
            if self.config.save_summary_steps and strategy.is_chief:
                folder = os.path.join(self.model_dir, f"eval_{name}" if name else "eval")
                write_scalars(stack.enter_context(summary_writer(folder)), metrics, session.global_step)
        _log.info("evaluated: %s", ", ".join(f"{key} = {value}" for key, value in metrics.items()))
        return metrics

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
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
        hooks = require_hooks("hooks", hooks)
        self._require_outside("predict")
        return self._predict(input_fn, predict_keys, hooks, self._find_trained(checkpoint_path), yield_single_examples)

    def _predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None,
        hooks: Sequence[SessionRunHook],
        found: State | None,
        singly: bool,
    ) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            strategy = self._evaluating()
            with random_state.kept():
                session = self._opener.open(ModeKeys.PREDICT, input_fn, strategy, found, stack)
            del found
            for _, results in _begun(session, [*hooks, *session.model.hooks]):
                predictions = chosen(session.model.predictions(results), predict_keys)
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
        found = training_state.find_checkpoint(checkpoint_path, self.model_dir)
        if found is None:
            raise EstimatorError(f"export needs a trained model, and {self.model_dir!r} has no checkpoint; call train")
        structure = found[1]["features"]
        with random_state.kept():
            model = self._opener.build(ModeKeys.PREDICT, exporting.example_from(structure), None, get_strategy())
        model.restore(*found)
        return exporting.write_export(path, model, structure, found[1]["global_step"])

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

    def __getattr__(self, name: str) -> NoReturn:
        """What is not found may be a method of TensorFlow's Estimators."""
        raise _tensorflow_names.of_estimator(self, name)

    def _trained_weights(self) -> dict[str, Any]:
        found = training_state.find_checkpoint(None, self.model_dir)
        if found is None:
            raise EstimatorError(f"{self.model_dir!r} has no checkpoint; call train first")
        weights: dict[str, Any] = found[1]["module"]
        return weights

    def _revive(self, lost: LostError) -> None:
        """Lets strategies have new processes in the place of those that they lost."""
        try:
            for strategy in (self.config.train_distribute, self.config.eval_distribute):
                if strategy is not None:
                    strategy.revive()
        except StrategyError as refusal:
            lost.add_note(f"it cannot be restarted from here: {refusal}")
            raise lost from None

    def _finish(self, found: State | None) -> None:
        """Brings a training to its end that was cut short after its last batch, before it could do so itself."""
        if found is not None and (self.config.train_distribute or get_strategy()).is_chief:
            save_checkpoint(self.model_dir, found[1]["global_step"], {**found[1], "input": None})

    def _find(self, checkpoint_path: str | None, strategy: Strategy | None) -> State | None:
        found = training_state.find_checkpoint(checkpoint_path, self.model_dir)
        training_state.require_agreement(found, self.model_dir, strategy or get_strategy())
        return found

    def _find_trained(self, checkpoint_path: str | None) -> State | None:
        found = self._find(checkpoint_path, self.config.eval_distribute)
        if found is None:
            warn_caller(
                f"{self.model_dir!r} has no checkpoint; the model is used as model_fn makes it", StratagemWarning
            )
        return found

    def _evaluating(self) -> Strategy:
        """Where to evaluate and predict: alone, if those who train are not in step with each other."""
        given = self.config.eval_distribute
        return given if given is not None and given.is_in_step else get_strategy()

    def _require_end(self, session: EstimatorSession, steps: int | None) -> None:
        if steps is None and session.feed.spec.num_epochs is None:
            raise EstimatorError("the input has num_epochs=None and does not end; give steps, or num_epochs=1")

    def _require_outside(self, what: str) -> None:
        if context.has_strategy():
            raise StrategyError(
                f"Estimator.{what} was called inside a strategy's scope or run; call it outside, and give the "
                f"strategy as RunConfig(train_distribute=..., eval_distribute=...)"
            )


def _begun(
    session: EstimatorSession, hooks: Sequence[SessionRunHook], begun: list[SessionRunHook] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Runs a session; hooks that have begun in an earlier one, which it goes on with, do not do so again."""
    for hook in hooks:
        if not any(each is hook for each in begun or ()):
            hook.begin()
    if begun is not None:
        begun[:] = hooks
    return session.run(hooks)


def _warn_of_early_end(step: int, last_step: int | None) -> None:
    """Says that an input has ended before the steps that were asked for."""
    if last_step is not None and step < last_step:
        warn_caller(
            f"the input ended at step {step}, and training was to go on to step {last_step}. Let the input repeat its "
            f"data: return sg.estimator.Input(data, num_epochs=None) from input_fn; or leave steps and max_steps out",
            StratagemWarning,
        )


def _add_saver(hooks: list[SessionRunHook], config: RunConfig, listeners: Sequence[CheckpointSaverListener]) -> None:
    """Lets checkpoints be written, after all other hooks, unless one of these does so already."""
    own = [hook for hook in hooks if isinstance(hook, CheckpointSaverHook)]
    if own:
        own[0].tell(listeners)
        return
    steps, secs = config.save_checkpoints_steps, config.save_checkpoints_secs
    if steps is None and secs is None:
        secs = _DEFAULT_SAVE_SECS
    on_error = config.on_save_error
    hooks.append(CheckpointSaverHook(save_steps=steps, save_secs=secs, listeners=listeners, on_error=on_error))
