"""Connects libraries that a program uses beside torch, once it uses them.

The parts that know such a library stand above the strategies; they are named here, not imported.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

_INTEGRATIONS = {"keras": "stratagem.training.keras.fit"}
# What children of a program that uses such a library need of it.
_IN_CHILDREN = {"keras": ("stratagem.training.keras.keras_objects", "stratagem.training.keras.steps")}


def connect() -> None:
    """Connects every known library that the program has imported, and the others as soon as it imports them."""
    for library in _INTEGRATIONS:
        if library in sys.modules:
            _install(library)
    if _imports not in sys.meta_path and not sys.modules.keys() >= _INTEGRATIONS.keys():
        sys.meta_path.insert(0, _imports)


def modules_for_children() -> list[str]:
    """What to import once, before children are forked, rather than in each of them."""
    return [module for library in _IN_CHILDREN if library in sys.modules for module in _IN_CHILDREN[library]]


def _install(library: str) -> None:
    importlib.import_module(_INTEGRATIONS[library]).install()


@final
class _Imports(importlib.abc.MetaPathFinder):
    """Sees to libraries that a program imports inside a scope: what it makes there is distributed already."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as others find it, with a loader that connects it."""
        if fullname not in _INTEGRATIONS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


@final
class _Loader(importlib.abc.Loader):
    """Loads a library as its own loader does, and connects it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        _install(module.__name__)


_imports = _Imports()
