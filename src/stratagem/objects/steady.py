"""Modules and tensors that are as they were when they were last looked at closely, found by one look at all of them.

Most modules hold nothing but their parts, plain values and functions of libraries, and stay as they are from one run to
the next. Their members are compared by identity, in a few passes over all of them at once; only where something differs
are objects described one by one (`state_diff`, `captured`).
"""

import ctypes
import itertools
import weakref
from collections.abc import Callable, Set
from operator import attrgetter, call
from typing import Any, Final, final

import numpy as np
import torch

from stratagem import _torch
from stratagem.objects import kinds
from stratagem.objects.comparing import FIXED, is_long
from stratagem.objects.token_maker import DEFINITIONS
from stratagem.processes.packing import travels_by_value
from stratagem.processes.registry import Registry

_NUM_APART: Final = 64  # looks in which what changes often is described by itself
_SHORT: Final = 8  # looks: what changes again so soon changes often


def stays_itself(value: Any, registry: Registry) -> bool:
    """Whether a value can only be replaced, and does not change: plain ones, distributed ones, those of libraries."""
    if type(value) in FIXED or (type(value) is tuple and FIXED.issuperset(map(type, value))):
        return not (any(map(is_long, value)) if type(value) is tuple else is_long(value))
    return value in registry or (isinstance(value, DEFINITIONS) and not travels_by_value(value))


@final
class Steady:
    """The distributed modules and tensors of one strategy that seldom change.

    Args:
        registry: The names of all distributed objects.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.is_so = False  # whether all of them were as before, at the last look
        self.num_notes = 0  # how often they were taken as they are: who has seen them since knows them
        self.names: set[int] = set()
        self.classes: set[type] = set()  # of the modules among them
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._module_names: list[int] = []
        self._entries: list[Any] = []
        self._version = -1  # of the registry: since then no object came or went
        self._kept: list[Any] = []  # values whose place in memory nothing else can take meanwhile
        self._seen: tuple[Any, ...] = ()
        self._apart: dict[int, int] = {}  # names of modules that change often, and until which look
        self._others: Set[int] = frozenset()  # the names of all other objects
        self._num_looks = self._noted_at = 0

    def look(self) -> bool:
        """Looks at all of them; whether they are as before."""
        self._num_looks += 1
        # First held, then compared: the collector may come at any time.
        modules, tensors = list(map(call, self._modules)), list(map(call, self._tensors))
        are_there = type(None) not in {*map(type, modules), *map(type, tensors)}
        self.is_so = are_there and self._version == self._registry.version and self._seen == _seen(modules, tensors)
        return self.is_so

    def rest(self) -> dict[int, Any]:
        """All other objects, by name; all there are where some of these have changed."""
        if not self.is_so:
            return self._registry.live()
        has_new = self._version != self._registry.version  # they have come since the look
        return self._registry.live(self._registry.names - self.names if has_new else self._others)

    def forget(self) -> None:
        """Nobody knows how they were, and nothing of them is kept."""
        self._version, self.is_so, self._seen = -1, False, ()
        self._modules, self._tensors, self._kept, self._entries = [], [], [], []
        self.names, self.classes, self._module_names = set(), set(), []

    def note(self) -> None:
        """Takes them as they are; those among the distributed objects that seldom change."""
        held = list(map(call, self._modules))  # first, as in a look
        if self._version == self._registry.version and self._num_looks - self._noted_at < _SHORT:
            described = zip(self._entries, held, strict=True)
            changed = [module is None or before != _entry(module) for before, module in described]
            until = self._num_looks + _NUM_APART
            self._apart |= dict.fromkeys(itertools.compress(self._module_names, changed), until)
        self._noted_at = self._num_looks
        self.num_notes += 1
        self._apart = {name: last for name, last in self._apart.items() if last > self._num_looks}
        self._kept = []
        modules: dict[int, torch.nn.Module] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, obj in self._registry.live().items():
            if isinstance(obj, torch.Tensor):
                if _torch.gradient_hooks.program_hooks(obj) is None:
                    tensors[name] = obj
            elif isinstance(obj, torch.nn.Module) and name not in self._apart and self._takes(obj):
                modules[name] = obj
        self._module_names = list(modules)
        self._modules = list(map(weakref.ref, modules.values()))
        self._tensors = list(map(weakref.ref, tensors.values()))
        self.names, self.classes = {*modules, *tensors}, set(map(type, modules.values()))
        self._others = self._registry.names - self.names
        self._entries = list(map(_entry, modules.values()))
        self._version = self._registry.version
        self._seen = _seen(list(modules.values()), list(tensors.values()))

    def _takes(self, module: torch.nn.Module) -> bool:
        """Whether a module changes by getting another member only."""
        members = vars(module)
        if any(_torch.module_parts.hooks_in(members)) or not kinds.is_plain_module(module):
            return False
        # A part that a step has made is not known yet: the next run distributes it.
        parts = [each for own in _torch.module_parts.parts_of(module) for each in own.values() if each is not None]
        own = [value for key, value in members.items() if key not in kinds.NOT_OF_MODULE]
        if self._registry.without_name(parts) or not all(stays_itself(each, self._registry) for each in own):
            return False
        self._kept += [each for each in own if each not in self._registry]
        return True


def _seen(modules: list[Any], tensors: list[Any]) -> tuple[Any, ...]:
    """What modules and tensors are made of, in lists that are equal as long as that is the same."""
    members = list(map(_members, modules))
    dicts = [*members, *itertools.chain.from_iterable(map(_torch.module_parts.parts_in, members))]
    keys, sizes = list(itertools.chain.from_iterable(dicts)), list(map(len, dicts))
    try:
        values = np.fromiter(itertools.chain.from_iterable(map(dict.values, dicts)), dtype=object, count=len(keys))
    except ValueError:  # another thread changes one of them
        return (object(),)
    ids = ctypes.string_at(values.ctypes.data, values.nbytes)  # where each of them lies, without a number for each
    of_modules = any(itertools.chain.from_iterable(map(_torch.module_parts.hooks_in, members)))
    # Those of the library are there too; one that the program adds makes more of them.
    hooks = itertools.chain.from_iterable(map(_torch.gradient_hooks.hooks_of, tensors))
    of_tensors = list(map(len, filter(None, hooks)))
    needs = list(map(_torch.tensors.requires_grad_of, tensors))
    return keys, sizes, ids, list(map(type, modules)), needs, of_modules, of_tensors


_members: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")


def _entry(module: Any) -> Any:
    """What one module is made of."""
    dicts = vars(module), *_torch.module_parts.parts_of(module)
    return [(tuple(each), tuple(map(id, each.values()))) for each in dicts]
