"""One suite for Keras on every synchronous strategy: `fit` and its kin must give what they give on one device."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import stratagem as sg
from tests.contracts.strategies_under_test import FEWER_ROWS, opened
from tests.training import keras_models
from tests.training.keras_runs import ARRAYS, LABELS, X, Y, assert_equal, build, compiled, sequential

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:8 batches in a row"),  # of one row, on four devices of XLA
]


@pytest.fixture(scope="module", params=FEWER_ROWS)
def strategy(
    request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sg.Strategy]:
    with opened(request, tmp_path_factory.mktemp("workers")) as made:
        yield made


def fit(make: Any, strategy: sg.Strategy | None, **given: Any) -> tuple[Any, Any]:
    model = build(make, strategy)
    keras.utils.set_random_seed(2)
    return model, model.fit(**ARRAYS | {"epochs": 2, "verbose": 0} | given).history


def normalized() -> Any:
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(synchronized=sg.has_strategy())]
    return compiled(keras.Sequential([*layers, keras.layers.Dense(2)]))


def test_layers_of_a_step_of_ones_own_compute_on_the_device_of_the_replica(strategy: sg.Strategy) -> None:
    model = build(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), strategy)
    found = strategy.run(lambda x: str(model(x).device), args=(torch.ones(8, 4),))
    assert list(strategy.local_results(found)) == [
        str(each.torch_device) for each in strategy.devices[: strategy.num_replicas_in_sync]
    ]


def test_fit_equals_one_device(strategy: sg.Strategy) -> None:
    given = {"shuffle": True, "validation_data": (X[:21], Y[:21])}
    assert_equal(fit(sequential, strategy, **given), fit(sequential, None, **given))


def test_fit_with_adam_clipping_and_a_step_of_ones_own_equals_one_device(strategy: sg.Strategy) -> None:
    def make() -> Any:
        return compiled(keras_models.Twice(), optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.5))

    assert_equal(fit(make, strategy), fit(make, None))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_kernels_that_are_not_row_major_equal_one_device(strategy: sg.Strategy, optimizer: str) -> None:
    def make() -> Any:
        layers = [
            keras.layers.Reshape((2, 2)),
            keras.layers.SimpleRNN(6),
            keras.layers.Dense(8, kernel_initializer="orthogonal"),
            keras.layers.Dense(2),
        ]
        return compiled(keras.Sequential([keras.Input((4,)), *layers]), optimizer=optimizer)

    (model, history), (plain, expected) = fit(make, strategy), fit(make, None)
    kernel = plain.layers[1].cell.recurrent_kernel.value
    assert not kernel.is_contiguous(), "Keras makes orthogonal kernels row-major now; find another initializer"
    assert_equal((model, history), (plain, expected))
    for ours, theirs in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-5, atol=2e-6, err_msg=theirs.path)


def test_whole_updates_averages_sums_and_metrics_of_ones_own_equal_one_device(strategy: sg.Strategy) -> None:
    def make() -> Any:
        return sequential(
            optimizer=keras.optimizers.Lamb(0.01, use_ema=True, gradient_accumulation_steps=2),
            loss=keras.losses.MeanSquaredError(reduction="sum"),
            metrics=["mae", keras_models.Largest()],
        )

    assert_equal(fit(make, strategy), fit(make, None))


def test_synchronized_statistics_equal_one_device(strategy: sg.Strategy) -> None:
    # Batches of 25: of very few examples normalization makes signs, which hang on the last digit.
    assert_equal(fit(normalized, strategy, batch_size=25), fit(normalized, None, batch_size=25), rtol=1e-3)


def test_batches_with_fewer_rows_than_replicas_equal_one_device(strategy: sg.Strategy) -> None:
    def make() -> Any:
        metrics = ["mae", keras_models.Largest()]
        return compiled(keras.Sequential([keras_models.Rowwise(), keras.layers.Dense(2)]), metrics=metrics)

    given = {"x": X[:3], "y": Y[:3], "batch_size": 1, "validation_data": (X[:4], Y[:4])}
    (model, history), (plain, expected) = fit(make, strategy, **given), fit(make, None, **given)
    assert_equal((model, history), (plain, expected))
    np.testing.assert_allclose(model.predict(X[:1], verbose=0), plain.predict(X[:1], verbose=0), atol=1e-5)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras' own
@pytest.mark.parametrize(("size", "end"), [(1, 5), (16, 50)])
def test_several_steps_per_execution_equal_one_device(strategy: sg.Strategy, size: int, end: int) -> None:
    def make(steps_per_execution: int = 1) -> Any:
        layers = [keras_models.Rowwise(), keras.layers.Dense(2)]
        metrics = ["mae", keras_models.Largest()]
        return compiled(keras.Sequential(layers), metrics=metrics, steps_per_execution=steps_per_execution)

    given = {"x": X[:end], "y": Y[:end], "batch_size": size, "validation_data": (X[:4], Y[:4])}
    model, history = fit(functools.partial(make, 3), strategy, **given)
    plain, expected = fit(make, None, **given)
    assert_equal((model, history), (plain, expected))
    predicted = [each.predict(X[:end], batch_size=size, verbose=0) for each in (model, plain)]
    np.testing.assert_allclose(*predicted, atol=1e-5)


def test_evaluate_and_predict_equal_one_device(strategy: sg.Strategy) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        def make() -> Any:
            layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
            metrics = ["accuracy", keras.metrics.AUC(name="auc")]
            return compiled(keras.Sequential(layers), loss="binary_crossentropy", metrics=metrics)

        model, _ = fit(make, strategy, y=LABELS)
        found = [model.evaluate(X[:end], LABELS[:end], batch_size=size, verbose=0) for size, end in ((1, 7), (16, 50))]
        return found, model.predict(X, batch_size=7, verbose=0)

    (ours, predicted), (theirs, expected) = run(strategy), run(None)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    np.testing.assert_allclose(predicted, expected, atol=1e-5)


def test_what_a_callback_changes_reaches_the_replicas(strategy: sg.Strategy) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        model = build(sequential, strategy)

        def change(epoch: int, logs: Any) -> None:
            model.optimizer.learning_rate = 0.01
            model.optimizer.momentum = 0.5
            model.layers[0].kernel.assign(0.5 * model.layers[0].kernel)
            model.layers[0].activation = keras.activations.sigmoid

        callback = keras.callbacks.LambdaCallback(on_epoch_end=change)
        return model, model.fit(**ARRAYS, epochs=2, verbose=0, callbacks=[callback]).history

    assert_equal(run(strategy), run(None))


def test_one_program_alone_writes_files_and_all_go_on_from_them(
    strategy: sg.Strategy, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file = os.environ.get("STRATAGEM_TOKEN_FILE")
    shared = Path(token_file).parent / request.node.name if token_file else tmp_path / "shared"

    def make() -> Any:
        return compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))

    def stop(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise KeyError("interrupted")

    callbacks = [
        keras.callbacks.BackupAndRestore(shared),
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        keras.callbacks.LambdaCallback(on_epoch_end=stop),
    ]
    with pytest.raises(KeyError, match="interrupted"):
        fit(make, strategy, epochs=3, callbacks=callbacks, verbose=2)
    assert capsys.readouterr().out.count("Epoch 1/3") == strategy.is_chief
    callbacks = [keras.callbacks.BackupAndRestore(shared), keras.callbacks.CSVLogger(tmp_path / "log.csv")]
    resumed = fit(make, strategy, epochs=3, callbacks=callbacks)
    assert (tmp_path / "log.csv").exists() == (tmp_path / "model.keras").exists() == strategy.is_chief
    plain, history = fit(make, None, epochs=3)
    assert_equal(resumed, (plain, {name: values[2:] for name, values in history.items()}))


def test_two_trainings_with_one_seed_agree_to_the_last_bit(strategy: sg.Strategy) -> None:
    def make() -> Any:
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
        return compiled(keras.Sequential(layers))

    (first, history), (second, again) = fit(make, strategy, shuffle=True), fit(make, strategy, shuffle=True)
    assert history == again
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
