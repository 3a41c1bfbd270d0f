"""Finds what the controller changed in distributed objects between two runs, besides tensors.

Plain values only: flags of modules (`training`, a dropout rate), `requires_grad`, the options of an
optimizer's groups, the state of schedulers and gradient scalers. Values of tensors are `memory`'s.
"""

from collections.abc import Callable
from typing import Any

import torch

_PLAIN = frozenset({bool, int, float, str, type(None)})
_SEQUENCES = frozenset({list, tuple})
_HELD = ("_modules", "_parameters", "_buffers")

Snapshot = dict[int, Any]


def snapshot(named: dict[int, Any]) -> Snapshot:
    """The plain values of all objects, and which of them stand in which, by name."""
    names = {id(obj): name for name, obj in named.items()}
    return {name: _values(obj, names) for name, obj in named.items()}


def difference(before: Snapshot, now: Snapshot) -> Snapshot:
    """What has changed, by name."""
    return {name: values for name, values in now.items() if before.get(name) != values}


def apply(changes: Snapshot, resolve: Callable[[int], Any]) -> None:
    """Brings objects of another process to the same values."""
    for name, values in changes.items():
        _set_values(resolve(name), values, resolve)


def _values(obj: Any, names: dict[int, int]) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.requires_grad
    if isinstance(obj, torch.optim.Optimizer):
        return [{key: _own(value) for key, value in group.items() if key != "params"} for group in obj.param_groups]
    if isinstance(obj, torch.amp.GradScaler):
        return obj.state_dict()
    if not hasattr(obj, "__dict__"):
        return None
    members = obj.__dict__
    plain = {key: value for key, value in members.items() if type(value) in _PLAIN}
    for key, value in members.items():
        if type(value) in _SEQUENCES and all(type(each) in _PLAIN for each in value):
            plain[key] = _own(value)
    if not isinstance(obj, torch.nn.Module):
        return plain, {}
    held = {
        kind: {key: names.get(id(part)) for key, part in parts.items() if part is not None}
        for kind in _HELD
        if (parts := members[kind])
    }
    return plain, held


def _set_values(obj: Any, values: Any, resolve: Callable[[int], Any]) -> None:
    if isinstance(obj, torch.Tensor):
        obj.requires_grad_(values)
    elif isinstance(obj, torch.optim.Optimizer):
        for group, changed in zip(obj.param_groups, values, strict=True):
            group.update(changed)
    elif isinstance(obj, torch.amp.GradScaler):
        if values:
            obj.load_state_dict(values)
    else:
        plain, held = values
        obj.__dict__.update(plain)
        for kind, parts in held.items():
            # A part that was replaced in the scope has a new name; one without a name is the replica's own.
            obj.__dict__[kind].update({key: resolve(name) for key, name in parts.items() if name is not None})


def _own(value: Any) -> Any:
    """The value as it is now: lists and tensors are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if type(value) is list else value
