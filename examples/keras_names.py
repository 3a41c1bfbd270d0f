"""The names of TensorFlow that `keras_notes.py` uses, for machines without TensorFlow."""

import math
import os
from types import SimpleNamespace
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import numpy as np

import stratagem as sg


class Dataset(keras.utils.PyDataset):
    """As much of `tf.data.Dataset` as the notes need."""

    def __init__(self, columns: tuple[Any, ...], batch_size: int = 1) -> None:
        super().__init__()
        self._columns = columns
        self._batch_size = batch_size

    @classmethod
    def from_tensors(cls, example: tuple[Any, ...]) -> "Dataset":
        """A dataset of one example."""
        return cls(tuple(np.array([part], dtype="float32") for part in example))

    def repeat(self, count: int) -> "Dataset":
        """All examples, so many times."""
        return Dataset(tuple(np.concatenate([column] * count) for column in self._columns))

    def batch(self, batch_size: int) -> "Dataset":
        """The same in batches."""
        return Dataset(self._columns, batch_size)

    def __len__(self) -> int:
        return math.ceil(len(self._columns[0]) / self._batch_size)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        part = slice(number * self._batch_size, (number + 1) * self._batch_size)
        return tuple(column[part] for column in self._columns)


tf = SimpleNamespace(distribute=sg, keras=keras, data=SimpleNamespace(Dataset=Dataset))
