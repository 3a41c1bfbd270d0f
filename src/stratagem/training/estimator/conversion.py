"""Makes an Estimator of a torch module or a Keras model that exists."""

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from stratagem.errors import EstimatorError
from stratagem.strategies.one_device import get_strategy
from stratagem.training.estimator.checks import described
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.specs import EstimatorSpec, ModeKeys, WarmStartSettings


def model_to_estimator(
    module: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    metrics: Mapping[str, Any] | None = None,
    predictions: Callable[[Any], Any] | None = None,
    keras_model: Any = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
) -> Estimator:
    """An Estimator that trains copies of a torch module or a Keras model, starting from its weights.

    Args:
        module: The module, or a compiled Keras model; it is not changed itself.
        loss: A function of (outputs, labels).
        optimizer: A function that makes the optimizer, given the parameters:
            `functools.partial(torch.optim.Adam, lr=1e-3)`.
        scheduler: A function that makes the scheduler, given the optimizer.
        metrics: As `eval_metric_ops` of `EstimatorSpec`.
        predictions: As in `EstimatorSpec`.
        keras_model: Instead of all these a Keras model, compiled; or a function that makes one, for models
            that cannot be copied. It is not changed itself. Batches may have weights of the examples, as a
            third part. A Keras model may come first, too.
        model_dir: Where checkpoints and summaries are kept.
        config: How to run; holds the strategies.
        warm_start_from: As of `Estimator`; what it does not name keeps the given weights.
    Raises:
        EstimatorError: Something is missing or of the wrong kind.
    """
    keras = sys.modules.get("keras")
    if keras_model is None and keras is not None and isinstance(module, keras.Model):
        module, keras_model = None, module
    if keras_model is not None:
        given = {"module": module, "loss": loss, "optimizer": optimizer, "scheduler": scheduler, "metrics": metrics}
        if extra := [name for name, value in {**given, "predictions": predictions}.items() if value is not None]:
            raise EstimatorError(f"keras_model is compiled with all that it needs; leave out {', '.join(extra)}")
        # Only when it is needed: it imports Keras.
        keras_models = importlib.import_module("stratagem.training.estimator.keras_models")
        return Estimator(keras_models.OfKeras(keras_model), model_dir, config, None, warm_start_from)
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
            eval_metric_ops=copy.deepcopy(metrics),  # they add up what they see
        )

    return Estimator(model_fn, model_dir, config, None, warm_start_from)
