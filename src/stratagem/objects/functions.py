"""Sends a function to the children once, and again only when something that it captures has changed.

A step is run thousands of times, and turning a function into bytes costs more than running a small
one. What it refers to (closure, globals, defaults, classes and modules of the user's) is walked and
compared by identity, and by value where a value could change; where that cannot be told, the
function is sent each time.
"""

import collections
import copyreg
import enum
import functools
import itertools
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np
import torch

from stratagem import _torch
from stratagem.processes.packing import global_names, is_filled, travels_by_value

_tokens = itertools.count(1)
_MAX_NODES = 1000
_MAX_CACHED = 16
NUM_KEPT_FUNCTIONS = 64  # how many of the last functions that they were sent children keep
_VALUES = frozenset({bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, type(...)})
_NOT_STATE = frozenset(
    {
        *("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__module__"),
        *("__orig_bases__", "__parameters__", "__weakref__", "_abc_impl"),
        *("__builtins__", "__spec__", "__loader__", "__cached__", "__file__"),
    }
)


@final
class FunctionCache:
    """What the children already have, as the controller remembers it.

    Args:
        is_reference: Whether an object travels as a reference, so that its content does not matter.
    """

    def __init__(self, is_reference: Callable[[Any], bool]) -> None:
        self._is_reference = is_reference
        self._known: dict[int, tuple[weakref.ref[Any], tuple[Any, ...], int, list[Any]]] = {}
        self._newest = 0

    def prepare(self, function: Any) -> tuple[int, Any]:
        """What to send: a token and the function, or the token alone if the children have it."""
        kept: list[Any] = []
        fingerprint = self._fingerprint(function, kept) if isinstance(function, types.FunctionType) else None
        known = self._known.get(id(function))
        if known is not None and known[2] <= self._newest - NUM_KEPT_FUNCTIONS:
            known = None
        if fingerprint is not None and known is not None and known[0]() is function and known[1] == fingerprint:
            return known[2], None
        token = self._newest = next(_tokens)
        self._known.pop(id(function), None)
        if fingerprint is not None:
            while len(self._known) >= _MAX_CACHED:
                self._known.pop(next(iter(self._known)))
            self._known[id(function)] = weakref.ref(function), fingerprint, token, kept
        return token, function

    def _fingerprint(self, function: Any, kept: list[Any]) -> tuple[Any, ...] | None:
        """Equal as long as nothing that travels with the function has changed; `None` if that cannot be told.

        Objects are known by their ids. They are put into `kept`, so that no other can take their place.
        """
        found: list[Any] = []
        todo: list[Any] = [function]
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            kind = type(value)
            if kind in _VALUES:
                found.append((kind, value))
            elif id(value) in seen or self._is_reference(value):
                found.append(id(value))  # the children are told when a reference ceases to exist
            elif kind is float or kind is complex:
                found.append(repr(value))  # tells 0.0 from -0.0
            elif len(seen) >= _MAX_NODES:
                return None
            else:
                is_definition = isinstance(value, types.FunctionType | type | types.ModuleType)
                is_sent_whole = is_definition and travels_by_value(value)
                # A function of the user's is known by its code: itself it would keep alive all that it captures.
                if kind is not types.FunctionType or not is_sent_whole:
                    kept.append(value)
                found.append(id(value))
                if is_sent_whole:
                    todo += _parts_of_definition(value, found)
                elif not is_definition:
                    parts = _parts(value, found)
                    if parts is None:
                        return None
                    todo += parts
                seen.add(id(value))
        return tuple(found)


def _parts(value: Any, found: list[Any]) -> Iterable[Any] | None:
    """What an object is made of when it travels; adds what it is besides. `None` if that cannot be told."""
    if isinstance(value, torch.Tensor):
        return _note_tensor(value, found)
    if type(value) is np.ndarray:
        return _note_array(value, found)
    if isinstance(value, enum.Enum):
        return ()  # one of a fixed set
    if type(value) in _COLLECTIONS:
        found.append(len(value))
        return [*value]
    if type(value) in _MAPPINGS:
        found.append(len(value))
        return [*value.keys(), *value.values(), getattr(value, "default_factory", None), getattr(value, "__dict__", 0)]
    for kind, attributes in _WRAPPERS.items():
        if isinstance(value, kind):
            return [getattr(value, name) for name in attributes]
    return (type(value), value.__dict__) if _is_only_its_dict(value) else None


_COLLECTIONS = (tuple, list, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_WRAPPERS: dict[Any, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinFunctionType: ("__self__",),
    functools.partial: ("__class__", "func", "args", "keywords", "__dict__"),
    property: ("__class__", "fget", "fset", "fdel"),
    staticmethod: ("__class__", "__func__"),
    classmethod: ("__class__", "__func__"),
    types.GetSetDescriptorType: (),
    types.MemberDescriptorType: (),
    types.WrapperDescriptorType: (),
}


def _parts_of_definition(value: Any, found: list[Any]) -> Iterable[Any]:
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value, found)
    if isinstance(value, enum.EnumMeta):
        return ()
    return [getattr(value, "__bases__", ()), *_named(vars(value))]


def _parts_of_function(function: types.FunctionType, found: list[Any]) -> Iterator[Any]:
    found[-1] = function.__code__  # equal to one with the same content, and as good
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    for cell in function.__closure__ or ():
        yield cell.cell_contents if is_filled(cell) else None
    for name in global_names(function.__code__):
        if name in function.__globals__:
            yield from (name, function.__globals__[name])


def _named(members: Any) -> list[Any]:
    return [part for name, value in members.items() if name not in _NOT_STATE for part in (name, value)]


def _note_tensor(tensor: torch.Tensor, found: list[Any]) -> tuple[()] | None:
    # The version counter does not see what is written through `.data` or through numpy.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    version = None if tensor.is_inference() else _torch.version_of(tensor)
    found += [(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, version), zlib.crc32(content.data)]
    return ()


def _note_array(array: Any, found: list[Any]) -> tuple[()] | None:
    if array.dtype.hasobject:
        return None
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found += [(array.dtype, array.shape, array.strides, array.flags.writeable), zlib.crc32(content.data)]
    return ()


_USUAL_STATE = [getattr(each, "__getstate__", None) for each in (object, torch.nn.Module)]


class _Plain:
    """An object with a `__dict__` and nothing else."""


def _is_only_its_dict(value: Any) -> bool:
    """Whether all that an object is stands in its `__dict__`: no slots, nothing in C, no way of its own to travel."""
    kind: Any = type(value)
    return bool(
        kind.__basicsize__ == _Plain.__basicsize__
        and kind.__itemsize__ == 0
        and hasattr(value, "__dict__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) in _USUAL_STATE
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and kind not in copyreg.dispatch_table
    )


@functools.lru_cache(maxsize=256)
@final
class ReceivedFunctions:
    """The functions that a child has been sent, as long as the controller may name them."""

    def __init__(self) -> None:
        self._functions: dict[int, Any] = {}

    def take(self, prepared: tuple[int, Any]) -> Any:
        """The function that `FunctionCache.prepare` stands for on the other side."""
        token, function = prepared
        if function is None:
            return self._functions[token]
        self._functions[token] = function
        for old in [each for each in self._functions if each <= token - NUM_KEPT_FUNCTIONS]:
            del self._functions[old]
        return function

    def clear(self) -> None:
        """Forgets all of them."""
        self._functions.clear()
