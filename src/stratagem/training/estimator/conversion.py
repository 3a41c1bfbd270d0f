"""Makes an Estimator of a module that exists."""

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from stratagem.strategies.one_device import get_strategy
from stratagem.training.estimator.checks import EstimatorError, described
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.specs import EstimatorSpec, ModeKeys


def model_to_estimator(
    module: torch.nn.Module | None = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    metrics: Mapping[str, Any] | None = None,
    predictions: Callable[[Any], Any] | None = None,
    keras_model: Any = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
) -> Estimator:
    """An Estimator that trains copies of a torch module, starting from its weights.

    Args:
        module: The module; it is not changed itself.
        loss: A function of (outputs, labels).
        optimizer: A function that makes the optimizer, given the parameters:
            `functools.partial(torch.optim.Adam, lr=1e-3)`.
        scheduler: A function that makes the scheduler, given the optimizer.
        metrics: As `eval_metric_ops` of `EstimatorSpec`.
        predictions: As in `EstimatorSpec`.
        keras_model: Not taken yet: compile the model in a strategy's scope and call its `fit`.
        model_dir: Where checkpoints and summaries are kept.
        config: How to run; holds the strategies.
    Raises:
        EstimatorError: Something is missing or of the wrong kind.
    """
    if keras_model is not None:
        raise EstimatorError(
            "keras_model is not taken yet; call compile and fit of the Keras model inside a strategy's scope, or give "
            "module=, loss= and optimizer= for a torch module"
        )
    if not isinstance(module, torch.nn.Module):
        raise EstimatorError(f"module is a torch module, got {described(module)}")
    if loss is None or not callable(loss):
        raise EstimatorError(f"loss is a function of (outputs, labels), got {described(loss)}")
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise EstimatorError(
            f"optimizer is a function that makes one for given parameters, got {type(optimizer).__name__}; write "
            f"optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )

    def model_fn(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        own = copy.deepcopy(module)
        get_strategy().adopt(own)
        made = optimizer(own.parameters()) if mode == ModeKeys.TRAIN else None
        return EstimatorSpec(
            mode,
            own,
            loss,
            optimizer=made,
            scheduler=scheduler(made) if scheduler is not None and made is not None else None,
            predictions=predictions,
            eval_metric_ops=metrics,
        )

    return Estimator(model_fn, model_dir, config)
