"""Refuses layers that a step makes: every replica would have one of its own, with weights of its own."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stratagem.errors import StrategyError


def parts_of(objects: Iterable[Any]) -> list[Any]:
    """The modules and parameters that modules among some objects hold, before a step."""
    return [part for *_, part in _parts(objects)]


def refuse_new(objects: Iterable[Any], before: Iterable[Any]) -> None:
    """Refuses parameters that modules hold after a step and did not before; new modules of known ones may be."""
    known = set(map(id, before))
    for module, key, part in _parts(objects):
        parameters = part.parameters() if isinstance(part, torch.nn.Module) else [part]
        if id(part) not in known and any(id(each) not in known for each in parameters):
            kind = type(module).__name__
            raise StrategyError(
                f"the step gave {kind} a new {type(part).__name__} {key!r}, of which each replica would have its own; "
                f"make it before the first run:\n"
                f"    with strategy.scope():\n"
                f"        model = {kind}(...)\n"
                f"        model(example)  # makes {key!r}\n"
                f"        optimizer = ...  # after it"
            )


def _parts(objects: Iterable[Any]) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    for module in objects:
        if isinstance(module, torch.nn.Module):
            for key, part in (*module.named_children(), *module.named_parameters(recurse=False)):
                yield module, key, part
