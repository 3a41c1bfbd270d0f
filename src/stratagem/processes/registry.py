"""Gives distributed objects names, so that they travel between processes as references.

In the controller it names the objects without keeping them alive: an object that the program drops
is told to the children, which drop theirs. In a child it holds that child's own copies.
"""

import weakref
from typing import Any, final


@final
class Registry:
    """Objects by name and names by object.

    Args:
        keeps: Whether it keeps its objects alive; a child's does, the controller's does not.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._objects: dict[int, Any] = {}
        self._names: dict[int, int] = {}
        self._dropped: list[int] = []

    def add(self, name: int, obj: Any) -> None:
        """Enters an object; from now on it travels as its name."""
        key = id(obj)
        self._names[key] = name
        self._objects[name] = obj if self._keeps else weakref.ref(obj, lambda _: self._drop(name, key))

    def remove(self, name: int) -> None:
        """Takes an object out, in a child; one that came later may never have had it."""
        if name in self._objects:
            self._names.pop(id(self._objects.pop(name)), None)

    def reference(self, obj: Any) -> int | None:
        """The name of an object, if it has one."""
        return self._names.get(id(obj))

    def resolve(self, name: int) -> Any:
        """This process' own object of that name."""
        obj = self._objects[name]
        return obj if self._keeps else obj()

    def live(self) -> dict[int, Any]:
        """All objects that still exist, by name."""
        found = {name: self.resolve(name) for name in list(self._objects)}
        return {name: obj for name, obj in found.items() if obj is not None}

    def take_dropped(self) -> list[int]:
        """The names of objects that ceased to exist since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def __contains__(self, obj: Any) -> bool:
        return id(obj) in self._names

    def _drop(self, name: int, key: int) -> None:
        self._objects.pop(name, None)
        if self._names.get(key) == name:
            del self._names[key]
        self._dropped.append(name)
