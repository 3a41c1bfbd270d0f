"""Keras in the workers of a cluster with parameter servers; servers in threads of this process."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import StrategyError
from tests.parameters.network.cluster import Cluster
from tests.parameters.network.test_strategy import task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NewCluster = Callable[..., Cluster]
INPUTS = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
TARGETS = INPUTS.sum(1, keepdims=True)


def model_in(strategy: sg.Strategy, optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    return model


def fitted(model: Any) -> tuple[dict[str, list[float]], np.ndarray]:
    data = (INPUTS, TARGETS)
    told = model.fit(*data, batch_size=8, epochs=2, shuffle=False, validation_data=data, verbose=0)
    return told.history, model.predict(INPUTS, verbose=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=1.0),
        lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), weight_decay=0.1),
        lambda: keras.optimizers.Adamax(0.05),
        lambda: keras.optimizers.Nadam(0.05),
        lambda: keras.optimizers.Adadelta(1.0),
        lambda: keras.optimizers.Adagrad(0.05),
    ],
)
def test_fit_of_one_worker_equals_one_device(new_cluster: NewCluster, make: Callable[[], Any]) -> None:
    with sg.OneDeviceStrategy() as reference:
        logs, predictions = fitted(model_in(reference, make()))
    with task(new_cluster(num_ps=2, num_workers=1)) as strategy:
        own_logs, own_predictions = fitted(model_in(strategy, make()))
        assert strategy.version == 6
    np.testing.assert_allclose(own_predictions, predictions, rtol=1e-3, atol=1e-3)
    for name, values in logs.items():
        np.testing.assert_allclose(own_logs[name], values, rtol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        lambda: keras.optimizers.Adam(0.05, amsgrad=True),
        lambda: keras.optimizers.Adamax(0.05),
        lambda: keras.optimizers.Nadam(0.05),
        lambda: keras.optimizers.Adadelta(1.0),
        lambda: keras.optimizers.Adagrad(0.05),
    ],
)
def test_what_was_saved_goes_on_with_the_state_of_the_optimizer(
    new_cluster: NewCluster, tmp_path: Path, make: Callable[[], Any]
) -> None:
    def train(model: Any) -> None:
        model.fit(INPUTS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)

    path = tmp_path / "saved.weights.h5"
    with sg.OneDeviceStrategy() as reference:
        expected = model_in(reference, make())
        for _ in range(2):
            train(expected)
    for part in range(2):
        with task(new_cluster(num_ps=2, num_workers=1)) as strategy:
            model = model_in(strategy, make())
            if part:
                model.optimizer.build(model.trainable_variables)
                model.load_weights(path)
            train(model)
            model.save_weights(path)
    for own, other in zip(
        [*model.get_weights(), *model.optimizer.variables],
        [*expected.get_weights(), *expected.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, (own, other)), rtol=1e-2, atol=1e-4)


def test_workers_train_on_their_parts_and_evaluate_alone(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    with contextlib.ExitStack() as stack:
        strategies = [stack.enter_context(task(cluster, index=index)) for index in range(2)]
        models = [model_in(each, keras.optimizers.SGD(0.05)) for each in strategies]
        seen: list[int] = []

        class Noting(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                seen.append(strategies[0].version)

        for model in models:
            model.fit(INPUTS, TARGETS, batch_size=8, verbose=0, callbacks=[Noting()])
        assert strategies[0].version == 3  # the other has trained since
        assert strategies[1].version == 6
        assert seen[:3] == [1, 2, 3]
        strategies[0].pull()
        for one, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        assert models[0].predict(INPUTS, batch_size=5, verbose=0).shape == (24, 1)
        losses = [model.evaluate(INPUTS, TARGETS, batch_size=5, verbose=0)[0] for model in models]
        assert losses[0] == pytest.approx(losses[1])
        assert losses[0] == pytest.approx(float(((models[0].predict(INPUTS, verbose=0) - TARGETS) ** 2).mean()))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (keras.optimizers.RMSprop(), "apply Keras' SGD, Adam, .*, Adagrad, got RMSprop"),
        (keras.optimizers.Adam(weight_decay=0.1), r"Adam\(weight_decay=0.1\); leave weight_decay out, or use AdamW"),
        (keras.optimizers.SGD(use_ema=True), "leave use_ema out"),
    ],
)
def test_optimizers_that_servers_cannot_apply_are_refused(
    new_cluster: NewCluster, optimizer: Any, message: str
) -> None:
    with task(new_cluster(num_workers=1)) as strategy:
        model = model_in(strategy, optimizer)
        with pytest.raises(StrategyError, match=message):
            model.train_on_batch(INPUTS, TARGETS)
