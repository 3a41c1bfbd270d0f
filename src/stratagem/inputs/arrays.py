"""Makes a dataset of tensors, arrays and tables that are in memory."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from stratagem import _tree
from stratagem.errors import StrategyError
from stratagem.inputs.splitting import BatchDim, batch_dims, num_examples_of, rows_of


@final
class ArrayDataset(torch.utils.data.Dataset[Any]):
    """Rows of tensors and arrays of equal length; gives a whole batch at a time.

    Args:
        arrays: A tensor or array, or a nesting of them. Arrays of numbers become tensors.
        batch_dim: Along which dimension they have their rows.
    Raises:
        StrategyError: They differ in length.
    """

    def __init__(self, arrays: Any, batch_dim: BatchDim = 0) -> None:
        self._arrays = _tree.map(_as_tensor, arrays)
        leaves, self._structure = _tree.flatten(self._arrays)
        if not leaves or not all(isinstance(each, torch.Tensor | np.ndarray) and each.ndim for each in leaves):
            kinds = ", ".join(type(each).__name__ for each in leaves) or "nothing"
            raise StrategyError(f"distribute takes tensors and arrays with at least one dimension, got {kinds}")
        self._dims = batch_dims(self._arrays, leaves, batch_dim, "the data")
        self._length = num_examples_of(leaves, "the data", self._dims)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._of_each(lambda each, dim: each[(slice(None),) * dim + (index,)])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        first, num = indices[0], len(indices)
        if indices[-1] - first == num - 1 and list(indices) == list(range(first, first + num)):
            return self._of_each(lambda each, dim: rows_of(each, first, first + num, dim))
        chosen = torch.as_tensor(indices)

        def taken(each: Any, dim: int) -> Any:
            if not isinstance(each, torch.Tensor):
                return each.take(chosen.numpy(), axis=dim)
            if each.is_nested:
                rows = each.unbind()
                return torch.nested.nested_tensor([rows[index] for index in indices], layout=each.layout)
            return each.index_select(dim, chosen.to(each.device))

        return self._of_each(taken)

    def _of_each(self, function: Callable[[Any, int], Any]) -> Any:
        """The same nesting of what a function makes of each array and its dimension of rows."""
        pairs = zip(_tree.leaves(self._arrays), self._dims, strict=True)
        return _tree.unflatten([function(each, dim) for each, dim in pairs], self._structure)


def of_columns(data: Any) -> Any:
    """A nesting with arrays in the place of tables (pandas, polars): a dict of columns for a table, one for a column.

    What tells a table is what both libraries document: `columns`, and `to_numpy()` of each.
    """
    return _tree.map(lambda each: _columns(each) if is_table(each) else each, data)


def is_table(data: Any) -> bool:
    """Whether this is a table of pandas or polars, or a column of one."""
    return hasattr(data, "to_numpy") and hasattr(data, "__len__") and not isinstance(data, torch.Tensor)


def _columns(table: Any) -> Any:
    if not hasattr(table, "columns"):
        return np.asarray(table.to_numpy())
    return {name: np.asarray(table[name].to_numpy()) for name in table.columns}


def as_they_are(batch: Any) -> Any:
    """The collate function of a dataset that gives whole batches."""
    return batch


def _as_tensor(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.dtype.kind in "biufc" and array.dtype.isnative:
        return torch.tensor(array) if not array.flags.writeable else torch.from_numpy(array)
    return array
