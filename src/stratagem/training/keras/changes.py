"""Notices what a program changes in a compiled Keras model between two steps, besides values of variables.

Numbers and texts in layers, and the layers in them, are found as in all modules (`objects.captured`). Here are their
other attributes, the optimizer, the losses, the metrics, learning-rate schedules and what Keras is set to: when one of
them is not what it was, the replicas get them anew.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import keras
import torch
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving.keras_saveable import KerasSaveable

from stratagem.objects.kinds import PLAIN
from stratagem.training.keras.keras_objects import FUNCTIONS, KNOWN, NODES

_PARTS = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")
# Of a layer: what torch keeps is found elsewhere, and `history` is for the program.
_OTHERS = frozenset((*torch.nn.Module().__dict__, *_PARTS, *FUNCTIONS, *NODES, "history"))


def parts_of(model: Any) -> dict[str, Any]:
    """What a model has from `compile`, and other optimizers that its own steps use; by attribute."""
    others = {name: each for name, each in model.__dict__.items() if isinstance(each, BaseOptimizer)}
    return {name: getattr(model, name, None) for name in _PARTS} | others


def optimizers_in(parts: Mapping[str, Any]) -> list[Any]:
    """The optimizers among the parts of a model."""
    return [part for part in parts.values() if isinstance(part, BaseOptimizer)]


def inside(optimizer: Any) -> list[Any]:
    """The optimizers that one hands gradients on to."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return [optimizer.inner_optimizer]
    several = getattr(keras.optimizers, "MultiOptimizer", ())  # Keras has it since 3.15
    return list(optimizer.optimizers) if isinstance(optimizer, several) else []


def innermost(optimizer: Any) -> list[Any]:
    """The optimizers that update variables themselves: this one, or those inside it."""
    inner = inside(optimizer)
    return [each for one in inner for each in innermost(one)] if inner else [optimizer]


def kept_by(optimizer: Any) -> list[Any]:
    """The variables of an optimizer; also those that Keras leaves out of its list, as one of Nadam's."""
    objects = (optimizer, *inside(optimizer), *innermost(optimizer))
    own = [each for obj in objects for each in obj.__dict__.values() if isinstance(each, keras.Variable)]
    return list({id(each): each for each in (*optimizer.variables, *own)}.values())


def variables_of(model: Any, parts: Mapping[str, Any]) -> list[Any]:
    """All variables of a model with these parts: weights, and what its metrics and its optimizers keep."""
    kept = [each for optimizer in optimizers_in(parts) for each in kept_by(optimizer)]
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


class Members(NamedTuple):
    """The attributes of a layer that are neither torch's nor numbers or texts."""

    layer: Any
    now: dict[str, Any]
    gone: list[str]

    def give(self) -> None:
        """Gives them to the layer, in a replica."""
        self.layer.__dict__.update(self.now)
        for name in self.gone:
            self.layer.__dict__.pop(name, None)


@final
class Seen:
    """A compiled model as the replicas have it; its layers and variables may be in other models too.

    Args:
        model: The model.
        parts: What it was compiled with.
        variables: All that it has.
    """

    def __init__(self, model: Any, parts: Mapping[str, Any], variables: Sequence[Any]) -> None:
        self._parts = dict(parts)
        self._variables, self._options = list(variables), list(map(_options, variables))
        self._settings = Settings.now()
        self._layers = [_Layer.of(each) for each in model._flatten_layers()]
        self._num_changes = [0] * len(self._layers)  # of each layer, that the replicas know of through this model
        self._objects = _inner(list(parts.values()))
        self._attributes: list[dict[str, Any]] = []

    def send(self) -> None:
        """Takes the model as it is now as what the replicas have."""
        for each, options in zip(self._variables, self._options, strict=True):
            each.__dict__[KNOWN] = options
        self.note()

    def note(self) -> None:
        """Takes what the last step left as what the replicas have."""
        self._attributes = [dict(each.__dict__) for each in self._objects]
        for layer in self._layers:
            layer.note()
        self._num_changes = [layer.num_changes for layer in self._layers]

    def is_current(self, parts: Mapping[str, Any], variables: Sequence[Any]) -> bool:
        """Whether the model still is the same, with these parts and variables; but for its layers."""
        return (
            self._settings == Settings.now()
            and _are_same(parts, self._parts)
            and _are_identical(variables, self._variables)
            and list(map(_options, variables)) == self._options
            and [each.__dict__.get(KNOWN) for each in variables] == self._options
            and all(map(_are_same, map(vars, self._objects), self._attributes))
        )

    def changed_layers(self) -> list[Members]:
        """Those of the layers that are not as they were, also if another model has told replicas of it."""
        pairs = zip(self._layers, self._num_changes, strict=True)
        return [layer.members() for layer, number in pairs if layer.has_changed() or layer.num_changes != number]


@final
class _Layer:
    """A layer as the replicas have it, whichever models it is in.

    Args:
        layer: The layer, which keeps this.
    """

    def __init__(self, layer: Any) -> None:
        self.num_changes = 0
        self._layer = layer
        self._known: dict[str, Any] = {}
        self._ids: list[int] = []
        self._containers: list[tuple[Any, list[Any]]] = []

    @classmethod
    def of(cls, layer: Any) -> "_Layer":
        """What is known of a layer."""
        if KNOWN not in layer.__dict__:
            layer.__dict__[KNOWN] = cls(layer)
        known: _Layer = layer.__dict__[KNOWN]
        return known

    def note(self) -> None:
        # For each layer in each step: most have changed nothing.
        if self._ids != list(map(id, self._layer.__dict__.values())):
            self._known = dict(self._layer.__dict__)  # as long as it is held no other object has its id
            self._ids = list(map(id, self._known.values()))
            self._containers = [(each, []) for name, each in self._known.items() if _is_container(name, each)]
        for container, contents in self._containers:
            contents[:] = _contents(container)

    def has_changed(self) -> bool:
        """Whether it is not as it was; counts the changes, of which replicas are to be told."""
        has_changed = bool(self._ids) and not self._is_same()
        self.num_changes += has_changed
        return has_changed

    def _is_same(self) -> bool:
        if any(not _are_identical(_contents(each), contents) for each, contents in self._containers):
            return False
        return self._ids == list(map(id, self._layer.__dict__.values())) or _are_same(
            _members(self._layer.__dict__), _members(self._known)
        )

    def members(self) -> Members:
        now = _members(self._layer.__dict__)
        return Members(self._layer, now, [name for name in _members(self._known) if name not in now])


def _members(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if type(value) not in PLAIN and name not in _OTHERS and not isinstance(value, BaseOptimizer)
    }


def _is_container(name: str, value: Any) -> bool:
    return isinstance(value, list | dict | set) and not name.startswith("_") and name not in _OTHERS


def _contents(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _are_identical(now: Sequence[Any], known: Sequence[Any]) -> bool:
    return len(now) == len(known) and all(map(operator.is_, now, known))


_options = operator.attrgetter("_trainable", "_regularizer", "_constraint")  # of a variable


def _are_same(now: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return len(now) == len(known) and all(map(operator.is_, map(now.get, known), known.values()))


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
