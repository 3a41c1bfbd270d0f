"""Code of the user's that is called at fixed moments of a training, an evaluation or a prediction.

The moments have the names of TensorFlow's SessionRunHook. What a hook may see and do is in the
context that it is given; it runs in the main program, not in the replicas.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch

from stratagem._caller import warn_caller
from stratagem._checks import require_count, require_seconds
from stratagem.errors import CheckpointWriteError, EstimatorError, StratagemWarning
from stratagem.training.estimator.checks import described, require_one_of

_log = logging.getLogger("stratagem")


class RunContext(ABC):
    """Lets hooks see the session that they are part of, and end it."""

    mode: str
    module: torch.nn.Module
    optimizer: Any
    global_step: int
    stop_requested: bool = False
    is_preempted: bool = False

    def request_stop(self) -> None:
        """Ends the session after this step."""
        self.stop_requested = True

    @abstractmethod
    def save(self, *, finished: bool) -> str:
        """Writes a checkpoint.

        Args:
            finished: Whether the session ends here; else a session that starts from the
                checkpoint goes on with the next batch of the input.
        Returns:
            Its path.
        """

    @abstractmethod
    def agree(self, wish: bool) -> bool:
        """Whether any of the programs that train together wishes something; all ask at the same time."""


class RunValues(ABC):
    """The results of one step; they are computed when they are read."""

    @property
    @abstractmethod
    def loss(self) -> float:
        """The mean over the global batch; `nan` where none is computed."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """That of the optimizer's first group, after the step; `nan` without an optimizer."""

    @property
    @abstractmethod
    def results(self) -> Any:
        """All that the step returned: the loss, the metrics or the predictions."""


class SessionRunHook:
    """The base of hooks: its methods are called at certain moments of a session and do nothing."""

    def begin(self) -> None:
        """Before the first step, and before anything else; once, also if a training is restarted."""

    def after_create_session(self, run_context: RunContext) -> None:
        """Before the first step, when the model has been built and restored; again after each restart."""

    def before_run(self, run_context: RunContext) -> None:
        """Before each step."""

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """After each step; `global_step` already counts it."""

    def end(self, run_context: RunContext) -> None:
        """After the last step, unless an error ended the session."""


def require_hooks(name: str, hooks: Any) -> tuple[SessionRunHook, ...]:
    """The hooks; none for None, TensorFlow's default. Refuses what is not a sequence of hooks."""
    if hooks is None:
        return ()
    if not isinstance(hooks, list | tuple):
        raise EstimatorError(f"{name} is a list of SessionRunHook objects, got {described(hooks)}")
    for hook in hooks:
        if not isinstance(hook, SessionRunHook):
            raise EstimatorError(f"{name} is a list of SessionRunHook objects, got {described(hook)}")
    return tuple(hooks)


@final
class StopAtStepHook(SessionRunHook):
    """Ends a session after some steps, or at a global step.

    Args:
        num_steps: How many steps this session takes at most.
        last_step: The global step after which it ends.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise EstimatorError(f"give one of num_steps and last_step, got {num_steps!r} and {last_step!r}")
        require_count(EstimatorError, **({"num_steps": num_steps} if last_step is None else {"last_step": last_step}))
        self._num_steps = num_steps or 0
        self._given = self._last_step = last_step

    def begin(self) -> None:
        self._last_step = self._given

    def after_create_session(self, run_context: RunContext) -> None:
        if self._last_step is None:
            self._last_step = run_context.global_step + self._num_steps

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        if self._last_step is not None and run_context.global_step >= self._last_step:
            run_context.request_stop()


@final
class LoggingTensorHook(SessionRunHook):
    """Logs values of a session to the logger `stratagem`, after its first step and every so many.

    Args:
        tensors: Which: `loss`, `learning_rate`.
        every_n_iter: After how many steps again.
    """

    def __init__(self, tensors: Sequence[str] = ("loss",), *, every_n_iter: int = 100) -> None:
        for name in tensors:
            if name not in ("loss", "learning_rate"):
                raise EstimatorError(f"what can be logged is 'loss' and 'learning_rate', got {name!r}")
        require_count(EstimatorError, every_n_iter=every_n_iter)
        self._names = tuple(tensors)
        self._every = every_n_iter
        self._num_steps = 0

    def begin(self) -> None:
        self._num_steps = 0

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        if self._num_steps % self._every == 0:
            shown = ", ".join(f"{name} = {getattr(run_values, name):.6g}" for name in self._names)
            _log.info("%s (step %d)", shown, run_context.global_step)
        self._num_steps += 1


@final
class StepCounterHook(SessionRunHook):
    """Logs how many steps are taken per second.

    Args:
        every_n_steps: After how many steps.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        require_count(EstimatorError, every_n_steps=every_n_steps)
        self._every = every_n_steps

    def after_create_session(self, run_context: RunContext) -> None:
        self._since = run_context.global_step, time.monotonic()

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        step, started_s = self._since
        if run_context.global_step - step >= self._every:
            now_s = time.monotonic()
            speed = (run_context.global_step - step) / (now_s - started_s)
            _log.info("global_step/sec: %.4g", speed)
            self._since = run_context.global_step, now_s


class CheckpointSaverListener:
    """A base for objects that are called before and after each checkpoint; its methods do nothing."""

    def before_save(self, run_context: RunContext, global_step: int) -> None:
        """Before a checkpoint is written."""

    def after_save(self, run_context: RunContext, global_step: int) -> None:
        """When a checkpoint is on the disk."""


def require_listeners(listeners: Any) -> tuple[CheckpointSaverListener, ...]:
    """The listeners; none for None, TensorFlow's default. Refuses what is not a sequence of them."""
    if listeners is None:
        return ()
    if not isinstance(listeners, list | tuple):
        raise EstimatorError(f"listeners are a list of CheckpointSaverListener objects, got {described(listeners)}")
    for each in listeners:
        if not isinstance(each, CheckpointSaverListener):
            raise EstimatorError(f"listeners are a list of CheckpointSaverListener objects, got {described(each)}")
    return tuple(listeners)


@final
class CheckpointSaverHook(SessionRunHook):
    """Writes checkpoints while training goes on, and one at its end.

    Args:
        save_steps: The number of steps between two checkpoints; or give `save_secs`.
        save_secs: The number of seconds between two checkpoints.
        listeners: Objects that are called before and after each checkpoint.
        on_error: What happens if a checkpoint during training cannot be written: `raise` or `warn`. At the end of
            training it is always an error.
    """

    def __init__(
        self,
        *,
        save_steps: int | None = None,
        save_secs: float | None = None,
        listeners: Sequence[CheckpointSaverListener] = (),
        on_error: str = "raise",
    ) -> None:
        if (save_steps is None) == (save_secs is None):
            raise EstimatorError(f"give one of save_steps and save_secs, got {save_steps!r} and {save_secs!r}")
        if save_steps is not None:
            require_count(EstimatorError, save_steps=save_steps)
        else:
            require_seconds(EstimatorError, save_secs=save_secs)
        require_one_of("on_error", on_error, ("raise", "warn"))
        self._save_steps = save_steps
        self._save_secs = save_secs
        self._listeners = require_listeners(listeners)
        self._on_error = on_error
        self._saved: tuple[int, bool] | None = None

    def tell(self, listeners: Sequence[CheckpointSaverListener]) -> None:
        """Adds listeners."""
        self._listeners += tuple(each for each in listeners if each not in self._listeners)

    def after_create_session(self, run_context: RunContext) -> None:
        self._since = run_context.global_step, time.monotonic()
        self._saved = None

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        step, started_s = self._since
        if self._save_steps is not None:
            due = run_context.global_step - step >= self._save_steps
        else:
            due = run_context.agree(time.monotonic() - started_s >= (self._save_secs or 0))
        if due:
            self._save(run_context, finished=run_context.stop_requested and not run_context.is_preempted)

    def end(self, run_context: RunContext) -> None:
        # A checkpoint that was written after the last batch of an input does not know that it was the last.
        finished = not run_context.is_preempted
        if self._saved != (run_context.global_step, finished):
            self._save(run_context, finished=finished)

    def _save(self, run_context: RunContext, *, finished: bool) -> None:
        step = run_context.global_step
        again = self._saved is not None and self._saved[0] == step
        for listener in () if again else self._listeners:
            listener.before_save(run_context, step)
        try:
            path = run_context.save(finished=finished)
        except CheckpointWriteError as error:
            if finished or run_context.is_preempted or self._on_error == "raise":
                raise
            warn_caller(f"{error}. Training goes on without this checkpoint", StratagemWarning)
        else:
            _log.info("saved %s", path)
            self._saved = step, finished
            for listener in () if again else self._listeners:
                listener.after_save(run_context, step)
        # The listeners' time is not the training's.
        self._since = step, time.monotonic()
