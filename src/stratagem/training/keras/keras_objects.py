"""How Keras objects travel to the replicas: as they are, object by object.

Keras would send a model as a saved file, which cuts the ties between a layer, its variables and the
tensors in them, and fails for classes that it cannot find by name. Here every object is sent with its
attributes; tensors that are distributed travel as references. What Keras keeps by the address of an
object is put under the new address.
"""

import sys
import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stratagem import _env

if "keras" not in sys.modules:  # in a child
    _env.use_torch_for_keras()

from keras.src.backend import Variable
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import tracking
from keras.src.utils.backend_utils import DynamicBackend

_CONTAINERS = {tracking.TrackedList: list, tracking.TrackedDict: dict, tracking.TrackedSet: set}
STEPS = "_distributed_steps"
KNOWN = "_known_to_replicas"  # of a layer or a variable, by this side
# Of a layer: the way to its neighbours, which are too many to follow one inside the other. The model has them all.
NODES = frozenset({"_inbound_nodes", "_outbound_nodes"})
# Of a model or a layer: what runs the steps of this side, and knows of the others.
FUNCTIONS = frozenset({"train_function", "test_function", "predict_function", "_eval_epoch_iterator", STEPS, KNOWN})


def reduce(obj: Any) -> Any:
    """The way of an object, for `packing.reducers`; `NotImplemented` for all that is not Keras'."""
    base = _CONTAINERS.get(type(obj))
    if base is not None:
        return blank, (type(obj), base), (dict(obj.__dict__), base(obj)), None, None, _fill_container
    if isinstance(obj, Variable):
        state = {key: value for key, value in obj.__dict__.items() if key not in ("_value", KNOWN)}
        return _variable_of, (type(obj), obj._value), state, None, None, _fill
    if isinstance(obj, tracking.Tracker):
        return blank, (type(obj),), dict(obj.__dict__), None, None, _fill_tracker
    if isinstance(obj, KerasSaveable):
        state = {key: None if key in FUNCTIONS else value for key, value in obj.__dict__.items() if key not in NODES}
        return blank, (type(obj),), {**state, **{key: [] for key in NODES}}, None, None, _fill
    if isinstance(obj, DynamicBackend):  # of layers that prepare data; without its constructor it asks itself for ever
        return DynamicBackend, (obj.name,)
    return NotImplemented


def tensor_of(variable: Any) -> torch.Tensor:
    """The tensor that a Keras variable holds."""
    tensor: torch.Tensor = variable._value
    return tensor


def blank(kind: type, base: type = object) -> Any:
    """An object without its constructor having run."""
    return base.__new__(kind)  # type: ignore[call-overload]


def _variable_of(kind: type, tensor: torch.Tensor | None) -> Any:
    """The variable that holds a tensor: the same whenever it comes, as long as it is used."""
    known = _variables.get(tensor) if tensor is not None else None
    if known is not None and (variable := known()) is not None:
        return variable
    variable = blank(kind)
    variable._value = tensor
    if tensor is not None:
        _variables[tensor] = weakref.ref(variable)
    return variable


# By identity, weakly on both sides: a variable holds its tensor, and is held by the layers that use it.
_variables: Any = WeakIdKeyDictionary()


def _fill(obj: Any, state: dict[str, Any]) -> None:
    obj.__dict__.update(state)


def _fill_container(obj: Any, state: tuple[dict[str, Any], Any]) -> None:
    obj.__dict__.update(state[0])
    if isinstance(obj, list):
        list.extend(obj, state[1])
    elif isinstance(obj, dict):
        dict.update(obj, state[1])
    else:
        set.update(obj, state[1])


def _fill_tracker(obj: Any, state: dict[str, Any]) -> None:
    obj.__dict__.update(state)
    obj.stored_ids = {name: {id(each) for each in obj.config[name][1]} for name in state["stored_ids"]}
