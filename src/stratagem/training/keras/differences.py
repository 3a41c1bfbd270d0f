"""What a Keras model cannot do under a strategy, and what it does otherwise there, as far as a model shows it.

The first is an error, the second one warning; both as early as `compile`.
"""

import numbers
from typing import Any

import keras

from stratagem._caller import warn_caller
from stratagem._checks import require_count
from stratagem.errors import StrategyError
from stratagem.strategies.strategy import Strategy
from stratagem.training.metrics import Metric

_WHOLE_BATCH = (keras.losses.Dice, keras.losses.Tversky)
_PAGE = "docs/guides/what_differs.md"


def refuse(model: Any, strategy: Strategy) -> None:
    """Refuses what cannot be done.

    Raises:
        StrategyError: The model has a state for each row of a batch, or no number of steps for each execution.
    """
    steps = model.steps_per_execution
    is_other_integer = isinstance(steps, numbers.Integral) and not isinstance(steps, bool)
    require_count(steps_per_execution=int(steps) if is_other_integer else steps)
    number = strategy.num_replicas_in_sync
    stateful = [each.name for each in model._flatten_layers() if isinstance(each, keras.layers.RNN) and each.stateful]
    if stateful and number > 1:
        raise StrategyError(
            f"layer {stateful[0]!r} of model {model.name!r} is stateful: from batch to batch it keeps a state for each "
            f"row, but {type(strategy).__name__} divides each batch over {number} replicas; leave stateful=True out, "
            f"or train with sg.OneDeviceStrategy()"
        )


def refuse_metrics(args: Any, kwargs: Any) -> None:
    """Refuses metrics for steps of one's own: Keras takes them for functions of one batch.

    Raises:
        StrategyError: There is one among the arguments of `compile`.
    """
    for each in keras.tree.flatten((args, kwargs)):
        if isinstance(each, Metric):
            raise StrategyError(
                f"compile takes metrics of Keras, got sg.metrics.{type(each).__name__}, which is for custom loops; "
                f"write keras.metrics.{type(each).__name__}()"
            )


def tell(model: Any, strategy: Strategy) -> None:
    """Warns of what gives other numbers than one device: it takes each replica's part of a batch for the whole."""
    number = strategy.num_replicas_in_sync
    if number == 1:
        return
    norms = [each.name for each in model._flatten_layers() if _is_local_norm(each)]
    losses = [type(each).__name__ for each in keras.tree.flatten(model.loss) if _is_of_whole_batch(each)]
    found = [
        *([f"batch normalization of {_named(norms)} (synchronized=True takes the whole batch)"] if norms else []),
        *([f"the loss {_named(losses)} (with axis= it has one value for each example)"] if losses else []),
    ]
    if found:
        warn_caller(
            f"model {model.name!r} gives other numbers on {number} replicas than on one device, because each replica "
            f"computes the following from its own part of a batch: {'; '.join(found)}. See {_PAGE}",
            UserWarning,
        )


def _is_local_norm(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized


def _is_of_whole_batch(loss: Any) -> bool:
    return isinstance(loss, _WHOLE_BATCH) and loss.axis is None


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
