"""Buffers that a step gives its modules anew (`self.mean = ...`), as if it had written to those that they had."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stratagem import _torch

Held = tuple[torch.nn.Module, str, torch.Tensor]


def held_by(objects: Iterable[Any]) -> list[Held]:
    """The buffers of the modules among some objects, before a step."""
    return [
        (module, key, buffer)
        for module in objects
        if isinstance(module, torch.nn.Module)
        for key, buffer in _torch.buffers_of(module).items()
        if buffer is not None
    ]


@torch.no_grad()
def take_in(held: Sequence[Held]) -> None:
    """Writes what modules hold now, in new tensors of the same form, into the buffers that they held."""
    for module, key, buffer in held:
        new = _torch.buffers_of(module).get(key)
        if new is None or new is buffer or _form(new) != _form(buffer) or buffer.layout != torch.strided:
            continue
        buffer.copy_(new.clone())  # it may be a view of the buffer itself
        _torch.buffers_of(module)[key] = buffer


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
