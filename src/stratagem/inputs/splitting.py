"""Cuts a global batch into one contiguous slice per replica.

Owns what counts as a leaf of a batch, which leaves are cut, and the sizes of the slices.
Knows nothing of where batches come from.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch

from stratagem import _tree
from stratagem.errors import StrategyError, UnevenDataError
from stratagem.objects.per_replica import PerReplica

_log = logging.getLogger("stratagem")

BatchDim: TypeAlias = int | Mapping[Any, int]
"""Along which dimension batches have their examples: one for all parts, or by name."""


def sizes_of_slices(num_examples: int, num_replicas: int) -> tuple[int, ...]:
    """As even as possible, the larger ones first."""
    size, more = divmod(num_examples, num_replicas)
    return (size + 1,) * more + (size,) * (num_replicas - more)


def offsets(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each slice begins and ends."""
    ends = list(itertools.accumulate(sizes))
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
        sizes = self.check(num_examples, what)
        self.note(sizes, what)
        return sizes

    def check(self, num_examples: int, what: str) -> tuple[int, ...]:
        """The same; a batch may be empty."""
        sizes = sizes_of_slices(num_examples, self._num_replicas)
        if self._strict and sizes[0] != sizes[-1]:
            raise UnevenDataError(
                f"{what} has {num_examples} examples, which gives {self._num_replicas} replicas {_listed(sizes)}; "
                f"choose a global batch that is a multiple of {self._num_replicas} and drop_last=True, "
                f"or allow it with uneven='allow'"
            )
        return sizes

    def note(self, sizes: Sequence[int], what: str) -> None:
        """Says once that replicas go without data."""
        if not self._logged and not all(sizes):
            self._logged = True
            _log.info(
                "%s has %d examples for %d replicas: %d of them get a copy of an example, which does not count",
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


def batch_dims(batch: Any, leaves: Sequence[Any], batch_dim: BatchDim, what: str) -> list[int]:
    """Along which dimension each leaf of a batch has its examples.

    Args:
        batch: The batch.
        leaves: Its leaves.
        batch_dim: For all leaves, or by key, name or position in the batch; 0 for what is not in it.
        what: The batch, for errors.
    Raises:
        StrategyError: A leaf does not have that dimension, or the batch no such part.
    """
    if isinstance(batch_dim, int):
        return [_checked_dim(each, batch_dim, what) for each in leaves]
    parts = {} if is_leaf(batch) else _tree.parts_by_name(batch)
    if unknown := [name for name in batch_dim if name not in parts]:
        raise StrategyError(f"batch_dim names {unknown[0]!r}, and {what} has {list(parts) or 'no parts with names'}")
    dims = [(part, batch_dim.get(name, 0)) for name, part in parts.items()]
    return [_checked_dim(each, dim, what) for part, dim in dims for each in flatten(part)[0]]


def _checked_dim(leaf: Any, dim: int, what: str) -> int:
    if not isinstance(leaf, torch.Tensor | np.ndarray) or not leaf.ndim:
        return 0
    if not 0 <= dim < leaf.ndim or (dim and isinstance(leaf, torch.Tensor) and leaf.is_nested):
        raise StrategyError(
            f"batch_dim is {dim}, and a part of {what} is a {type(leaf).__name__} of {leaf.ndim} dimensions; give each "
            f"its own: batch_dim={{'src': 1, 'label': 0}}"
        )
    return dim


def num_examples_of(leaves: Sequence[Any], what: str, dims: Sequence[int] | None = None) -> int:
    """How many examples a batch has: the size of all its batched leaves along the dimension of examples.

    Raises:
        StrategyError: There is none, or they disagree.
    """
    for each in leaves:
        if not _is_batched(each) and hasattr(each, "__len__") and not isinstance(each, _WHOLE):
            raise StrategyError(
                f"cannot cut a {type(each).__name__} in {what}; batches are tensors, arrays and lists, "
                f"in tuples, lists, dicts and dataclasses"
            )
        if isinstance(each, torch.Tensor) and each.layout not in _LAYOUTS:
            raise StrategyError(
                f"cannot cut a tensor of layout {each.layout} in {what}; batches have dense, nested and COO tensors, "
                f"so make it one with to_sparse_coo()"
            )
    lengths = [
        _num_rows(each, dim) for each, dim in zip(leaves, dims or [0] * len(leaves), strict=True) if _is_batched(each)
    ]
    if not lengths:
        outline = ", ".join(type(each).__name__ for each in leaves) or "nothing"
        raise StrategyError(
            f"{what} has nothing to divide over the replicas, only {outline}; "
            f"give batches of tensors or arrays, or single examples with global_batch_size="
        )
    if len(set(lengths)) > 1:
        raise StrategyError(
            f"the parts of {what} have first dimensions {_listed(lengths)}; "
            f"all must have the same, the number of examples; if it is another dimension, name it with batch_dim="
        )
    return lengths[0]


def split(batch: Any, evenness: Evenness, what: str, here: range, batch_dim: BatchDim = 0) -> Any:
    """A global batch with a `PerReplica` at every leaf, of the slices of the replicas that are here."""
    leaves, structure = flatten(batch)
    dims = batch_dims(batch, leaves, batch_dim, what)
    sizes = evenness.slices(num_examples_of(leaves, what, dims), what)
    bounds, counts = _part(offsets(sizes), here), tuple(_part(sizes, here))
    cut = [PerReplica(_cut(each, bounds, dim), counts) for each, dim in zip(leaves, dims, strict=True)]
    return assemble(cut, structure)


def uncounted(batch: Any) -> Any:
    """A distributed batch once more, in the place of one that a machine does not have: it counts for nothing."""
    return _tree.map(
        lambda leaf: PerReplica(leaf.held, (0,) * len(leaf)), batch, is_leaf=lambda each: isinstance(each, PerReplica)
    )


def join(batches: Sequence[Any], num_replicas: int, evenness: Evenness, what: str, batch_dim: BatchDim = 0) -> Any:
    """One batch per replica as one structure; replicas for which there is none get another's, uncounted."""
    flat = [flatten(batch) for batch in batches]
    for leaves, structure in flat:
        if structure != flat[0][1]:
            raise StrategyError(
                f"the batches of {what} differ in structure, {_outline(flat[0][0])} and {_outline(leaves)}; "
                f"the batches of one step must be alike"
            )
    dims = [batch_dims(batch, leaves, batch_dim, what) for batch, (leaves, _) in zip(batches, flat, strict=True)]
    sizes = [
        1 if _is_example(leaves, own) else num_examples_of(leaves, what, own)
        for (leaves, _), own in zip(flat, dims, strict=True)
    ]
    counts = (*sizes, *[0] * (num_replicas - len(flat)))
    evenness.note(counts, what)
    instead = next((place for place, size in enumerate(sizes) if size), 0)
    chosen = [flat[place if count else instead][0] for place, count in enumerate(counts)]
    return assemble([PerReplica(column, counts) for column in zip(*chosen, strict=True)], flat[0][1])


def _is_example(leaves: Sequence[Any], dims: Sequence[int]) -> bool:
    """Whether these are the parts of a single example: batches have rows, as many in every part."""
    numbers = any(isinstance(each, torch.Tensor | np.ndarray | np.generic) and not each.ndim for each in leaves)
    lengths = {_num_rows(each, dim) for each, dim in zip(leaves, dims, strict=True) if _is_batched(each)}
    return numbers or len(lengths) != 1


def _part(everyones: Sequence[Any], here: range) -> list[Any]:
    return [everyones[number] for number in here]


_LAYOUTS = (torch.strided, torch.jagged, torch.sparse_coo)
_WHOLE = (str, bytes, torch.Tensor, np.ndarray, np.generic)


def _is_batched(leaf: Any) -> bool:
    return type(leaf) in (list, tuple) or (isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0)


def _cut(leaf: Any, bounds: Sequence[tuple[int, int]], dim: int) -> list[Any]:
    if not _is_batched(leaf):
        return [leaf] * len(bounds)
    # A replica without examples gets one that counts for nothing: few programs can do without.
    return [rows_of(leaf, begin, end, dim) if begin < end else rows_of(leaf, 0, 1, dim) for begin, end in bounds]


def _num_rows(leaf: Any, dim: int) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.size(dim)
    return int(leaf.shape[dim]) if isinstance(leaf, np.ndarray) else len(leaf)


def rows_of(leaf: Any, begin: int, end: int, dim: int = 0) -> Any:
    """Some examples of a leaf; where it wants gradients, they do too, each replica's for itself."""
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf:
        return rows_of(leaf.detach(), begin, end, dim).requires_grad_()
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return torch.nested.nested_tensor(leaf.unbind()[begin:end], layout=leaf.layout)
    if isinstance(leaf, torch.Tensor) and leaf.is_sparse:
        return leaf.index_select(dim, torch.arange(begin, end, device=leaf.device))
    return leaf[(slice(None),) * dim + (slice(begin, end),)] if dim else leaf[begin:end]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _outline(leaves: Sequence[Any]) -> str:
    return f"{len(leaves)} parts ({', '.join(type(each).__name__ for each in leaves)})"
