"""Connects libraries that a program uses beside torch, once it uses them.

What a program may use before there is a strategy is there once both are imported; the rest comes with the first scope.
The parts that know such a library stand above the strategies; they are named here, not imported.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

from stratagem import _env

_INTEGRATIONS = {"keras": "stratagem.training.keras.fit"}
# What such a library lacks until stratagem is there, too: a program may make its model before any scope.
_EARLY = {"keras": "stratagem.training.keras.synchronized_norm"}
# What children need of a module that the program has imported.
_IN_CHILDREN = {
    "stratagem.engine.child_calls": ("stratagem.engine.child_calls",),
    "keras": ("stratagem.training.keras.keras_objects", "stratagem.training.keras.steps"),
}
# Classes of torch's that replicas do in another way.
_ADAPTED = {"torch.nn.modules.batchnorm.SyncBatchNorm": "stratagem.training.batch_norm"}


def prepare() -> None:
    """Gives every known library what it lacks: at once if the program has imported it, otherwise when it does."""
    for library in _INTEGRATIONS:
        if library in sys.modules:
            _prepare(library)
    sys.meta_path.insert(0, _imports)


def connect() -> None:
    """Connects every known library that the program has imported, and the others as soon as it imports them."""
    _imports.connects = True
    for library in _INTEGRATIONS:
        if library in sys.modules:
            _install(library)


def serve() -> None:
    """Connects libraries that have come to this child with what it was sent: the program has them since."""
    _imports.serves = True
    while _imports.came:
        for module in _IN_CHILDREN[_imports.came.pop()]:
            importlib.import_module(module)


def adapt(obj: Any) -> None:
    """Lets an object of torch's that talks to other processes do so in the way of a strategy."""
    kind = type(obj)
    if module := _ADAPTED.get(f"{kind.__module__}.{kind.__qualname__}"):
        importlib.import_module(module).adapt(obj)


def modules_for_children() -> list[str]:
    """What to import once, before children are forked, rather than in each of them."""
    return [module for used in _IN_CHILDREN if used in sys.modules for module in _IN_CHILDREN[used]]


def _prepare(library: str) -> None:
    if "torch" in sys.modules:  # otherwise it runs on something else
        importlib.import_module(_EARLY[library]).connect()


def _install(library: str) -> None:
    importlib.import_module(_INTEGRATIONS[library]).install()


@final
class _Imports(importlib.abc.MetaPathFinder):
    """Sees to libraries that a program imports later, perhaps inside a scope: what it makes there is distributed."""

    connects = False  # whether there has been a scope
    serves = False  # whether this is a child

    def __init__(self) -> None:
        self.came: list[str] = []  # to a child, and not connected yet: what connects them may be what imports them

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as others find it, with a loader that connects it."""
        if fullname not in _INTEGRATIONS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # somebody may only ask whether there is one
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
        if _imports.serves:
            _env.use_torch_for_keras()
        self._own.exec_module(module)
        _prepare(module.__name__)
        if _imports.serves:
            _imports.came.append(module.__name__)
        if _imports.connects:
            _install(module.__name__)


_imports = _Imports()
