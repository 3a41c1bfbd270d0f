"""Finds the tensors among the arguments of a function, and puts copies in their place."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from stratagem import _tree
from stratagem.placement.residence import ResidencePlace

Copies: TypeAlias = list[tuple[torch.Tensor, torch.Tensor, ResidencePlace]]
"""Original, copy, and where the original is."""


def tensors_in(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    """All tensors, also those in lists."""
    # By hand: inside `sg.device` it is done for every operation, whose arguments are no deeper.
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from tensors_in(each)


def replaced(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], copies: Copies
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments with copies in the place of the tensors that they are copies of."""
    if not copies:
        return args, kwargs
    by_tensor = {id(tensor): copied for tensor, copied, _ in copies}
    swapped: tuple[tuple[Any, ...], dict[str, Any]] = _tree.map(
        lambda each: by_tensor.get(id(each), each), (args, dict(kwargs))
    )
    return swapped


def leaves_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that backward from these gives gradients to."""
    leaves: list[torch.Tensor] = []
    nodes = [each.grad_fn for each in tensors]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves


def goal_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The device, or the tensor whose device, `Tensor.to` was asked for."""
    goal = kwargs.get("device", kwargs.get("other"))
    if goal is None and args and isinstance(args[0], str | int | torch.device | torch.Tensor):
        goal = args[0]
    return goal
