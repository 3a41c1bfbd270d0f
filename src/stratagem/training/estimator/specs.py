"""What a model function, an input function and a training are described with.

Owns the values and the rules that they obey; what is done with them is the session's.
"""

import enum
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from stratagem._checks import require_count, require_seconds
from stratagem.errors import EstimatorError
from stratagem.training.estimator.checks import described, require_input_fn
from stratagem.training.estimator.hooks import CheckpointSaverListener, SessionRunHook, require_hooks, require_listeners


class ModeKeys(enum.StrEnum):
    """What a model is built for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """What a model function returns: the module, and functions that say what to do with its outputs.

    The functions are called in every replica, with that replica's part of a batch; losses and
    metrics that are means over examples come out as those of the global batch on one device.

    Args:
        mode: The mode that the model function was called with.
        module: The torch module; called with the features.
        loss: A function of (outputs, labels); needed to train and to evaluate.
        optimizer: The torch optimizer of the module's parameters; needed to train.
        scheduler: A learning-rate scheduler; takes one step after each training step.
        train_op: A function of the loss that is called in place of `loss.backward()` and
            `optimizer.step()`: to clip gradients, for instance.
        predictions: A function of the outputs that gives a tensor, or a dict of tensors, with one
            row for each example; by default the outputs are the predictions.
        eval_metric_ops: For each name a function of (outputs, labels) that gives a mean over the
            examples, or an object with `update(outputs, labels)` and `compute()`, which sees
            whole batches.
        export_outputs: For each name of a signature a function of the outputs; by default the
            predictions are exported as `serving_default`.
        extra_state: For each name an object with `state_dict` and `load_state_dict` that checkpoints
            keep too: averages of weights, a gradient scaler.
        training_hooks: Hooks for training, beside those of `train`.
        evaluation_hooks: Hooks for evaluation, beside those of `evaluate`.
        prediction_hooks: Hooks for prediction, beside those of `predict`.
    Raises:
        EstimatorError: Something is missing for the mode, or is of the wrong kind.
    """

    mode: ModeKeys | str
    module: torch.nn.Module = None  # type: ignore[assignment]  # refused below, with what to write
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    train_op: Callable[[torch.Tensor], Any] | None = None
    predictions: Callable[[Any], Any] | None = None
    eval_metric_ops: Mapping[str, Any] | None = None
    export_outputs: Mapping[str, Callable[[Any], Any]] | None = None
    extra_state: Mapping[str, Any] | None = None
    training_hooks: Sequence[SessionRunHook] = ()
    evaluation_hooks: Sequence[SessionRunHook] = ()
    prediction_hooks: Sequence[SessionRunHook] = ()

    def __post_init__(self) -> None:
        if self.mode not in list(ModeKeys):
            raise EstimatorError(f"mode is one of {', '.join(map(repr, map(str, ModeKeys)))}, got {self.mode!r}")
        if not isinstance(self.module, torch.nn.Module):
            raise EstimatorError(
                f"module is a torch module, got {described(self.module)}. A model function builds no graph: it "
                f"returns the module, and functions for each step: EstimatorSpec(mode, module, loss=lambda outputs, "
                f"labels: ..., optimizer=torch.optim.SGD(module.parameters(), lr=0.1))"
            )
        for name in ("loss", "train_op", "predictions"):
            _require_function(name, getattr(self, name))
        for name in ("eval_metric_ops", "export_outputs"):
            self._check_named(name, getattr(self, name))
        self._check_extra_state()
        if self.mode != ModeKeys.PREDICT and self.loss is None:
            raise EstimatorError(f"a spec for mode {str(self.mode)!r} needs loss=, a function of (outputs, labels)")
        if self.mode == ModeKeys.TRAIN:
            self._check_training()
        for name in ("training_hooks", "evaluation_hooks", "prediction_hooks"):
            object.__setattr__(self, name, require_hooks(name, getattr(self, name)))

    def _check_training(self) -> None:
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise EstimatorError(
                f"a spec for mode 'train' needs optimizer=, a torch optimizer made in the model function, "
                f"got {described(self.optimizer)}"
            )
        own = {id(each) for each in self.module.parameters()}
        if not any(id(each) in own for group in self.optimizer.param_groups for each in group["params"]):
            raise EstimatorError(
                f"optimizer {type(self.optimizer).__name__} has no parameter of module {type(self.module).__name__}; "
                f"make it with module.parameters(), in the same call of the model function"
            )
        if self.scheduler is not None and not isinstance(self.scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise EstimatorError(f"scheduler is a torch LRScheduler, got {described(self.scheduler)}")
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise EstimatorError(
                "scheduler takes a step after each training step, and ReduceLROnPlateau needs a metric for that; "
                "use another scheduler, or step it in a hook"
            )

    def _check_extra_state(self) -> None:
        if not isinstance(self.extra_state, Mapping | None):
            raise EstimatorError(f"extra_state is a dict from names to objects, got {described(self.extra_state)}")
        for name, each in (self.extra_state or {}).items():
            if not all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict")):
                raise EstimatorError(
                    f"extra_state[{name!r}] is an object with state_dict and load_state_dict, got {described(each)}"
                )

    def _check_named(self, name: str, functions: Any) -> None:
        if functions is None:
            return
        if not isinstance(functions, Mapping):
            raise EstimatorError(f"{name} is a dict from names to functions, got {described(functions)}")
        for key, function in functions.items():
            if name == "eval_metric_ops" and key in ("loss", "global_step"):
                raise EstimatorError(f"evaluate adds {key!r} itself; give that metric in eval_metric_ops another name")
            if name == "eval_metric_ops" and callable(getattr(function, "update_state", None)):
                raise EstimatorError(
                    f"{name}[{key!r}] is a function of (outputs, labels), or an object with update and compute, got "
                    f"{described(function)}, whose update_state takes labels first; write "
                    f"lambda outputs, labels: ... that gives the mean over a batch"
                )
            if not (name == "eval_metric_ops" and is_metric(function)):
                _require_function(f"{name}[{key!r}]", function)


def is_metric(metric: Any) -> bool:
    """Whether a metric gathers whole batches itself."""
    return callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))


@dataclass(frozen=True)
class Input:
    """What an input function may return to say how data becomes global batches.

    Anything else that it returns is taken as `Input(data)`: one pass over a DataLoader or over an
    iterable of global batches.

    Args:
        data: Whatever `strategy.distribute` takes; batches are (features, labels) or features.
        global_batch_size: The number of examples in a global batch, for a dataset, tensors and arrays.
        shuffle: Whether each pass has a new order, for a dataset, tensors and arrays.
        num_epochs: The number of passes; `None` never ends.
    """

    data: Any
    global_batch_size: int | None = None
    shuffle: bool = False
    num_epochs: int | None = 1

    def __post_init__(self) -> None:
        if self.num_epochs is not None:
            require_count(EstimatorError, num_epochs=self.num_epochs)


@dataclass(frozen=True)
class TrainSpec:
    """The training half of `train_and_evaluate`.

    Args:
        input_fn: Gives the data to train on.
        max_steps: The global step to train to; `None` trains until the input ends.
        hooks: Hooks for training.
        saving_listeners: Who is told of checkpoints.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] = ()
    saving_listeners: Sequence[CheckpointSaverListener] = ()

    def __post_init__(self) -> None:
        require_input_fn(self.input_fn)
        if self.max_steps is not None:
            require_count(EstimatorError, max_steps=self.max_steps)
        object.__setattr__(self, "saving_listeners", require_listeners(self.saving_listeners))
        object.__setattr__(self, "hooks", require_hooks("hooks", self.hooks))


@dataclass(frozen=True)
class EvalSpec:
    """The evaluating half of `train_and_evaluate`.

    Args:
        input_fn: Gives the data to evaluate on.
        steps: How many batches of it; `None` takes all.
        name: Keeps summaries of several evaluations apart.
        hooks: Hooks for evaluation.
        throttle_secs: The least number of seconds between the starts of two evaluations. An evaluation needs a new
            checkpoint; the last checkpoint is always evaluated.
        start_delay_secs: How many seconds an evaluator task of a cluster waits before its first evaluation.
        exporters: Has no meaning here; TensorFlow's default, None, is taken.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] = ()
    throttle_secs: float = 600
    start_delay_secs: float = 0
    exporters: InitVar[None] = None

    def __post_init__(self, exporters: Any) -> None:
        if exporters:
            raise EstimatorError(
                f"exporters is there for TensorFlow's programs, and None here, got {described(exporters)}; call "
                f"estimator.export(folder) after train_and_evaluate"
            )
        require_seconds(EstimatorError, or_zero=True, start_delay_secs=self.start_delay_secs)
        require_input_fn(self.input_fn)
        if self.steps is not None:
            require_count(EstimatorError, steps=self.steps)
        object.__setattr__(self, "hooks", require_hooks("hooks", self.hooks))
        require_seconds(EstimatorError, or_zero=True, throttle_secs=self.throttle_secs)


@dataclass(frozen=True)
class WarmStartSettings:
    """Which weights a new model takes from the checkpoint of another.

    Args:
        ckpt_to_initialize_from: A checkpoint, or a folder of which the newest is taken.
        vars_to_warm_start: A regular expression; weights are taken if it is found in their name.
        var_name_to_prev_var_name: For weights that had another name there.
    """

    ckpt_to_initialize_from: str | os.PathLike[str]
    vars_to_warm_start: str = ".*"
    var_name_to_prev_var_name: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.ckpt_to_initialize_from, str | os.PathLike):
            raise EstimatorError(
                f"ckpt_to_initialize_from is a checkpoint or a folder with checkpoints, got "
                f"{described(self.ckpt_to_initialize_from)}"
            )
        try:
            re.compile(self.vars_to_warm_start)
        except (re.error, TypeError) as error:
            raise EstimatorError(
                f"vars_to_warm_start is a regular expression, got {self.vars_to_warm_start!r}: {error}"
            ) from error


def _require_function(name: str, function: Any) -> None:
    if isinstance(function, torch.Tensor):
        raise EstimatorError(
            f"{name} is a function, got a tensor: a model function builds the module once, and the function is called "
            f"in every step; write {name}=lambda ...: ..."
        )
    if function is not None and not callable(function):
        raise EstimatorError(f"{name} is a function, got {described(function)}")
