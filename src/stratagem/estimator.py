"""Trains, evaluates and uses models that a function describes: `sg.estimator`.

The names and meanings are TensorFlow's, for torch modules; nothing is kept here.
"""

from typing import Any

from stratagem import _tensorflow_names
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWriteError,
    EstimatorError,
)
from stratagem.training.checkpoints import latest_checkpoint
from stratagem.training.estimator.conversion import model_to_estimator
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.estimator.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    LoggingTensorHook,
    RunContext,
    RunValues,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
)
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.specs import (
    EstimatorSpec,
    EvalSpec,
    Input,
    ModeKeys,
    TrainSpec,
    WarmStartSettings,
)
from stratagem.training.estimator.train_and_evaluate import train_and_evaluate

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "CheckpointWriteError",
    "Estimator",
    "EstimatorError",
    "EstimatorSpec",
    "EvalSpec",
    "Input",
    "LoggingTensorHook",
    "ModeKeys",
    "RunConfig",
    "RunContext",
    "RunValues",
    "SessionRunHook",
    "StepCounterHook",
    "StopAtStepHook",
    "TrainSpec",
    "WarmStartSettings",
    "latest_checkpoint",
    "model_to_estimator",
    "train_and_evaluate",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    return _tensorflow_names.of_module("estimator", name, __all__)
