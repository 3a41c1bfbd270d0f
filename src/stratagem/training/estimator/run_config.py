"""How an Estimator runs: strategies, checkpoints, summaries."""

import atexit
import dataclasses
import os
import shutil
import tempfile
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from stratagem._caller import warn_caller
from stratagem._checks import require_count, require_folder, require_seconds
from stratagem.cluster.resolvers.detection import found
from stratagem.errors import EstimatorError, StratagemWarning
from stratagem.strategies.strategy import Strategy
from stratagem.training.estimator.checks import described, require_one_of

FROM_CHECKPOINT = "from_checkpoint"


@dataclass(frozen=True)
class RunConfig:
    """Says how an Estimator runs. Only this object has the strategy; the model function needs none.

    Args:
        model_dir: Where checkpoints and summaries are kept, if the Estimator is not told.
        random_seed: Seeds the generators whenever a model is built; `None` leaves them alone.
        save_summary_steps: Writes summaries every so many steps; 0 writes none.
        save_checkpoints_steps: Writes a checkpoint every so many steps.
        save_checkpoints_secs: Writes a checkpoint every so many seconds; 600 unless steps are given.
        keep_checkpoint_max: How many checkpoints are kept; 0 keeps all.
        log_step_count_steps: Logs loss and speed every so many steps; 0 logs nothing.
        train_distribute: The strategy that trains; by default the default strategy.
        eval_distribute: The strategy that evaluates and predicts; by default the default strategy.
        on_save_error: What happens if a checkpoint cannot be written: `raise` ends the training, `warn` goes on.
        restart: What happens if a replica dies or stalls. `never`: the error ends the training. `from_checkpoint`: the
            strategy starts anew, and training goes on from the last checkpoint.
        max_restarts: The largest number of restarts within ten minutes.
        tf_random_seed: TensorFlow's name of `random_seed`.
        session_config: Has no meaning here; TensorFlow's default, None, is taken.
    Raises:
        EstimatorError: An argument is not one of its values.
    """

    model_dir: str | None = None
    random_seed: int | None = None
    save_summary_steps: int = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int = 5
    log_step_count_steps: int = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    on_save_error: str = "raise"
    restart: str = "never"
    max_restarts: int = 3
    tf_random_seed: InitVar[int | None] = None
    session_config: InitVar[None] = None

    def __post_init__(self, tf_random_seed: Any, session_config: Any) -> None:
        if session_config is not None:
            raise EstimatorError(
                f"session_config is there for TensorFlow's programs, and None here, got {described(session_config)}; "
                f"set devices with sg.config, and placement in model_fn with sg.device"
            )
        if tf_random_seed is not None:
            if self.random_seed not in (None, tf_random_seed):
                raise EstimatorError(
                    f"tf_random_seed is TensorFlow's name of random_seed, got both: {tf_random_seed!r} and "
                    f"{self.random_seed!r}; give one"
                )
            object.__setattr__(self, "random_seed", tf_random_seed)
        if self.random_seed is not None and type(self.random_seed) is not int:
            raise EstimatorError(f"random_seed is an int, or None, got {described(self.random_seed)}")
        require_one_of("on_save_error", self.on_save_error, ("raise", "warn"))
        require_one_of("restart", self.restart, ("never", FROM_CHECKPOINT))
        require_count(EstimatorError, max_restarts=self.max_restarts)
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise EstimatorError(
                f"checkpoints are written every so many steps or seconds, got save_checkpoints_steps="
                f"{self.save_checkpoints_steps!r} and save_checkpoints_secs={self.save_checkpoints_secs!r}; give one"
            )
        if self.save_checkpoints_steps is not None:
            require_count(EstimatorError, save_checkpoints_steps=self.save_checkpoints_steps)
        if self.save_checkpoints_secs is not None:
            require_seconds(EstimatorError, save_checkpoints_secs=self.save_checkpoints_secs)
        for name in ("save_summary_steps", "keep_checkpoint_max", "log_step_count_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise EstimatorError(f"{name} is an int, 0 or more, got {type(value).__name__} {value!r}")
        for name in ("train_distribute", "eval_distribute"):
            strategy = getattr(self, name)
            if strategy is not None and not isinstance(strategy, Strategy):
                raise EstimatorError(
                    f"{name} is a strategy such as sg.MirroredStrategy(), got {type(strategy).__name__} {strategy!r}"
                )

    def replace(self, **changes: Any) -> "RunConfig":
        """The same with some values changed.

        Example:
            >>> RunConfig(keep_checkpoint_max=3).replace(random_seed=1).keep_checkpoint_max
            3
        """
        if changes.keys() & {"random_seed", "tf_random_seed"}:
            changes = {"random_seed": None, "tf_random_seed": None, **changes}
        return dataclasses.replace(self, **changes)


# What a program reads is the seed, not the default of the argument.
RunConfig.tf_random_seed = property(lambda config: config.random_seed)  # type: ignore[attr-defined]


def usable_folder(model_dir: str | os.PathLike[str] | None, config: RunConfig) -> str:
    """The folder of the model; refuses what cannot be one before hours are spent on it."""
    if model_dir is not None and config.model_dir is not None and str(model_dir) != str(config.model_dir):
        raise EstimatorError(f"model_dir is {str(model_dir)!r} here and {config.model_dir!r} in config; give one")
    given = model_dir if model_dir is not None else config.model_dir
    if given is None:
        return _temporary_folder()
    if not given or not isinstance(given, str | os.PathLike):
        raise EstimatorError(f"model_dir is the folder for checkpoints, got {described(given)}")
    path = Path(given)
    if not path.is_absolute():
        require_folder(EstimatorError)
    if path.exists() and not path.is_dir():
        raise EstimatorError(f"model_dir is a folder, {str(path)!r} is a file; name another")
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise EstimatorError(f"model_dir {str(path)!r} cannot be written to; name a folder that can")
    return str(path)


def _temporary_folder() -> str:
    resolver = found().resolver
    if resolver is not None and len(resolver.cluster_spec().tasks) > 1:
        raise EstimatorError("model_dir is the folder for checkpoints, which all tasks of a cluster need; give it")
    folder = tempfile.mkdtemp(prefix="stratagem-model-")
    _temporary.append(folder)
    warn_caller(
        f"model_dir was not given; checkpoints and summaries are kept in the temporary folder {folder!r}, which is "
        f"removed when the program ends. Give model_dir= to keep them",
        StratagemWarning,
    )
    return folder


_temporary: list[str] = []


@atexit.register
def remove_temporary_folders() -> None:
    """Removes the folders of Estimators that were given none."""
    while _temporary:
        shutil.rmtree(_temporary.pop(), ignore_errors=True)
