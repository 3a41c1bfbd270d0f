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
from stratagem.processes.packing import is_filled

_own = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_attributes, _closure, _content = attrgetter("__dict__"), attrgetter("__closure__"), attrgetter("cell_contents")
_is_dropped = attrgetter("is_dropped")


@final
class SameAgain:
    """Objects that children have, as they are now.

    Args:
        held: The objects, all of them with a stamp of what they are made of, and what is known of them.
    """

    def __init__(self, held: Sequence[tuple[KnownObject, Any]]) -> None:
        cells = {id(each) for _, each in held if type(each) is types.CellType}
        functions = [each for _, each in held if _can_be_seen(each, cells)]
        seen = {id(each) for function in functions for each in (function, *(function.__closure__ or ()))}
        self._functions = list(map(weakref.ref, functions))
        self._seen = _seen(functions)
        rest = [(node, each) for node, each in held if id(each) not in seen]
        self._rest = [(node.weak or node.get, node.kind.identities, node.kind.identities(each)) for node, each in rest]
        # As long as these are kept, alive and known, no other object can be where one of them was.
        self._stamps = stamps = [node.stamp for node, _ in held if node.stamp is not None]
        self._known = list({id(each): each for stamp in stamps for each in stamp.known}.values())
        self._alive = list({id(each()): each for stamp in stamps for each in stamp.alive}.values())

    @classmethod
    def of(cls, nodes: Sequence[KnownObject]) -> "SameAgain | None":
        """What is known of some objects; `None` if that does not tell whether they change, or one is gone."""
        held = [(node, node.get()) for node in nodes]
        can_tell = all(node.stamp is not None and each is not None for node, each in held)
        return cls(held) if can_tell else None

    def holds(self) -> bool:
        """Whether all of them are made of the same."""
        # First held, then compared: the collector may come at any time.
        functions, alive = list(map(call, self._functions)), list(map(call, self._alive))
        if type(None) in {*map(type, functions), *map(type, alive)} or any(map(_is_dropped, self._known)):
            return False
        now = _seen(functions)
        if now is None or now != self._seen:
            return False
        for get, identities, before in self._rest:
            obj = get()
            if obj is None or identities(obj) != before:
                return False
        return True


def _can_be_seen(value: Any, cells: set[int]) -> bool:
    """Whether a value is a function like most: without attributes, its variables known and with a value."""
    if type(value) is not types.FunctionType or value.__dict__ or value.__kwdefaults__ is not None:
        return False
    return all(id(each) in cells and is_filled(each) for each in value.__closure__ or ())


def _seen(functions: Sequence[Any]) -> list[Any] | None:
    """What functions and their variables are, in a list that is equal as long as that is the same."""
    try:
        contents = list(map(_content, chain.from_iterable(filter(None, map(_closure, functions)))))
    except ValueError:  # a variable has lost its value
        return None
    return [any(map(_attributes, functions)), *map(id, chain(chain.from_iterable(map(_own, functions)), contents))]
