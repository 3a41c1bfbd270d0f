"""What a strategy refuses of a Keras model, and what it says of it, as early as `compile`."""

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import StrategyError
from tests.training.keras_runs import compiled

layers = keras.layers


@pytest.fixture
def in_scope(strategy: sg.Strategy) -> Iterator[None]:
    with strategy.scope():
        yield


def normalized(**given: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), layers.BatchNormalization(name="norm", **given), layers.Dense(2)])


def recurrent(layer: Any) -> Any:
    return keras.Sequential([keras.Input(batch_shape=(4, 3, 2)), layer])


@pytest.mark.usefixtures("in_scope")
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.LSTM(2, stateful=True),
        lambda: layers.Bidirectional(layers.GRU(2, stateful=True)),
        lambda: layers.RNN(layers.SimpleRNNCell(2), stateful=True),
    ],
)
def test_stateful_recurrent_layer_is_refused_since_the_batch_is_divided(layer: Any) -> None:
    with pytest.raises(StrategyError, match=r"is stateful.*divides each batch over 2 replicas.*OneDeviceStrategy"):
        compiled(recurrent(layer()))
    with pytest.raises(StrategyError, match="divides each batch over 2 replicas"):
        recurrent(layer()).predict(np.zeros((4, 3, 2), "float32"), verbose=0)


@pytest.mark.usefixtures("in_scope")
def test_compile_names_once_what_takes_a_part_of_a_batch_for_the_whole() -> None:
    model = normalized()
    with pytest.warns(UserWarning, match="other numbers on 2 replicas") as found:
        compiled(model, loss=keras.losses.Dice(), metrics=None)
    (told,) = found
    assert "batch normalization of 'norm' (synchronized=True" in str(told.message)
    assert "the loss 'Dice' (with axis=" in str(told.message)
    assert "docs/guides/what_differs.md" in str(told.message)
    assert told.filename.endswith("keras_runs.py"), "it points at the line that compiles"


@pytest.mark.usefixtures("in_scope")
@pytest.mark.parametrize("given", [{"synchronized": True}, {"trainable": False}])
def test_compile_says_nothing_of_what_is_the_same(given: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(normalized(**given), loss=["mse"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_device_is_told_nothing_and_keeps_states() -> None:
    with sg.OneDeviceStrategy().scope():
        compiled(normalized(), loss=keras.losses.Dice(), metrics=None)
        model = compiled(recurrent(layers.SimpleRNN(2, stateful=True, return_sequences=False)))
    model.fit(np.ones((4, 3, 2), "float32"), np.ones((4, 2), "float32"), batch_size=4, verbose=0)
    assert np.any(model.layers[0].states[0].numpy())
