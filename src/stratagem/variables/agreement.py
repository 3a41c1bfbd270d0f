"""Finds out whether all machines changed the same between two runs.

Every worker runs the same program, so that what one alone changes (a checkpoint loaded by the chief
only, a learning rate that follows a worker's own loss) is a mistake after which they train different
models. What was changed is reduced to a label and a checksum each, and those are compared.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stratagem.objects import state_diff
from stratagem.processes.region import PAGE_BYTES
from stratagem.variables.store import Store, shaped

_MAX_NAMED = 3
_PLACE_IN_MEMORY = re.compile(r" at 0x[0-9a-fA-F]+")  # of a function or an object without words of its own

Told = dict[str, int]


def changed_in(store: Store, pages: np.ndarray) -> Told:
    """The tensors of a store that are not as all had them, among those in pages that were written to."""
    if not len(pages):
        return {}
    told = {}
    for placement in store.placements:
        first = placement.offset * store.dtype.itemsize // PAGE_BYTES
        last = (placement.offset + placement.numel) * store.dtype.itemsize // PAGE_BYTES
        if np.any((pages >= first) & (pages <= last)):
            own = shaped(store.private, placement)
            if not torch.equal(own, shaped(store.shared, placement)):
                told[placement.label] = checksum(own)
    return told


def checksum(tensor: torch.Tensor | None) -> int:
    """Of a tensor's values; of none, 0."""
    if tensor is None or not tensor.numel():
        return 0
    return zlib.crc32(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


def changed_objects(changes: state_diff.Snapshot, resolve: Callable[[int], Any]) -> Told:
    """What changed in distributed objects besides tensors, of what decides how they train.

    Other attributes of modules may well be a worker's own: its number, a folder.
    """
    told = {}
    for name, values in changes.items():
        obj = resolve(name)
        if isinstance(obj, torch.nn.Module | torch.Tensor | torch.optim.Optimizer):
            is_module = isinstance(obj, torch.nn.Module)
            compared = [values.training, values.held] if is_module else values
            told[f"{type(obj).__name__} (object {name})"] = zlib.crc32(_text(compared).encode())
    return told


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer is and is set to, in words that are the same where it is the same."""
    groups = [
        {key: value for key, value in sorted(group.items()) if key != "params"} for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {_text(groups)}"


def total(told: Told) -> int:
    """One number for all."""
    return zlib.crc32(repr(sorted(told.items())).encode()) if told else 0


def difference(number: int, names: Sequence[str], everyones: Sequence[Told]) -> str:
    """Says which worker changed what, where they differ.

    Args:
        number: The run that was to begin.
        names: The workers.
        everyones: What each has changed.
    """
    labels = dict.fromkeys(label for told in everyones for label in told)
    differing = [label for label in labels if len({told.get(label) for told in everyones}) > 1]
    shown = ", ".join(differing[:_MAX_NAMED]) + (f" and {len(differing) - _MAX_NAMED} more" * (len(differing) > 3))
    havers = [name for name, told in zip(names, everyones, strict=True) if any(label in told for label in differing)]
    who = f"only {', '.join(havers)}" if len(havers) < len(names) else "workers differently"
    return f"before run {number} {who} changed {shown}; load or set the same values in every worker between two runs"


def _text(values: Any) -> str:
    """Words that are the same where the values are, in whichever process."""
    return _PLACE_IN_MEMORY.sub("", repr(_plain(values)))


def _plain(values: Any) -> Any:
    """The same in a form whose text is equal where the values are."""
    # By hand: sets have to be in order, and tuples and lists may stand for each other.
    if isinstance(values, torch.Tensor):
        return values.tolist()
    if isinstance(values, set | frozenset):
        return sorted(map(repr, values))  # whose order differs from process to process
    if isinstance(values, Mapping):
        return {key: _plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(each) for each in values]
    return values
