"""Cuts a global batch into one contiguous slice per replica.

Owns what counts as a leaf of a batch, which leaves are cut, and the sizes of the slices.
Knows nothing of where batches come from.
"""

import logging
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from stratagem import _tree
from stratagem.errors import StrategyError, UnevenDataError
from stratagem.objects.per_replica import PerReplica, load_deferred

_log = logging.getLogger("stratagem")


def sizes_of_slices(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """As even as possible, the larger ones first."""
    size, more = divmod(num_examples, num_replicas)
    return tuple(size + (replica < more) for replica in range(num_replicas))


def offsets(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each slice begins and ends."""
    ends = np.cumsum(sizes).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@final
class Evenness:
    """Watches over the sizes of global batches, as `uneven=` of `distribute` asks.

    Args:
        uneven: `allow` or `error`.
        num_replicas: How many replicas share a batch.
    """

    def __init__(self, uneven: str, num_replicas: int) -> None:
        if uneven not in ("allow", "error"):
            raise StrategyError(f"no way to treat uneven batches is named {uneven!r}; known: 'allow', 'error'")
        self._strict = uneven == "error"
        self._num_replicas = num_replicas
        self._logged = False

    def slices(self, num_examples: int, what: str) -> tuple[int, ...]:
        """The sizes of the slices of a global batch.

        Raises:
            UnevenDataError: The batch does not divide evenly, and it should.
        """
        if num_examples == 0:
            raise StrategyError(f"{what} has 0 examples; a global batch needs at least one")
        self.check(num_examples, what)
        sizes = sizes_of_slices(num_examples, self._num_replicas)
        self.note(sizes, what)
        return sizes

    def check(self, num_examples: int, what: str) -> None:
        """Raises the error of a batch that does not divide evenly, and should."""
        sizes = sizes_of_slices(num_examples, self._num_replicas)
        if self._strict and sizes[0] != sizes[-1]:
            raise UnevenDataError(
                f"{what} has {num_examples} examples, which gives {self._num_replicas} replicas {_listed(sizes)}; "
                f"choose a global batch that is a multiple of {self._num_replicas} and drop_last=True, "
                f"or allow it with uneven='allow'"
            )

    def note(self, sizes: Sequence[int], what: str) -> None:
        """Says once that replicas go without data."""
        if not self._logged and not all(sizes):
            self._logged = True
            _log.info(
                "%s has %d examples for %d replicas: %d of them get an empty batch, which counts for nothing",
                what,
                sum(sizes),
                len(sizes),
                sum(size == 0 for size in sizes),
            )


def is_leaf(value: Any) -> bool:
    """Whether a part of a batch is one leaf: a list of plain values or a tuple of texts is, like a tensor."""
    if type(value) is tuple:  # what torch's default_collate makes of texts
        return bool(value) and all(isinstance(each, str | bytes) for each in value)
    return isinstance(value, list) and not any(
        isinstance(each, torch.Tensor | np.ndarray | list | tuple | dict) for each in value
    )


def flatten(batch: Any) -> tuple[list[Any], _tree.Structure]:
    """The leaves of a batch, and how they hang together."""
    return _tree.flatten(batch, is_leaf=is_leaf)


def assemble(leaves: Sequence[Any], structure: _tree.Structure) -> Any:
    """A batch of such leaves; a list of them becomes a tuple, so that it can be the `args` of a run."""
    batch = _tree.unflatten(leaves, structure)
    return tuple(batch) if type(batch) is list else batch


def num_examples_of(leaves: Sequence[Any], what: str) -> int:
    """How many examples a batch has: the first dimension of all its batched leaves.

    Raises:
        StrategyError: There is none, or they disagree.
    """
    for each in leaves:
        if not _is_batched(each) and hasattr(each, "__len__") and not isinstance(each, _WHOLE):
            raise StrategyError(
                f"cannot cut a {type(each).__name__} in {what}; batches are tensors, arrays and lists, "
                f"in tuples, lists and dicts"
            )
    lengths = [len(each) for each in leaves if _is_batched(each)]
    if not lengths:
        outline = ", ".join(type(each).__name__ for each in leaves) or "nothing"
        raise StrategyError(
            f"{what} has nothing to divide over the replicas, only {outline}; "
            f"give batches of tensors or arrays, or single examples with global_batch_size="
        )
    if len(set(lengths)) > 1:
        raise StrategyError(
            f"the parts of {what} have first dimensions {_listed(lengths)}; "
            f"all must have the same, the number of examples"
        )
    return lengths[0]


def split(batch: Any, evenness: Evenness, what: str, here: range) -> Any:
    """A global batch with a `PerReplica` at every leaf, of the slices of the replicas that are here."""
    leaves, structure = flatten(batch)
    sizes = evenness.slices(num_examples_of(leaves, what), what)
    bounds, counts = _part(offsets(sizes), here), tuple(_part(sizes, here))
    return assemble([PerReplica(_cut(each, bounds), counts) for each in leaves], structure)


def emptied_batch(batch: Any) -> Any:
    """A distributed batch of the same form without examples."""

    def without(leaf: PerReplica) -> PerReplica:
        counts = leaf.counts or (0,) * len(leaf)
        own = [emptied(value, count) for value, count in zip(load_deferred(leaf.values), counts, strict=True)]
        return PerReplica(own, (0,) * len(leaf))

    return _tree.map(without, batch, is_leaf=lambda each: isinstance(each, PerReplica))


def join(batches: Sequence[Any], num_replicas: int, evenness: Evenness, what: str) -> Any:
    """One batch per replica as one structure; replicas for which there is none get an empty one."""
    flat = [flatten(batch) for batch in batches]
    for leaves, structure in flat:
        if structure != flat[0][1]:
            raise StrategyError(
                f"the batches of {what} differ in structure, {_outline(flat[0][0])} and {_outline(leaves)}; "
                f"the batches of one step must be alike"
            )
    sizes = [num_examples_of(leaves, what) for leaves, _ in flat]
    missing = num_replicas - len(flat)
    counts = (*sizes, *[0] * missing)
    evenness.note(counts, what)
    columns = [
        [*column, *[emptied(column[-1])] * missing] for column in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return assemble([PerReplica(column, counts) for column in columns], flat[0][1])


def _part(everyones: Sequence[Any], here: range) -> list[Any]:
    return [everyones[number] for number in here]


def emptied(leaf: Any, num_examples: int | None = None) -> Any:
    """What a replica without examples gets in the place of a leaf.

    Args:
        leaf: The leaf as another replica has it.
        num_examples: If given, only what has this many rows is emptied.
    """
    if not _is_batched(leaf) or num_examples not in (None, len(leaf)):
        return leaf
    return leaf[:0]


_WHOLE = (str, bytes, torch.Tensor, np.ndarray, np.generic)


def _is_batched(leaf: Any) -> bool:
    return type(leaf) in (list, tuple) or (isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0)


def _cut(leaf: Any, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    if not _is_batched(leaf):
        return [leaf] * len(bounds)
    return [leaf[begin:end] for begin, end in bounds]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _outline(leaves: Sequence[Any]) -> str:
    return f"{len(leaves)} parts ({', '.join(type(each).__name__ for each in leaves)})"
