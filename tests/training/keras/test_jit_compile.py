"""`compile(jit_compile=True)` of Keras under a strategy: every replica compiles its steps."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch

import stratagem as sg
from tests.training.keras_runs import X, Y, compiled

# Torch's compiler uses what torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore")


def mlp() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])


def trained(**options: Any) -> list[Any]:
    """All that fit, evaluate and predict tell; the last batch is uneven."""
    model = compiled(mlp(), metrics=["mae"], **options)
    history = model.fit(X[:23], Y[:23], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    told = model.evaluate(X[:23], Y[:23], batch_size=8, verbose=0)
    return [*history.values(), told, model.predict(X[:23], verbose=0), *model.get_weights()]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def set_stance(stance: str) -> None:
    torch.compiler.set_stance(stance)


@pytest.fixture
def eager_stance(strategy: sg.Strategy) -> Iterator[None]:
    """Compiled functions run as they are: the compiler takes a minute for a model of Keras'."""
    strategy.run(set_stance, args=("force_eager",))
    yield
    strategy.run(set_stance, args=("default",))


@pytest.mark.usefixtures("eager_stance")
def test_model_with_jit_compile_equals_plain_keras(strategy: sg.Strategy) -> None:
    expected = trained(jit_compile=False)
    with strategy.scope():
        assert_same(trained(jit_compile=True), expected)


def test_auto_compiles_nothing_on_torch(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = compiled(mlp(), jit_compile="auto")
    assert model.jit_compile is False


@pytest.mark.usefixtures("eager_stance")
def test_jit_compile_that_is_set_later_reaches_the_replicas(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = compiled(mlp())
        model.predict(X[:8], verbose=0)
        model.jit_compile = True
        model.predict_function = None
        model.predict(X[:8], verbose=0)

    def is_jit() -> bool:
        return bool(model.jit_compile)

    assert list(strategy.local_results(strategy.run(is_jit))) == [True, True]
