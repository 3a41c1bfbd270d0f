"""Trains Keras models with a strategy and without, and compares what comes out."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.utils.naming import reset_uids

import stratagem as sg

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(50, 4)).astype("float32")  # batches of 16: the last has 2
Y = (X @ RANDOM.normal(size=(4, 2)) + 0.1 * RANDOM.normal(size=(50, 2))).astype("float32")
LABELS = (Y[:, 0] > 0).astype("int64")
WEIGHTS = RANDOM.uniform(0.5, 2, size=50).astype("float32")

ARRAYS: dict[str, Any] = {"x": X, "y": Y, "batch_size": 16, "shuffle": False}


def compiled(model: Any, **given: Any) -> Any:
    """The model, compiled in the usual way but for what is given."""
    usual = {"loss": "mse", "optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "metrics": ["mae"]}
    model.compile(**usual | given)
    return model


def sequential(**given: Any) -> Any:
    """A model that `fit` builds."""
    return compiled(keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]), **given)


def build(make: Callable[[], Any], strategy: sg.Strategy | None) -> Any:
    """What a function makes, in the scope of a strategy if there is one; the same weights in both cases."""
    reset_uids()  # names are counted from 1
    keras.utils.set_random_seed(1)
    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def assert_equal(got: tuple[Any, Any], expected: tuple[Any, Any], rtol: float = 2e-5) -> None:
    """Compares two models and their histories."""
    (model, history), (plain, plain_history) = got, expected
    assert_histories_equal(history, plain_history, rtol)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol / 10)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations)


def assert_histories_equal(history: dict[str, Any], expected: dict[str, Any], rtol: float = 2e-5) -> None:
    """Compares the values of all epochs."""
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=rtol, atol=rtol / 10, err_msg=name)
