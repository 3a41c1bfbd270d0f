"""Tells by identity whether all that a function can reach is as it was: then a run sends nothing but its arguments.

Functions and the variables of their closures are most of what a function can reach. They are compared in a few passes
over all of them, the rest object by object.
"""

import types
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, call
from typing import Any, final

from stratagem.objects.known_objects import KnownObject

_own = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_attributes, _closure, _content = attrgetter("__dict__"), attrgetter("__closure__"), attrgetter("cell_contents")
_is_dropped = attrgetter("is_dropped")


@final
class SameAgain:
    """Objects that children have, as they are now.

    Args:
        nodes: The objects, all of them with a stamp of what they are made of.
    """

    def __init__(self, nodes: Sequence[KnownObject]) -> None:
        held = [(node, node.get()) for node in nodes]
        cells = {id(each) for _, each in held if type(each) is types.CellType}
        functions = [each for _, each in held if _can_be_seen(each, cells)]
        seen = {id(each) for function in functions for each in (function, *(function.__closure__ or ()))}
        self._functions = list(map(weakref.ref, functions))
        self._seen = _seen(functions)
        rest = [(node, each) for node, each in held if id(each) not in seen]
        self._rest = [(node.weak or node.get, node.kind.identities, node.kind.identities(each)) for node, each in rest]
        # As long as these are kept, alive and known, no other object can be where one of them was.
        self._stamps = stamps = [node.stamp for node in nodes if node.stamp is not None]
        self._known = list({id(each): each for stamp in stamps for each in stamp.known}.values())
        self._alive = list({id(each()): each for stamp in stamps for each in stamp.alive}.values())

    def holds(self) -> bool:
        """Whether all of them are made of the same."""
        # First held, then compared: the collector may come at any time.
        functions, alive = list(map(call, self._functions)), list(map(call, self._alive))
        if type(None) in {*map(type, functions), *map(type, alive)} or any(map(_is_dropped, self._known)):
            return False
        if _seen(functions) != self._seen:
            return False
        for get, identities, before in self._rest:
            obj = get()
            if obj is None or identities(obj) != before:
                return False
        return True


def _can_be_seen(value: Any, cells: set[int]) -> bool:
    """Whether a value is a function like most: without attributes, and with no variables but those that are known."""
    if type(value) is not types.FunctionType or value.__dict__ or value.__kwdefaults__ is not None:
        return False
    return all(id(each) in cells for each in value.__closure__ or ())


def _seen(functions: Sequence[Any]) -> list[Any] | None:
    """What functions and their variables are, in a list that is equal as long as that is the same."""
    try:
        contents = list(map(_content, chain.from_iterable(filter(None, map(_closure, functions)))))
    except ValueError:  # a variable has no value
        return None
    return [any(map(_attributes, functions)), *map(id, chain(chain.from_iterable(map(_own, functions)), contents))]
