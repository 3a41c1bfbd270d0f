"""Makes a dataset of tensors and arrays that are in memory."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from stratagem import _tree
from stratagem.errors import StrategyError


@final
class ArrayDataset(torch.utils.data.Dataset[Any]):
    """Rows of tensors and arrays of equal length; gives a whole batch at a time.

    Args:
        arrays: A tensor or array, or a nesting of them. Arrays of numbers become tensors.
    Raises:
        StrategyError: They differ in length.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = _tree.map(_as_tensor, arrays)
        leaves = _tree.leaves(self._arrays)
        if not leaves or not all(isinstance(each, torch.Tensor | np.ndarray) and each.ndim for each in leaves):
            kinds = ", ".join(type(each).__name__ for each in leaves) or "nothing"
            raise StrategyError(f"distribute takes tensors and arrays with at least one dimension, got {kinds}")
        lengths = [len(each) for each in leaves]
        if len(set(lengths)) > 1:
            raise StrategyError(
                f"the arrays have first dimensions {', '.join(map(str, lengths))}; "
                f"all must have the same, the number of examples"
            )
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return _tree.map(lambda each: each[index], self._arrays)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        first, num = indices[0], len(indices)
        if indices[-1] - first == num - 1 and list(indices) == list(range(first, first + num)):
            return _tree.map(lambda each: each[first : first + num], self._arrays)
        chosen = torch.as_tensor(indices)
        return _tree.map(
            lambda each: each[chosen.to(each.device) if isinstance(each, torch.Tensor) else chosen.numpy()],
            self._arrays,
        )


def as_they_are(batch: Any) -> Any:
    """The collate function of a dataset that gives whole batches."""
    return batch


def _as_tensor(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.dtype.kind in "biufc" and array.dtype.isnative:
        return torch.tensor(array) if not array.flags.writeable else torch.from_numpy(array)
    return array
