"""Walks over nested values: tuples, lists, dicts, namedtuples and what else torch knows as a container.

Owns what a container is, which is what torch's private `torch.utils._pytree` says (since torch 2.2), and is the only
file that imports it. What is not a container is a leaf, `None` too. Plain tuples, lists and dicts are most of what
there is and are walked several times in each run, so they are walked here, without torch.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch.utils import _pytree

Structure: TypeAlias = _pytree.TreeSpec
"""How leaves hang together; equal where the containers are."""

IsLeaf: TypeAlias = Callable[[Any], bool]


def leaves(value: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of a nesting, in order.

    Args:
        value: The nesting.
        is_leaf: Tells which containers are leaves too.
    """
    found: list[Any] = []
    _collect(value, is_leaf, found)
    return found


def map(function: Callable[[Any], Any], value: Any, is_leaf: IsLeaf | None = None) -> Any:
    """The same nesting with what a function makes of its leaves; whatever it raises comes through.

    Args:
        function: Called with each leaf, in order.
        value: The nesting.
        is_leaf: Tells which containers are leaves too.
    """
    if is_leaf is not None and is_leaf(value):
        return function(value)
    kind = type(value)
    if kind is tuple:
        return tuple([map(function, each, is_leaf) for each in value])
    if kind is list:
        return [map(function, each, is_leaf) for each in value]
    if kind is dict:
        return {key: map(function, each, is_leaf) for key, each in value.items()}
    if not _is_container(kind):
        return function(value)
    found, form = _pytree.tree_flatten(value, is_leaf)
    # Not torch's tree_map, which takes a StopIteration of the function for the end of the leaves.
    return _pytree.tree_unflatten([function(each) for each in found], form)


def map_only(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """The same nesting with what a function makes of the leaves of a kind, and the others as they are."""
    return map(lambda each: function(each) if isinstance(each, kind) else each, value)


def flatten(value: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a nesting, and how they hang together."""
    return _pytree.tree_flatten(value, is_leaf)


def flatten_as(form: Structure, value: Any) -> list[Any]:
    """The parts of a nesting that stand where another has its leaves; they may be containers.

    Raises:
        ValueError: The value does not have the form.
    """
    return form.flatten_up_to(value)


def unflatten(found: Iterable[Any], form: Structure) -> Any:
    """The nesting of such leaves."""
    return _pytree.tree_unflatten(found, form)


def structure(value: Any, is_leaf: IsLeaf | None = None) -> Structure:
    """How the leaves of a nesting hang together."""
    return _pytree.tree_structure(value, is_leaf)


def is_namedtuple(value: Any) -> bool:
    """Whether a value is of a class that `collections.namedtuple` or `typing.NamedTuple` made."""
    return _pytree.is_namedtuple_instance(value)


def _collect(value: Any, is_leaf: IsLeaf | None, found: list[Any]) -> None:
    kind = type(value)
    if is_leaf is not None and is_leaf(value):
        found.append(value)
    elif kind is tuple or kind is list:
        for each in value:
            _collect(each, is_leaf, found)
    elif kind is dict:
        for each in value.values():
            _collect(each, is_leaf, found)
    elif _is_container(kind):
        found.extend(_pytree.tree_leaves(value, is_leaf))
    else:
        found.append(value)


def _is_container(kind: type) -> bool:
    return kind in _pytree.SUPPORTED_NODES or issubclass(kind, tuple)
