"""Metrics for steps of one's own: `sg.metrics`.

The names and meanings are Keras' (and so TensorFlow's), for tensors of torch; nothing is kept here.
"""

from typing import Any

from stratagem import _tensorflow_names
from stratagem.training.metrics import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    Mean,
    MeanAbsoluteError,
    MeanSquaredError,
    Metric,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    Sum,
)

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "Sum",
]


def __getattr__(name: str) -> Any:
    return _tensorflow_names.of_module("metrics", name, __all__)
