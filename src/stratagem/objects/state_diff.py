"""Finds what the controller changed in distributed objects, besides the values of tensors (those `variables` find).

That is `training`, the parts that modules hold, `requires_grad`, hooks of tensors, the groups of an optimizer and the
state of gradient scalers. Other attributes are found by `captured`.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from stratagem import _torch
from stratagem.errors import StrategyError
from stratagem.objects.comparing import FIXED

_NO_NAME = -1  # of a part that only this replica has

Snapshot = dict[int, Any]


class _OfModule(NamedTuple):
    """What a module is besides its tensors; in changes, `None` for what has not changed."""

    kind: str | None = None
    training: bool | None = None
    held: tuple[dict[str, int | None], ...] | None = None


class _OfOptimizer(NamedTuple):
    """What an optimizer is besides its state."""

    kind: type
    groups: list[tuple[list[int], dict[str, Any]]]


def snapshot(named: dict[int, Any], names: Mapping[int, int]) -> Snapshot:
    """The plain values of some objects, and which objects stand in which, by name.

    Args:
        named: The objects.
        names: Those of all distributed objects, by `id`.
    """
    return {name: _values(obj, names) for name, obj in named.items()}


def sent_with_tensors(named: dict[int, torch.Tensor]) -> Snapshot:
    """What tensors have that are built elsewhere: not their hooks."""
    return {name: tensor.requires_grad for name, tensor in named.items()}


def difference(before: Snapshot, now: Snapshot) -> Snapshot:
    """What has changed, by name."""
    return {
        name: _changed(before.get(name), values) if isinstance(values, _OfModule | _OfOptimizer) else values
        for name, values in now.items()
        if before.get(name) != values
    }


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
        for kind in _torch.module_parts.MODULE_PARTS
        for part in obj.__dict__[kind].values()
        if part is not None and part not in known
    ]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group of an optimizer, as they are now."""
    return [
        {key: value if type(value) in FIXED else _own(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _values(obj: Any, names: Mapping[int, int]) -> Any:
    if isinstance(obj, torch.Tensor):
        own_hooks = _torch.gradient_hooks.program_hooks(obj)
        return obj.requires_grad if own_hooks is None else (obj.requires_grad, own_hooks)
    if isinstance(obj, torch.nn.Module):
        members = obj.__dict__
        held = tuple([_named_parts(members[kind], names) for kind in _torch.module_parts.MODULE_PARTS])
        return _OfModule(type(obj).__qualname__, members.get("training"), held)
    if isinstance(obj, torch.optim.Optimizer):
        groups = [
            (list(map(names.get, map(id, group["params"]), itertools.repeat(_NO_NAME))), options)
            for group, options in zip(obj.param_groups, options_of(obj), strict=True)
        ]
        return _OfOptimizer(type(obj), groups)
    if isinstance(obj, torch.amp.GradScaler):
        return obj.state_dict()
    return None


def _named_parts(parts: dict[str, Any], names: Mapping[int, int]) -> dict[str, int | None]:
    return {key: None if part is None else names.get(id(part), _NO_NAME) for key, part in parts.items()}


def _changed(before: Any, now: _OfModule | _OfOptimizer) -> Any:
    if isinstance(now, _OfOptimizer):
        if before is not None and before.kind is not now.kind:
            raise StrategyError(
                f"a distributed {before.kind.__qualname__} has been given another class, {now.kind.__qualname__}, "
                f"which the replicas' optimizers would not have; make a new optimizer inside strategy.scope(), and "
                f"give it the state of the old one by load_state_dict"
            )
        return now.groups
    before = before or _OfModule()
    if before.kind is not None and before.kind != now.kind:
        raise StrategyError(
            f"a distributed {before.kind} has become a {now.kind}, which the replicas cannot be sent: a module "
            f"keeps its class after the first run. Undo it (as remove_parametrizations does), or make a new module"
        )
    return _OfModule._make(new if new != old else None for old, new in zip(before, now, strict=True))


def _set_values(obj: Any, values: Any, resolve: Callable[[int], Any]) -> None:
    if isinstance(obj, torch.Tensor):
        requires_grad, hooks = values if isinstance(values, tuple) else (values, None)
        if hooks is not None or _torch.gradient_hooks.program_hooks(obj) is not None:
            _torch.gradient_hooks.set_program_hooks(obj.requires_grad_(), hooks)
        obj.requires_grad_(requires_grad)
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
        if values.training is not None:
            obj.training = values.training
        for kind, named in zip(_torch.module_parts.MODULE_PARTS, values.held or (), strict=False):
            _set_parts(obj.__dict__[kind], named, resolve)
            for key in named.keys() & obj.__dict__.keys():
                del obj.__dict__[key]  # a part that was computed until now, as pruning does


def _set_parts(parts: dict[str, Any], named: dict[str, int | None], resolve: Callable[[int], Any]) -> None:
    """Gives a module the parts of these names, in this order; one without a name stays the replica's own."""
    own = dict(parts)
    parts.clear()
    for key, name in named.items():
        parts[key] = own.get(key) if name == _NO_NAME else name if name is None else resolve(name)


def _own(value: Any) -> Any:
    """The value as it is now: lists and tensors are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if type(value) is list else value
