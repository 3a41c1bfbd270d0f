"""Notices what a program changes in a compiled Keras model between two steps, besides values of variables.

Attributes of layers are found as those of all modules (`replicas.control`). Here are the optimizer, the
losses, the metrics, learning-rate schedules and what Keras is set to: when one of them is not what it was, the
replicas get all anew.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving.keras_saveable import KerasSaveable

_PARTS = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")


def parts_of(model: Any) -> dict[str, Any]:
    """What a model has from `compile`, and other optimizers that its own steps use; by attribute."""
    others = {name: each for name, each in model.__dict__.items() if isinstance(each, BaseOptimizer)}
    return {name: getattr(model, name, None) for name in _PARTS} | others


def optimizers_in(parts: Mapping[str, Any]) -> list[Any]:
    """The optimizers among the parts of a model."""
    return [part for part in parts.values() if isinstance(part, BaseOptimizer)]


def variables_of(model: Any, parts: Mapping[str, Any]) -> list[Any]:
    """All variables of a model with these parts: weights, and what its metrics and its optimizers keep."""
    kept = [each for optimizer in optimizers_in(parts) for each in optimizer.variables]
    return list({id(each): each for each in (*model.variables, *model.metrics_variables, *kept)}.values())


class Settings(NamedTuple):
    """What Keras is set to for the whole process."""

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: str

    @classmethod
    def now(cls) -> "Settings":
        """Those of this moment."""
        config = keras.config
        return cls(config.floatx(), config.epsilon(), config.image_data_format(), config.dtype_policy().name)

    def apply(self) -> None:
        """Sets Keras so in this process."""
        keras.config.set_floatx(self.floatx)
        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        keras.config.set_dtype_policy(self.dtype_policy)


@final
class Seen:
    """A compiled model as the replicas have it.

    Args:
        parts: What it was compiled with.
        variables: All that it has.
    """

    def __init__(self, parts: Mapping[str, Any], variables: Sequence[Any]) -> None:
        self._parts = dict(parts)
        self._variables = [(each, each._trainable) for each in variables]
        self._settings = Settings.now()
        self._objects = _inner(list(parts.values()))
        self._attributes: list[dict[str, Any]] = []
        self.note()

    def note(self) -> None:
        """Takes what the last step left as what the replicas have."""
        self._attributes = [dict(each.__dict__) for each in self._objects]

    def is_current(self, parts: Mapping[str, Any], variables: Sequence[Any]) -> bool:
        """Whether the model still is the same, with these parts and variables."""
        return (
            self._settings == Settings.now()
            and _are_same(parts, self._parts)
            and len(variables) == len(self._variables)
            and all(
                now is known and now._trainable == trainable
                for now, (known, trainable) in zip(variables, self._variables, strict=True)
            )
            and all(
                _are_same(each.__dict__, known) for each, known in zip(self._objects, self._attributes, strict=True)
            )
        )


def _are_same(now: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return len(now) == len(known) and all(now.get(name) is value for name, value in known.items())


_KINDS = (KerasSaveable, keras.optimizers.schedules.LearningRateSchedule)
_LEFT_OUT = (keras.Layer, keras.Variable)


def _inner(objects: Sequence[Any]) -> list[Any]:
    """Keras' objects among these and in them, at any depth; without layers and variables."""
    found: dict[int, Any] = {}
    todo = list(objects)
    while todo:
        each = todo.pop()
        if isinstance(each, list | tuple | set):
            todo += each
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, _KINDS) and not isinstance(each, _LEFT_OUT) and id(each) not in found:
            found[id(each)] = each
            todo += each.__dict__.values()
    return list(found.values())
