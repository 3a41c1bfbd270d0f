"""Reads tf.data datasets through the methods that they document; TensorFlow itself is not imported."""

from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch

from stratagem import _tree
from stratagem.errors import StrategyError


def is_tf_dataset(data: Any) -> bool:
    """Whether this is a tf.data dataset."""
    return hasattr(data, "as_numpy_iterator") and hasattr(data, "element_spec")


def in_batches(dataset: Any, global_batch_size: int | None, shuffle: bool) -> "TfBatches":
    """The global batches of a tf.data dataset.

    Args:
        dataset: The dataset.
        global_batch_size: How many of its elements make a batch; `None` if they are batches.
        shuffle: Whether `distribute` was asked to shuffle, which such a dataset does itself.
    """
    if shuffle:
        raise StrategyError("a tf.data dataset shuffles itself: leave shuffle= out, and give dataset.shuffle(1000)")
    return TfBatches(dataset if global_batch_size is None else dataset.batch(global_batch_size))


def as_iterable(made: Any) -> Any:
    """What a function has made, read as a dataset of TensorFlow's if it is one."""
    return TfBatches(made) if is_tf_dataset(made) else made


@final
class TfBatches:
    """The elements of a tf.data dataset as tensors, once more in each epoch; texts and objects stay arrays.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for element in self._dataset.as_numpy_iterator():
            yield _tree.map_only((np.ndarray, np.generic), _as_tensor, element)

    def __len__(self) -> int:
        return len(self._dataset)


def _as_tensor(array: Any) -> Any:
    return torch.tensor(array) if array.dtype.kind in "biufc" else array  # a copy: the dataset may keep the array
