"""Makes what the replicas of a machine wrote to parameters themselves everyone's.

Most often all write the same, and the pages of one serve. Else what each has changed is brought together element by
element; two values for one element are an error.
"""

import bisect
from collections.abc import Sequence

import numpy as np
import torch

from stratagem.errors import DriftError
from stratagem.processes.region import runs
from stratagem.variables.participant import Participant
from stratagem.variables.store import Store

_SAME = 1e-5  # the relative difference up to which replicas have written the same
_NONE = -1

Changed = list[tuple[slice, torch.Tensor]]
"""Ranges of elements, and which of each are not as all had them."""


def publish(stores: Sequence[Store], written: Sequence[np.ndarray], flags: Sequence[int], replica: Participant) -> None:
    """Every replica must come here.

    Args:
        stores: Where parameters lie.
        written: The pages of each that this replica wrote to.
        flags: Which replicas wrote to any.
        replica: This one.
    Raises:
        DriftError: Replicas wrote different values to one element; in all of them.
    """
    signals, first = replica.signals, flags.index(1)
    several = sum(flags) > 1
    changed = [_changed(store, pages) for store, pages in zip(stores, written, strict=True)] if several else []
    if several:
        signals.barrier()  # before the first overwrites what others compare with
    if signals.rank == first:
        for store, pages in zip(stores, written, strict=True):
            store.region.publish(pages)
    signals.barrier()
    if several:
        differs = not all(map(_is_published, stores, written))
        if replica.control.all_reduce(torch.tensor([differs]), "max"):
            _merge(stores, changed, replica)
    for store, pages in zip(stores, written, strict=True):
        store.region.drop(pages)
    signals.barrier()


def are_alike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors have the same values, but for what different orders of summation make."""
    if not (one.is_floating_point() or one.is_complex()):
        return one == other
    size = float(other.abs().nan_to_num(posinf=0.0).max()) if other.numel() else 0.0
    same = max(_SAME, torch.finfo(other.dtype).eps)  # of types with fewer digits: their last one
    return torch.isclose(one, other, rtol=same, atol=same * size, equal_nan=True)


def label_at(store: Store, element: int) -> str:
    """The tensor in which an element of a store lies."""
    offsets = [placement.offset for placement in store.placements]
    return store.placements[bisect.bisect_right(offsets, element) - 1].label


def _ranges(store: Store, pages: np.ndarray) -> list[slice]:
    size = store.dtype.itemsize
    return [slice(start // size, end // size) for start, end in runs(pages)]


def _changed(store: Store, pages: np.ndarray) -> Changed:
    return [(each, store.private[each] != store.shared[each]) for each in _ranges(store, pages)]


def _is_published(store: Store, pages: np.ndarray) -> bool:
    """Whether what this replica wrote is what all have by now."""
    return all(torch.equal(store.private[each], store.shared[each]) for each in _ranges(store, pages))


def _merge(stores: Sequence[Store], changed: Sequence[Changed], replica: Participant) -> None:
    """Brings what replicas changed together; the first that wrote anything has published its pages already."""
    control, rank = replica.control, replica.signals.rank
    conflict = [_NONE, _NONE, _NONE]  # a store, an element of it, and who else wrote to that
    for number, (store, own) in enumerate(zip(stores, changed, strict=True)):
        found = [mask.nonzero().flatten() + part.start for part, mask in own]
        rows = control.all_gather(torch.cat([torch.empty(0, dtype=torch.int64), *found]))
        mine, earlier = rows[rank], torch.cat([rows[0][:0], *rows[:rank]])
        is_taken = torch.isin(mine, earlier)
        new, taken = mine[~is_taken], mine[is_taken]
        store.shared[new] = store.private[new]
        control.barrier()
        differing = taken[~are_alike(store.private[taken], store.shared[taken])]
        if len(differing) and conflict[0] == _NONE:
            element = int(differing[0])
            conflict = [number, element, next(other for other, row in enumerate(rows) if element in row)]
    for other, (number, element, before) in enumerate(
        row.tolist() for row in control.all_gather(torch.tensor(conflict))
    ):
        if number != _NONE:
            raise DriftError(
                f"replicas {before} and {other} wrote different values to {label_at(stores[number], element)!r} in one "
                f"step; write the same values in all replicas (from gradients or all_reduce), or write to different "
                f"elements"
            )
