"""Finds what the controller changed between two runs, besides the values of tensors (those `variables` find).

In distributed objects: flags of modules (`training`, a dropout rate, an activation), the parts and hooks that they
hold, `requires_grad`, the groups of an optimizer, the state of schedulers and gradient scalers. Around
a run: gradient mode, autocast and the like, which a replica must have as the main program has them.
"""

import contextlib
import functools
import os
import types
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from stratagem import _torch
from stratagem.errors import StrategyError

PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""What is compared by value, and sent as it is."""

kept_elsewhere: list[type] = []
"""Classes of modules of whose functions somebody else takes care."""

_FUNCTIONS = frozenset({types.FunctionType, types.BuiltinFunctionType})
_SEQUENCES = frozenset({list, tuple})
_NO_NAME = -1  # of a part that only this replica has

Snapshot = dict[int, Any]


class _OfModule(NamedTuple):
    """What a module is besides its tensors; in changes, `None` for what has not changed."""

    kind: str | None = None
    plain: dict[str, Any] | None = None
    held: tuple[dict[str, int | None], ...] | None = None
    hooks: dict[str, dict[int, Any]] | None = None


def snapshot(named: dict[int, Any]) -> Snapshot:
    """The plain values of all objects, and which of them stand in which, by name."""
    names = {id(obj): name for name, obj in named.items()}
    return {name: _values(obj, names) for name, obj in named.items()}


def difference(before: Snapshot, now: Snapshot) -> Snapshot:
    """What has changed, by name."""
    return {
        name: _changed(before.get(name), values) if isinstance(values, _OfModule) else values
        for name, values in now.items()
        if before.get(name) != values
    }


def hooks_only(state: Snapshot) -> Snapshot:
    """What is still known when replicas may be in different states: hooks are the program's, no run changes them."""
    return {name: _OfModule(hooks=values.hooks) for name, values in state.items() if isinstance(values, _OfModule)}


def apply(changes: Snapshot, resolve: Callable[[int], Any]) -> None:
    """Brings objects of another process to the same values."""
    for name, values in changes.items():
        _set_values(resolve(name), values, resolve)


def unknown_parts(objects: Iterable[Any], known: Container[Any]) -> list[Any]:
    """Modules, parameters and buffers that modules among the objects hold, and that are not known."""
    return [
        part
        for obj in objects
        if isinstance(obj, torch.nn.Module)
        for kind in _torch.MODULE_PARTS
        for part in obj.__dict__[kind].values()
        if part is not None and part not in known
    ]


def _values(obj: Any, names: dict[int, int]) -> Any:
    # Twice in every run: what most objects are is asked first.
    if isinstance(obj, torch.Tensor):
        return obj.requires_grad
    if isinstance(obj, torch.nn.Module):
        members = obj.__dict__
        held = tuple([_named_parts(members[kind], names) for kind in _torch.MODULE_PARTS])
        hooks = {kind: dict(found) for kind in _torch.MODULE_HOOKS if (found := members[kind])}
        plain = _plain_members(members, functions=not isinstance(obj, tuple(kept_elsewhere)))
        return _OfModule(type(obj).__qualname__, plain, held, hooks)
    if isinstance(obj, torch.optim.Optimizer):
        return [
            (
                [names.get(id(each), _NO_NAME) for each in group["params"]],
                {key: _own(value) for key, value in group.items() if key != "params"},
            )
            for group in obj.param_groups
        ]
    if isinstance(obj, torch.amp.GradScaler):
        return obj.state_dict()
    return _plain_members(obj.__dict__) if hasattr(obj, "__dict__") else None


def _plain_members(members: dict[str, Any], *, functions: bool = False) -> dict[str, Any]:
    plain = {}
    for key, value in members.items():
        kind = type(value)
        if kind in PLAIN:
            plain[key] = value
        elif kind in _FUNCTIONS:
            if functions and _holds_nothing(value):
                plain[key] = value
        elif kind in _SEQUENCES and all(type(each) in PLAIN for each in value):
            plain[key] = _own(value)
    return plain


def _holds_nothing(function: Any) -> bool:
    """Whether a function, such as an activation, can be remembered without keeping anything else alive."""
    if type(function) is types.FunctionType:
        is_plain = all(type(each) in PLAIN for each in function.__defaults__ or ())
        return is_plain and not function.__closure__ and not function.__dict__
    return isinstance(function.__self__, types.ModuleType | type | None)


def _named_parts(parts: dict[str, Any], names: dict[int, int]) -> dict[str, int | None]:
    if not parts:
        return {}
    return {key: None if part is None else names.get(id(part), _NO_NAME) for key, part in parts.items()}


def _changed(before: _OfModule | None, now: _OfModule) -> _OfModule:
    before = before or _OfModule()
    if before.kind is not None and before.kind != now.kind:
        raise StrategyError(
            f"a distributed {before.kind} has become a {now.kind}, which the replicas cannot be sent: a module "
            f"keeps its class after the first run. Undo it (as remove_parametrizations does), or make a new module"
        )
    for key, value in (before.plain or {}).items():
        if type(value) in _FUNCTIONS and key not in (now.plain or {}):
            raise StrategyError(
                f"the function {key!r} of a distributed {now.kind} was deleted, or replaced by one that holds other "
                f"objects (a closure, a partial, a method), which the replicas cannot be sent; use a plain function, "
                f"or make a new module"
            )
    return _OfModule._make(new if new != old else None for old, new in zip(before, now, strict=True))


def _set_values(obj: Any, values: Any, resolve: Callable[[int], Any]) -> None:
    if isinstance(obj, torch.Tensor):
        obj.requires_grad_(values)
    elif isinstance(obj, torch.optim.Optimizer):
        del obj.param_groups[len(values) :]
        obj.param_groups.extend({} for _ in range(len(values) - len(obj.param_groups)))
        for group, (parameters, options) in zip(obj.param_groups, values, strict=True):
            group.update(options)
            if _NO_NAME not in parameters:
                group["params"] = [resolve(name) for name in parameters]
    elif isinstance(obj, torch.amp.GradScaler):
        if values:
            obj.load_state_dict(values)
    elif isinstance(values, _OfModule):
        obj.__dict__.update(values.plain or {})
        for kind, named in zip(_torch.MODULE_PARTS, values.held or (), strict=False):
            _set_parts(obj.__dict__[kind], named, resolve)
        if values.hooks is not None:
            _set_hooks(obj, values.hooks)
    else:
        obj.__dict__.update(values)


def _set_parts(parts: dict[str, Any], named: dict[str, int | None], resolve: Callable[[int], Any]) -> None:
    """Gives a module the parts of these names, in this order; one without a name stays the replica's own."""
    own = dict(parts)
    parts.clear()
    for key, name in named.items():
        parts[key] = own.get(key) if name == _NO_NAME else name if name is None else resolve(name)


def _set_hooks(module: torch.nn.Module, hooks: dict[str, dict[int, Any]]) -> None:
    for kind in _torch.MODULE_HOOKS:
        # The same dict: handles that remove a hook know it.
        own = module.__dict__[kind]
        own.clear()
        own.update(hooks.get(kind, {}))
        # A hook that the function registers here must not take the place of one of these.
        RemovableHandle.next_id = max(RemovableHandle.next_id, *(number + 1 for number in own), 0)


def _own(value: Any) -> Any:
    """The value as it is now: lists and tensors are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if type(value) is list else value


# What surrounds a run

_AUTOCAST_KINDS = ("cpu", "cuda", "xpu", "mps")


class Surroundings(NamedTuple):
    """What torch and the process are set to, apart from any object."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    dtype: torch.dtype
    deterministic: bool
    deterministic_warns: bool
    matmul_precision: str
    folder: str | None


def surroundings() -> Surroundings:
    """Those of this moment."""
    return Surroundings(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_KINDS if torch.is_autocast_enabled(kind)),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        _folder(),
    )


@functools.lru_cache(maxsize=8)
def flattened(these: Surroundings) -> tuple[Any, ...]:
    """The same in numbers and texts, which travel at no cost."""
    autocast = tuple((kind, _name(dtype)) for kind, dtype in these.autocast)
    return tuple(these._replace(autocast=autocast, dtype=_name(these.dtype)))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=8)
def restored(plain: tuple[Any, ...]) -> Surroundings:
    """What `flattened` was given."""
    those = Surroundings(*plain)
    autocast = tuple((kind, getattr(torch, str(name))) for kind, name in those.autocast)
    return those._replace(autocast=autocast, dtype=getattr(torch, str(those.dtype)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def surrounded_by(wanted: Surroundings) -> Iterator[None]:
    """Inside the block, this process is set as another was; what holds for the whole process stays so."""
    now = surroundings()
    if now.dtype != wanted.dtype:
        torch.set_default_dtype(wanted.dtype)
    if (now.deterministic, now.deterministic_warns) != (wanted.deterministic, wanted.deterministic_warns):
        torch.use_deterministic_algorithms(wanted.deterministic, warn_only=wanted.deterministic_warns)
    if now.matmul_precision != wanted.matmul_precision:
        torch.set_float32_matmul_precision(wanted.matmul_precision)
    if now.folder != wanted.folder and wanted.folder is not None:
        os.chdir(wanted.folder)
    with contextlib.ExitStack() as put_back:
        if wanted.inference:
            put_back.enter_context(torch.inference_mode())
        if torch.is_grad_enabled() != wanted.grad:
            put_back.enter_context(torch.set_grad_enabled(wanted.grad))
        for kind, dtype in wanted.autocast:
            put_back.enter_context(torch.autocast(kind, dtype, cache_enabled=wanted.autocast_cache))
        yield


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return None
