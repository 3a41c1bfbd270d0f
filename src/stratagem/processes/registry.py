"""Gives distributed objects names, so that they travel between processes as references.

In the controller it names the objects without keeping them alive: an object that the program drops
is told to the children, which drop theirs. In a child it holds that child's own copies.
"""

import types
import weakref
from collections.abc import Iterable, Mapping, Set
from typing import Any, final

import torch

_NAMESPACE, _VIEW = "namespace", "view"


def namespace_name(name: int, obj: Any) -> tuple[Any, ...]:
    """The name of the globals of functions, or of their module: a child that has none of that name makes it.

    Args:
        name: A number that nothing else has.
        obj: The dict of globals, or the module.
    """
    content = vars(obj) if isinstance(obj, types.ModuleType) else obj
    known = {key: content[key] for key in ("__name__", "__package__", "__path__", "__file__") if key in content}
    return _NAMESPACE, name, isinstance(obj, types.ModuleType), tuple(known.items())


def view_name(name: int, view: torch.Tensor, offset: int) -> tuple[Any, ...]:
    """The name of a tensor that lies in the memory of another one.

    Args:
        name: That of the other.
        view: The tensor.
        offset: Where it begins, in elements.
    """
    return _VIEW, name, view.dtype, tuple(view.shape), view.stride(), offset


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
        self.version = 0
        """Another one after each object that comes or goes."""

    @property
    def names(self) -> Set[int]:
        """Those of all objects."""
        return self._objects.keys()

    def add(self, name: int, obj: Any) -> None:
        """Enters an object; from now on it travels as its name."""
        key = id(obj)
        self.version += 1
        self._names[key] = name
        self._objects[name] = obj if self._keeps else weakref.ref(obj, lambda _: self._drop(name, key))

    def keep(self, name: int, obj: Any) -> None:
        """Enters an object that comes here as its name, and leaves as what it is."""
        self._objects[name] = obj

    def remove(self, name: int) -> None:
        """Takes an object out, in a child; one that came later may never have had it."""
        if name in self._objects:
            self._names.pop(id(self._objects.pop(name)), None)

    def reference(self, obj: Any) -> int | None:
        """The name of an object, if it has one."""
        return self._names.get(id(obj))

    def resolve(self, name: Any) -> Any:
        """This process' own object of that name."""
        if type(name) is tuple:
            return self._view(*name[1:]) if name[0] == _VIEW else self._namespace(*name)
        obj = self._objects[name]
        return obj if self._keeps else obj()

    def _namespace(self, _: str, name: int, is_module: bool, known: tuple[tuple[str, Any], ...]) -> Any:
        own = self._objects.get(name)
        if own is None:
            own = self._objects[name] = types.ModuleType(dict(known).get("__name__", "?"))
            vars(own).update(known)
        return own if is_module else vars(own)

    def _view(
        self, name: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        whole = self.resolve(name).detach().view(dtype)
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)  # type: ignore[no-any-return]

    def live(self, names: Iterable[int] | None = None) -> dict[int, Any]:
        """The objects of these names that still exist, by name; by default all."""
        found = {}
        for name in list(self._objects if names is None else names):
            held = self._objects.get(name)  # it may go at any time
            obj = held if held is None or self._keeps else held()
            if obj is not None:
                found[name] = obj
        return found

    @property
    def names_by_id(self) -> Mapping[int, int]:
        """The names of all objects by their `id`."""
        return self._names

    def without_name(self, objects: Iterable[Any]) -> list[Any]:
        """Those of some objects that are not in it."""
        names, objects = self._names, list(objects)
        if names.keys() >= set(map(id, objects)):  # most often
            return []
        return [each for each in objects if id(each) not in names]

    @property
    def num_dropped(self) -> int:
        """How many objects have gone since this was last taken note of."""
        return len(self._dropped)

    def take_dropped(self) -> list[int]:
        """The names of objects that ceased to exist since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def __contains__(self, obj: Any) -> bool:
        return id(obj) in self._names

    def _drop(self, name: int, key: int) -> None:
        self.version += 1
        self._objects.pop(name, None)
        if self._names.get(key) == name:
            del self._names[key]
        self._dropped.append(name)
