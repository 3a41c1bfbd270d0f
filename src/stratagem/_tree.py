"""Walks over nested values: tuples, lists, dicts, namedtuples, dataclasses, `UserDict`s and what else torch knows.

Owns what a container is: what torch's private `torch.utils._pytree` says (since torch 2.2), of which this is the only
importer, and records: dataclasses of a program's own and kinds of `UserDict`. What is not a container is a leaf, `None`
too. Plain tuples, lists and dicts are most of what there is and are walked several times in each run, so they are
walked here, without torch.
"""

import builtins
import collections
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree

from stratagem.errors import StrategyError

IsLeaf: TypeAlias = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Structure:
    """How leaves hang together; equal where the containers are.

    Args:
        kind: The class of the container; `None` if it is a leaf.
        form: What besides its parts makes it this one: keys, or what torch needs.
        parts: The structures of its parts.
        like: A record whose other attributes those that are made get.
    """

    kind: type | None = None
    form: Any = None
    parts: "tuple[Structure, ...]" = ()
    like: Any = dataclasses.field(default=None, compare=False, repr=False)


_LEAF = Structure()
_DEEPEST = 200  # Python's own limit is about twice that, and the program has come here by some calls
_ALWAYS_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}  # most that there are
_BEHAVIOUR = {"__iter__", "__getitem__", "__call__"}


def leaves(value: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of a nesting, in order.

    Args:
        value: The nesting.
        is_leaf: Tells which containers are leaves too.
    """
    found: list[Any] = []
    _collect(value, is_leaf, found, 0)
    return found


def map(function: Callable[[Any], Any], value: Any, is_leaf: IsLeaf | None = None) -> Any:
    """The same nesting with what a function makes of its leaves; whatever it raises comes through.

    A record of which nothing has changed is itself, not another one.

    Args:
        function: Called with each leaf, in order.
        value: The nesting.
        is_leaf: Tells which containers are leaves too.
    """
    return _map(function, value, is_leaf, 0)


def _map(function: Callable[[Any], Any], value: Any, is_leaf: IsLeaf | None, depth: int) -> Any:
    if is_leaf is not None and is_leaf(value):
        return function(value)
    kind = type(value)
    if kind in _ALWAYS_LEAVES:
        return function(value)
    if depth > _DEEPEST:
        raise _too_deep()
    if kind is tuple:
        return tuple([_map(function, each, is_leaf, depth + 1) for each in value])
    if kind is list:
        return [_map(function, each, is_leaf, depth + 1) for each in value]
    if kind is dict:
        return {key: _map(function, each, is_leaf, depth + 1) for key, each in value.items()}
    opened = _opened(value)
    if opened is None:
        return function(value)
    parts, form = opened
    made = [_map(function, each, is_leaf, depth + 1) for each in parts]
    if _is_record(kind) and all(new is old for new, old in zip(made, parts, strict=True)):
        return value
    return _closed(kind, form, made, value)


def map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """The same nesting with what a function makes of the leaves of a kind, and the others as they are.

    Containers without such leaves are not copied: who changes them changes the program's.
    """
    return _map_only(kind, function, value, 0)


def _map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any, depth: int) -> Any:
    if isinstance(value, kind):
        return function(value)
    own = type(value)
    if own in _ALWAYS_LEAVES:
        return value
    if depth > _DEEPEST:
        raise _too_deep()
    if own is tuple or own is list:
        made = [
            function(each)
            if isinstance(each, kind)
            else each
            if type(each) in _ALWAYS_LEAVES
            else _map_only(kind, function, each, depth + 1)
            for each in value
        ]
        return own(made) if any(builtins.map(operator.is_not, made, value)) else value
    if own is dict:
        by_key = {key: _map_only(kind, function, each, depth + 1) for key, each in value.items()}
        return by_key if any(by_key[key] is not each for key, each in value.items()) else value
    if not any(isinstance(each, kind) for each in leaves(value)):
        return value
    return _map(lambda each: function(each) if isinstance(each, kind) else each, value, None, depth)


def flatten(value: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a nesting, and how they hang together."""
    found: list[Any] = []
    return found, _flattened(value, is_leaf, found, 0)


def flatten_as(form: Structure, value: Any) -> list[Any]:
    """The parts of a nesting that stand where another has its leaves; they may be containers.

    Raises:
        ValueError: The value does not have the form.
    """
    if form.kind is None:
        return [value]
    opened = _opened(value)
    if type(value) is not form.kind or opened is None:
        raise ValueError(f"there is a {type(value).__name__} in the place of a {form.kind.__name__}")
    parts, own = opened
    if form.kind is dict and set(own) == set(form.form):
        by_key = dict(zip(own, parts, strict=True))
        parts = [by_key[key] for key in form.form]
    elif own != form.form or len(parts) != len(form.parts):
        raise ValueError(
            f"the parts or keys of a {form.kind.__name__} are {own or len(parts)}, not {form.form or len(form.parts)}"
        )
    return [each for part, under in zip(parts, form.parts, strict=True) for each in flatten_as(under, part)]


def unflatten(found: Iterable[Any], form: Structure) -> Any:
    """The nesting of such leaves.

    Raises:
        ValueError: They are too few or too many.
    """
    waiting = iter(found)
    made = _unflattened(waiting, form)
    if next(waiting, _LEAF) is not _LEAF:
        raise ValueError("there are more leaves than the structure has places")
    return made


def structure(value: Any, is_leaf: IsLeaf | None = None) -> Structure:
    """How the leaves of a nesting hang together."""
    return flatten(value, is_leaf)[1]


def is_namedtuple(value: Any) -> bool:
    """Whether a value is of a class that `collections.namedtuple` or `typing.NamedTuple` made."""
    return _pytree.is_namedtuple_instance(value)


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass of a program's own, or a kind of `UserDict`."""
    return _is_record(type(value))


def parts_by_name(value: Any) -> dict[Any, Any]:
    """The parts of a container by key, name or position; none of a leaf."""
    if is_namedtuple(value):
        return dict(value._asdict())
    opened = _opened(value)
    if opened is None:
        return {}
    parts, form = opened
    named = isinstance(value, dict) or _is_record(type(value))
    return dict(
        zip(list(value) if isinstance(value, dict) else form if named else range(len(parts)), parts, strict=True)
    )


def _collect(value: Any, is_leaf: IsLeaf | None, found: list[Any], depth: int) -> None:
    kind = type(value)
    if (is_leaf is not None and is_leaf(value)) or kind in _ALWAYS_LEAVES:
        found.append(value)
    elif kind is tuple or kind is list:
        if depth > _DEEPEST:
            raise _too_deep()
        for each in value:
            _collect(each, is_leaf, found, depth + 1)
    elif kind is dict:
        if depth > _DEEPEST:
            raise _too_deep()
        for each in value.values():
            _collect(each, is_leaf, found, depth + 1)
    elif (opened := _opened(value)) is not None:
        if depth > _DEEPEST:
            raise _too_deep()
        for each in opened[0]:
            _collect(each, is_leaf, found, depth + 1)
    else:
        found.append(value)


def _flattened(value: Any, is_leaf: IsLeaf | None, found: list[Any], depth: int) -> Structure:
    if type(value) in _ALWAYS_LEAVES:
        found.append(value)
        return _LEAF
    opened = None if is_leaf is not None and is_leaf(value) else _opened(value)
    if opened is None:
        found.append(value)
        return _LEAF
    if depth > _DEEPEST:
        raise _too_deep()
    parts, form = opened
    kind = type(value)
    under = tuple([_flattened(each, is_leaf, found, depth + 1) for each in parts])
    is_plain = kind is tuple or kind is list or kind is dict
    return Structure(kind, form, under, value if not is_plain and _is_record(kind) else None)


def _too_deep() -> StrategyError:
    return StrategyError(
        f"a nesting of values is at most {_DEEPEST} deep, got one that is deeper or contains itself; make it flat, or "
        f"make it inside the function"
    )


def _unflattened(waiting: Iterator[Any], form: Structure) -> Any:
    if form.kind is None:
        try:
            return next(waiting)
        except StopIteration:
            raise ValueError("there are fewer leaves than the structure has places") from None
    return _closed(form.kind, form.form, [_unflattened(waiting, each) for each in form.parts], form.like)


def _opened(value: Any) -> tuple[list[Any], Any] | None:
    """The parts of a container and what else makes it this one; `None` if it is a leaf."""
    kind = type(value)
    if kind in _ALWAYS_LEAVES:
        return None
    if kind is tuple or kind is list:
        return list(value), None
    if kind is dict:
        return list(value.values()), tuple(value)
    if kind in _pytree.SUPPORTED_NODES or issubclass(kind, tuple):
        parts, form = _pytree.tree_flatten(value, lambda each: each is not value)
        return None if len(parts) == 1 and parts[0] is value else (parts, form)
    if not _is_record(kind):
        if kind.__module__.startswith("stratagem."):
            _ALWAYS_LEAVES.add(kind)
        return None
    if isinstance(value, collections.UserDict):
        return list(value.data.values()), tuple(value.data)
    names = tuple(each.name for each in dataclasses.fields(value))
    if not all(hasattr(value, name) for name in names):
        return None  # it is not finished, and so no container
    return [getattr(value, name) for name in names], names


def _closed(kind: type, form: Any, parts: list[Any], like: Any) -> Any:
    """The container of such parts."""
    if kind is tuple or kind is list:
        return kind(parts)
    if kind is dict:
        return dict(zip(form, parts, strict=True))
    if not _is_record(kind):
        return _pytree.tree_unflatten(parts, form)
    made = copy.copy(like)
    if isinstance(made, collections.UserDict):
        made.data = dict(zip(form, parts, strict=True))
        return made
    for name, part in zip(form, parts, strict=True):
        object.__setattr__(made, name, part)  # also where it is frozen
    return made


def _is_record(kind: type) -> bool:
    if not (hasattr(kind, "__dataclass_fields__") or collections.UserDict in kind.__mro__):
        return False
    if collections.UserDict not in kind.__mro__ and any(_BEHAVIOUR & vars(each).keys() for each in kind.__mro__):
        return False  # a dataset or a function that is written as a dataclass
    is_of_torch = kind in _pytree.SUPPORTED_NODES or issubclass(kind, torch.nn.Module | torch.Tensor)
    return not is_of_torch and not kind.__module__.startswith("stratagem.")
