"""Moves parts of a model to devices: model parallelism in one call."""

import difflib
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from stratagem.devices.lookup import DeviceLike, local_spec
from stratagem.errors import DeviceTypeError, PlacementError
from stratagem.placement import presence, residence, resolution, scopes
from stratagem.placement.residence import ResidencePlace

_Module = TypeVar("_Module", bound=nn.Module)


def place(model: _Module, devices: DeviceLike | Mapping[str, DeviceLike]) -> _Module:
    """Moves a model, or parts of it, to devices; its operations follow their parameters there.

    Parameters stay the same objects, so that an optimizer keeps them. State that an optimizer already has is not moved.

    Args:
        model: Any module.
        devices: One device for all of it; or, for names of its parts or parameters, the device of each; parts of a
            Keras model are its layers, by their names. A longer name wins over the part that it is in, `""` is the
            whole model; what no name covers stays where it is.
    Returns:
        The model.
    Raises:
        PlacementError: It has no such part, or a parameter that two parts share is to be in two places.
        DeviceNotFoundError: There is no such device.
        OutOfMemoryError: A part does not fit; parts before it have moved.
    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> residence.device_of(place(net, {"0": "/cpu:0"})[0].weight).name
        '/device:CPU:0'
    """
    if not isinstance(model, nn.Module):
        raise DeviceTypeError(f"place takes a torch module, got {type(model).__name__}")
    wanted = dict(devices) if isinstance(devices, Mapping) else {"": devices}
    parts, tensors, known = _parts_of(model)
    if unknown := [name for name in wanted if name not in known]:
        close = difflib.get_close_matches(str(unknown[0]), known - {""}, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        listed = ", ".join(map(repr, parts)) or "none"
        raise PlacementError(f"{type(model).__name__} has no part {unknown[0]!r}{hint}; its parts are {listed}")
    names = {
        part: resolution.resolve(local_spec(each), repr(part) if part else "the model") for part, each in wanted.items()
    }
    places = residence.current()
    goals: dict[torch.Tensor, tuple[ResidencePlace, str]] = {}
    for name, tensor in tensors:
        part = max((each for each in names if _is_in(name, each)), key=lambda each: _place_in(name, each), default=None)
        device = None if part is None else names[part]
        if device is None:
            continue
        goal, other = goals.setdefault(tensor, (places.at(device), name))
        if goal is not places.at(device):
            raise PlacementError(
                f"{other!r} and {name!r} are one tensor and cannot be on {goal.device.name} and {device.name}; "
                f"place both on one device"
            )
    with scopes.recording():
        for tensor, (goal, _) in goals.items():
            _move(tensor, goal)
    presence.update()
    return model


def _parts_of(model: nn.Module) -> tuple[list[str], list[tuple[str, torch.Tensor]], set[str]]:
    """The parts of a model to choose from, its tensors by name, and all names that can be given."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Layer):
        # As modules of torch its layers have no names, and hold no tensors.
        tensors = [(each.path, each.value) for each in model.variables]
        layers = [each.name for each in getattr(model, "layers", ())]
        prefixes = {"/".join(path.split("/")[start:end]) for path, _ in tensors for start, end in _ranges(path)}
        return layers, tensors, {"", *layers, *prefixes}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | {name for name, _ in tensors}
    return [name for name, _ in model.named_children()] or [name for name, _ in tensors], tensors, known


def _ranges(path: str) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(path.count("/") + 2), 2)


def _is_in(name: str, part: str) -> bool:
    return part in ("", name) or name.startswith(f"{part}.") or f"/{part}/" in f"/{name}/"


def _place_in(name: str, part: str) -> int:
    """How far into a name a part reaches: the innermost wins."""
    return f"/{name}/".rfind(f"/{part}/") + len(part) if part else -1


def _move(tensor: torch.Tensor, goal: ResidencePlace) -> None:
    if residence.current().of(tensor) is goal:
        return
    for each in (tensor, tensor.grad):
        if each is not None:
            goal.require_room(each, place)
            data = each.detach()
            moved = data.clone() if data.device == goal.torch_device else data.to(goal.torch_device)
            goal.settle(moved, place)
            each.data = moved
