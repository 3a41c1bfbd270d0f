"""How objects that steps use are read, compared and written, by the kind of object.

An object is a set of members by key: a dict's items, the attributes of an instance or a class, the names that functions
use of their module, the variable in a closure; lists, tensors and the like have one member, their content. Two
processes that have the same object exchange members. What is of no kind travels inside the object that holds it.
"""

import collections
import copyreg
import enum
import functools
import itertools
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from stratagem import _torch
from stratagem.errors import StrategyError
from stratagem.objects import random_kinds
from stratagem.objects.comparing import FIXED, Token
from stratagem.objects.kind import CONTENT, Kind, Whole
from stratagem.processes.packing import is_filled, travels_by_value

PLAIN: Final = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""What is passed on of objects that somebody else takes care of."""

kept_elsewhere: list[type] = []
"""Classes of modules of whose members, besides plain ones, somebody else takes care."""


@final
class _Items(Kind):
    def read(self, obj: Any) -> Mapping[Any, Any]:
        return obj  # type: ignore[no-any-return]

    def identities(self, obj: Any) -> tuple[int, ...]:
        return *map(id, obj), *map(id, obj.values())

    def used(self, obj: Any) -> Iterable[Any]:
        return *obj, *obj.values()

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        for key in removed:
            obj.pop(key, None)
        obj.update(members) if type(obj) is not collections.Counter else dict.update(obj, members)


@final
class _Attributes(Kind):
    def read(self, obj: Any) -> Mapping[Any, Any]:
        return {CONTENT: type(obj), **vars(obj)}

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        members = vars(obj)
        return id(type(obj)), *map(id, members), *map(id, members.values())

    def used(self, obj: Any) -> Iterable[Any]:
        return type(obj), *vars(obj), *vars(obj).values()

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        own = dict(members)
        _give_class(obj, own.pop(CONTENT, type(obj)))
        for key in removed:
            vars(obj).pop(key, None)
        vars(obj).update(own)


def _give_class(obj: Any, kind: type) -> None:
    if kind is not type(obj):
        object.__setattr__(obj, "__class__", kind)  # its own way of setting may refuse, or do something else


@final
class _Class(Kind):
    def read(self, obj: Any) -> Mapping[Any, Any]:
        if isinstance(obj, enum.EnumMeta):
            return {}
        return {key: value for key, value in vars(obj).items() if key not in NOT_STATE}

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        members = vars(obj)
        return *map(id, obj.__bases__), *map(id, members), *map(id, members.values())

    def used(self, obj: Any) -> Iterable[Any]:
        members = self.read(obj)
        return *obj.__bases__, *members, *members.values()

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        for key in removed:
            if key in vars(obj):
                delattr(obj, key)
        for key, value in members.items():
            setattr(obj, key, value)


@final
class _Function(Kind):
    def read(self, obj: Any) -> Mapping[Any, Any]:
        own = {"__code__": obj.__code__}
        if obj.__defaults__ is not None:
            own["__defaults__"] = obj.__defaults__
        if obj.__kwdefaults__ is not None:
            own["__kwdefaults__"] = tuple(obj.__kwdefaults__.items())
        return own | obj.__dict__ if obj.__dict__ else own

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        if obj.__kwdefaults__ is not None:
            return None
        own = _ITEMS.identities(obj.__dict__)
        return id(obj.__code__), id(obj.__defaults__), *map(id, obj.__closure__ or ()), *own

    def used(self, obj: Any) -> Iterable[Any]:
        own = obj.__code__, obj.__defaults__, *(obj.__closure__ or ()), *_ITEMS.used(obj.__dict__)
        return own if are_of_library(obj.__globals__) else (*own, obj.__globals__)

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        for key in removed:
            setattr(obj, key, None) if key in ("__defaults__", "__kwdefaults__") else obj.__dict__.pop(key, None)
        for key, value in members.items():
            setattr(obj, key, dict(value) if key == "__kwdefaults__" else value)


@final
class _Compiled(Kind):
    """A function that `torch.compile` made: always of the same function, which can change."""

    def read(self, obj: Any) -> Mapping[Any, Any]:
        return {CONTENT: _torch.compiling.uncompiled(obj)}

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        return (id(_torch.compiling.uncompiled(obj)),)

    def used(self, obj: Any) -> Iterable[Any]:
        return (_torch.compiling.uncompiled(obj),)


@final
class _Cell(Kind):
    def read(self, obj: Any) -> Mapping[Any, Any]:
        return {CONTENT: obj.cell_contents} if is_filled(obj) else {}

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        return (id(obj.cell_contents),) if is_filled(obj) else ()

    def used(self, obj: Any) -> Iterable[Any]:
        return self.read(obj).values()

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        if removed and is_filled(obj):
            del obj.cell_contents
        if members:
            obj.cell_contents = members[CONTENT]


@final
class Namespace(Kind):
    """The globals of functions of one module.

    In the main program the object is the dict of globals, in a child a module of its own.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()  # those that functions use
        self.is_whole = False  # the module itself is used: all that can be sent

    def read(self, obj: Any) -> Mapping[Any, Any]:
        if self.is_whole:
            return {key: value for key, value in obj.items() if key not in NOT_STATE}
        return {key: obj[key] for key in self.names if key in obj}

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        if self.is_whole:
            return _ITEMS.identities(obj)  # with what is no state: it seldom changes, and to leave it out costs more
        return tuple(map(id, map(obj.get, self.names, itertools.repeat(_NOTHING))))

    def used(self, obj: Any) -> Iterable[Any]:
        return _ITEMS.used(self.read(obj))

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        _ATTRIBUTES.write(obj, members, removed, replica)


class _Container(Whole):
    """Objects one beside the other."""

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        return tuple(map(id, obj))

    def used(self, obj: Any) -> Iterable[Any]:
        return obj  # type: ignore[no-any-return]


@final
class _Sequence(_Container):
    def content(self, obj: Any) -> Any:
        return tuple(obj)

    def replace(self, obj: Any, content: Any, replica: int) -> None:
        obj.clear()
        obj.extend(content)


@final
class _Set(_Container):
    def content(self, obj: Any) -> Any:
        return frozenset(obj)

    def replace(self, obj: Any, content: Any, replica: int) -> None:
        obj.clear()
        obj.update(content)


@final
class _Bytes(Whole):
    def content(self, obj: Any) -> Any:
        return bytes(obj)

    def replace(self, obj: Any, content: Any, replica: int) -> None:
        obj[:] = content


@final
class _Tensor(Whole):
    def tokens(self, obj: Any, token: Callable[[Any], Token]) -> dict[Any, Token]:
        # The version counter does not see what is written through `.data` or through numpy.
        flat = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        version = None if obj.is_inference() else _torch.tensors.version_of(obj)
        return {
            CONTENT: (obj.dtype, obj.shape, obj.stride(), obj.requires_grad, version, zlib.crc32(flat.data)),
        }

    def content(self, obj: Any) -> Any:
        return obj.detach().clone().requires_grad_(obj.requires_grad)

    def replace(self, obj: Any, content: Any, replica: int) -> None:
        if (obj.shape, obj.dtype, obj.stride()) == (content.shape, content.dtype, content.stride()):
            obj.detach().copy_(content.detach())  # views of it see it too
        else:
            obj.data = content.detach()
        obj.requires_grad_(content.requires_grad)


@final
class _Array(Whole):
    def tokens(self, obj: Any, token: Callable[[Any], Token]) -> dict[Any, Token]:
        flat = np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
        return {CONTENT: (obj.dtype, obj.shape, obj.strides, obj.flags.writeable, zlib.crc32(flat.data))}

    def content(self, obj: Any) -> Any:
        return obj.copy()

    def replace(self, obj: Any, content: Any, replica: int) -> None:
        if (obj.shape, obj.dtype) != (content.shape, content.dtype):
            raise StrategyError(
                f"an array of shape {obj.shape} that replicas have was given the shape {content.shape} in place; make "
                f"a new array"
            )
        obj.flags.writeable = True
        obj[...] = content
        obj.flags.writeable = content.flags.writeable


@final
class Module(Kind):
    """A distributed module: its attributes and hooks; not its parts, nor what the library puts on it."""

    leaves_out = True

    def read(self, obj: Any) -> Mapping[Any, Any]:
        own = {key: value for key, value in vars(obj).items() if key not in NOT_OF_MODULE}
        if vars(obj)[_torch.module_parts.MODULE_HOOKS[0]]:
            # Hooks before a call may compute a weight (pruning, old norms): each replica has its own.
            own = {key: value for key, value in own.items() if getattr(value, "grad_fn", None) is None}
        own |= {kind: _own_hooks(obj, kind) for kind in _torch.module_parts.MODULE_HOOKS if vars(obj)[kind]}
        return {CONTENT: _torch.module_parts.class_of(obj), **own}

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        members = vars(obj)
        if any(map(members.get, _torch.module_parts.MODULE_HOOKS)):
            return None
        return id(type(obj)), *map(id, members), *map(id, members.values())

    def used(self, obj: Any) -> Iterable[Any]:
        members = self.read(obj)
        return *members, *members.values()

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        _put_members(obj, members, removed)


@final
class _Optimizer(Kind):
    """A distributed optimizer: the hooks of its step, and what one of the program's own has besides what every has."""

    leaves_out = True

    def read(self, obj: Any) -> Mapping[Any, Any]:
        is_of_torch = type(obj).__module__.startswith("torch.")
        own = {} if is_of_torch else {key: each for key, each in vars(obj).items() if key not in _OF_EVERY_OPTIMIZER}
        kinds = filter(vars(obj).get, _torch.optimizer_parts.OPTIMIZER_HOOKS)
        return own | {kind: _own_hooks(obj, kind) for kind in kinds}

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        if any(map(vars(obj).get, _torch.optimizer_parts.OPTIMIZER_HOOKS)):
            return None
        return _ITEMS.identities(self.read(obj))

    def used(self, obj: Any) -> Iterable[Any]:
        return _ITEMS.used(self.read(obj))

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        _put_members(obj, members, removed)


@final
class _OthersModule(Kind):
    """A module or another distributed object whose members somebody else knows, besides plain ones."""

    def read(self, obj: Any) -> Mapping[Any, Any]:
        return {
            key: value
            for key, value in getattr(obj, "__dict__", _NOTHING).items()
            if (type(value) in PLAIN or _is_plain_sequence(value)) and key not in NOT_OF_MODULE
        } | (
            {kind: _own_hooks(obj, kind) for kind in _torch.module_parts.MODULE_HOOKS if vars(obj)[kind]}
            if isinstance(obj, torch.nn.Module)
            else {}
        )

    def identities(self, obj: Any) -> tuple[int, ...] | None:
        members = getattr(obj, "__dict__", _NOTHING)
        if any(map(members.get, _torch.module_parts.MODULE_HOOKS)):
            return None
        lists = [each for each in members.values() if type(each) is list]
        inside = itertools.chain.from_iterable(lists)
        return *map(id, members), *map(id, members.values()), *map(len, lists), *map(id, inside)

    def used(self, obj: Any) -> Iterable[Any]:
        members = self.read(obj)
        return *members, *(each for value in members.values() for each in (value if type(value) is list else (value,)))

    def tokens(self, obj: Any, token: Callable[[Any], Token]) -> dict[Any, Token]:
        return {key: token(tuple(value) if type(value) is list else value) for key, value in self.read(obj).items()}

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        _put_members(obj, members, removed)


def _is_plain_sequence(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(each) in PLAIN for each in value)


def _put_members(obj: Any, members: Mapping[Any, Any], removed: Iterable[Any]) -> None:
    if CONTENT in members and members[CONTENT] is not _torch.module_parts.class_of(obj):
        _give_class(obj, members[CONTENT])
    for key in removed:
        if key in _HOOKS:
            _put_hooks(obj, key, ())
        else:
            vars(obj).pop(key, None)
    for key, value in members.items():
        if key in _HOOKS:
            _put_hooks(obj, key, value)
        elif key != CONTENT:
            vars(obj)[key] = value


_HOOKS = frozenset((*_torch.module_parts.MODULE_HOOKS, *_torch.optimizer_parts.OPTIMIZER_HOOKS))


def _own_hooks(obj: Any, kind: str) -> tuple[tuple[int, Any], ...]:
    """The program's hooks of a module or an optimizer by number; the library's are those of its process."""
    return tuple((number, hook) for number, hook in vars(obj)[kind].items() if not _is_of_library(obj, number))


def _is_of_library(obj: Any, number: int) -> bool:
    # Some of the dicts hold the functions, others only say how those are called.
    found = [vars(obj)[kind].get(number) for kind in _HOOKS if kind in vars(obj)]
    return any((getattr(each, "__module__", None) or "").startswith("stratagem.") for each in found)


def _put_hooks(obj: Any, kind: str, hooks: Sequence[tuple[int, Any]]) -> None:
    """Puts the program's hooks in the place of those that a module or an optimizer has."""
    # The same dict: handles that remove a hook know it.
    own = vars(obj)[kind]
    kept = [each for number, each in own.items() if _is_of_library(obj, number)]
    own.clear()
    own.update(hooks)
    # A hook that the function registers here must not take the place of one of these.
    RemovableHandle.next_id = max(RemovableHandle.next_id, *(number + 1 for number in own), 0)
    for each in kept:
        own[RemovableHandle.next_id] = each
        RemovableHandle.next_id += 1


_NOTHING: Mapping[str, Any] = {}
NOT_OF_MODULE = frozenset(
    {
        *_torch.module_parts.MODULE_PARTS,
        *_torch.module_parts.MODULE_HOOKS,
        "training",  # `state_diff` compares it between machines too
        "_non_persistent_buffers_set",
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)
NOT_STATE = frozenset(
    {
        *("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__module__"),
        *("__orig_bases__", "__parameters__", "__weakref__", "_abc_impl", "__static_attributes__", "__firstlineno__"),
        *("__builtins__", "__spec__", "__loader__", "__cached__", "__file__", "__slotnames__"),
    }
)
"""What definitions have besides members that a program sets."""


class _BareOptimizer(torch.optim.Optimizer):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Nothing: torch's own imports its compiler, 800 modules that a child has no other use for."""


_OF_EVERY_OPTIMIZER = frozenset(
    # Those of torch, the marks of its schedulers, and methods that are replaced.
    {
        *vars(_BareOptimizer([torch.zeros(1)], {})),
        *_torch.optimizer_parts.OPTIMIZER_MARKS,
        *_torch.optimizer_parts.OPTIMIZER_METHODS,
    }
)

_ATTRIBUTES, _TENSOR, _ARRAY, _CLASS, _MODULE, _OPTIMIZER, _OTHERS = (
    *(_Attributes(), _Tensor(), _Array(), _Class(), Module(), _Optimizer(), _OthersModule()),
)
_ITEMS, _SEQUENCE, _COMPILED = _Items(), _Sequence(), _Compiled()

_BY_TYPE: dict[type, Kind] = {
    dict: _ITEMS,
    collections.OrderedDict: _ITEMS,
    collections.Counter: _ITEMS,
    collections.defaultdict: _ITEMS,
    list: _SEQUENCE,
    collections.deque: _SEQUENCE,
    set: _Set(),
    bytearray: _Bytes(),
    types.FunctionType: _Function(),
    types.CellType: _Cell(),
    types.ModuleType: Namespace(),
    **random_kinds.BY_TYPE,
}


def kind_of(obj: Any) -> Kind | None:
    """The kind of an object that can change; `None` if it can only be sent inside the one that holds it."""
    found = _BY_TYPE.get(type(obj))
    if found is not None:
        return _COMPILED if _torch.compiling.is_compiled(obj) else found
    if isinstance(obj, torch.Tensor):
        return _TENSOR if _is_ordinary(obj) else None
    if type(obj) is np.ndarray:
        return None if obj.dtype.hasobject else _ARRAY
    if isinstance(obj, type):
        return _CLASS
    return _ATTRIBUTES if _is_only_its_dict(obj) else None


def kind_of_known(obj: Any) -> Kind:
    """The kind of an object that has one; it keeps it with a class that it is given later, whatever that says."""
    return kind_of(obj) or _ATTRIBUTES


def kind_of_distributed(obj: Any) -> Kind | None:
    """The kind of a distributed object; `None` where all that matters is found elsewhere."""
    if isinstance(obj, torch.Tensor | torch.amp.GradScaler):
        return None
    if isinstance(obj, torch.optim.Optimizer):
        return _OPTIMIZER
    return _MODULE if isinstance(obj, torch.nn.Module) and is_plain_module(obj) else _OTHERS


def is_plain_module(module: torch.nn.Module) -> bool:
    """Whether all that a module is stands in its attributes, and nobody else knows what they hold."""
    return not isinstance(module, tuple(kept_elsewhere)) and _is_only_its_dict(module)


_WRAPPERS: dict[Any, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinFunctionType: ("__self__", "__name__"),
    functools.partial: ("__class__", "func", "args", "keywords", "__dict__"),
    property: ("__class__", "fget", "fset", "fdel"),
    staticmethod: ("__class__", "__func__"),
    classmethod: ("__class__", "__func__"),
    types.GetSetDescriptorType: (),
    types.MemberDescriptorType: (),
    types.WrapperDescriptorType: (),
    enum.Enum: (),
}


def are_of_library(content: dict[str, Any]) -> bool:
    """Whether globals are those of an installed module: a decorator's (`contextlib.contextmanager`), say."""
    module = sys.modules.get(content.get("__name__", ""))
    if module is None or vars(module) is not content or module.__name__ == "__main__":
        return False
    return not travels_by_value(module)


def parts_of(value: Any) -> Sequence[Any] | None:
    """What a value is made of that itself does not change: a tuple, a bound method; `None` if it is not such a one."""
    if isinstance(value, tuple) or type(value) is frozenset:
        return tuple(value)
    for kind, attributes in _WRAPPERS.items():
        if isinstance(value, kind):
            return [getattr(value, name) for name in attributes]
    return None


def is_opaque(value: Any) -> bool:
    """Whether nothing is known of a value but how it travels."""
    is_known = type(value) in FIXED or isinstance(value, type | types.ModuleType)
    return not is_known and kind_of(value) is None and parts_of(value) is None


def _is_ordinary(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


_USUAL_STATE = [getattr(each, "__getstate__", None) for each in (object, torch.nn.Module)]


class _Plain:
    """An object with a `__dict__` and nothing else."""


def _is_only_its_dict(value: Any) -> bool:
    """Whether all that an object is stands in its `__dict__`: no slots, nothing in C, no way of its own to travel."""
    kind: Any = type(value)
    return _has_only_a_dict(kind) and hasattr(value, "__dict__")


def _has_only_a_dict(kind: Any) -> bool:
    return bool(
        kind.__basicsize__ == _Plain.__basicsize__
        and kind.__itemsize__ == 0
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) in _USUAL_STATE
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and kind not in copyreg.dispatch_table
    )
