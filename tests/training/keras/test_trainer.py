"""The corners of Keras' loops under a strategy: data, losses, metrics and models of every form, as on one device."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.errors import StrategyError
from tests.training import keras_models
from tests.training.keras_runs import ARRAYS, LABELS, WEIGHTS, X, Y, assert_equal, build, compiled, sequential

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.Strategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        made.run(int)
        yield made


def fit(make: Callable[[], Any], given: dict[str, Any], strategy: sg.Strategy | None) -> tuple[Any, Any]:
    model = build(make, strategy)
    return model, model.fit(**ARRAYS | {"epochs": 2, "verbose": 0} | given).history


# Models and losses of every form


def listed() -> Any:
    first, second = keras.Input((4,)), keras.Input((4,))
    joined = keras.layers.Add()([keras.layers.Dense(3)(first), keras.layers.Dense(3)(second)])
    outputs = [keras.layers.Dense(2, name="one")(joined), keras.layers.Dense(1, name="two")(joined)]
    return compiled(
        keras.Model([first, second], outputs), loss=["mse", "mae"], loss_weights=[0.1, 2], metrics=[["mae"], []]
    )


def partly_without_loss() -> Any:
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(2, name="one")(inputs), keras.layers.Dense(3, name="two")(inputs)]
    return compiled(keras.Model(inputs, outputs), loss=["mse", None], metrics=[["mae"], None])


def nested() -> Any:
    inner = sequential()
    inputs = keras.Input((4,))
    return compiled(keras.Model(inputs, keras.layers.Dense(2)(inner(inputs))))


def recurrent() -> Any:
    layers = [keras.layers.Reshape((2, 2)), keras.layers.LSTM(3), keras.layers.LayerNormalization()]
    return compiled(keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)]))


def convolutional() -> Any:
    layers = [keras.layers.Reshape((2, 2, 1)), keras.layers.Conv2D(3, 2), keras.layers.Flatten()]
    return compiled(keras.Sequential([*layers, keras.layers.Dense(2)]))


def constrained() -> Any:
    dense = keras.layers.Dense(2, kernel_constraint="non_neg", bias_constraint=keras.constraints.MaxNorm(0.01))
    return compiled(keras.Sequential([keras.Input((4,)), dense]), optimizer=keras.optimizers.RMSprop(0.02))


def frozen() -> Any:
    model = sequential()
    model.trainable = False
    return model


def with_frozen_base() -> Any:
    base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.BatchNormalization()])
    base.trainable = False
    return compiled(keras.Sequential([base, keras.layers.Dense(2)]))


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "lists": (listed, {"x": [X, 2 * X], "y": [Y, Y[:, :1]]}),
    "an output without loss": (partly_without_loss, {"y": [Y, None]}),
    "a model in a model": (nested, {}),
    "recurrent": (recurrent, {}),
    "convolutional": (convolutional, {}),
    "constraints": (constrained, {}),
    "frozen": (frozen, {}),
    "a frozen base": (with_frozen_base, {}),
    "loss weight": (lambda: sequential(loss_weights=0.2), {}),
    "weight decay": (lambda: sequential(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1)), {}),
    "own loss function": (lambda: sequential(loss=keras_models.cubed), {}),
    "loss of a layer only": (lambda: compiled(keras_models.Penalised(), loss=None, metrics=None), {}),
    "own compute_loss": (lambda: compiled(keras_models.Weighted()), {}),
    "own metric": (lambda: sequential(metrics=["mae", keras_models.Largest()]), {"validation_data": (X[:17], Y[:17])}),
    "own compute_metrics": (lambda: compiled(keras_models.Reporting()), {}),
    "own step around Keras'": (lambda: compiled(keras_models.Around()), {}),
    "two optimizers": (lambda: compiled(keras_models.Rivals()), {}),
    "torch layers": (lambda: compiled(keras_models.OfTorch()), {}),
    "tensors": (sequential, {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}),
    "single examples": (sequential, {"batch_size": 1, "x": X[:5], "y": Y[:5]}),
    "one batch": (sequential, {"batch_size": 64}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:The model does not have any trainable", "ignore:Gradients do not exist")
def test_fit_is_that_of_one_device(strategy: sg.Strategy, name: str) -> None:
    make, given = MODELS[name]
    ours, theirs = fit(make, given, strategy), fit(make, given, None)
    assert_equal(ours, theirs, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
def test_layers_know_whether_they_train(strategy: sg.Strategy) -> None:
    model = build(lambda: compiled(keras_models.OnlyInTraining()), strategy)
    history = model.fit(X, np.zeros((50, 4)), batch_size=16, verbose=0).history
    assert history["loss"] == pytest.approx([float(np.square(X).mean())], rel=1e-5)
    assert model.evaluate(X, np.zeros((50, 4)), verbose=0)[0] == 0
    assert not model.predict(X, verbose=0).any()


# Metrics


def test_state_that_a_step_keeps_is_that_of_one_device(strategy: sg.Strategy) -> None:
    """A counter goes on by one, a mean is over all examples, and what is not finite stays so."""

    def make() -> Any:
        return compiled(keras_models.Remembering(), metrics=[keras_models.Typical()])

    (ours, history), (theirs, expected) = fit(make, {}, strategy), fit(make, {}, None)
    assert_equal((ours, history), (theirs, expected), rtol=1e-4)
    assert int(ours.counter) == 8
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-5)
    assert np.isinf(np.array(ours.constant)).all()


def test_metrics_start_anew_and_are_found_where_keras_has_them(strategy: sg.Strategy) -> None:
    model, _ = fit(sequential, {}, strategy)
    assert [metric.name for metric in model.metrics] == ["loss", "compile_metrics"]
    found = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    assert {name: float(value) for name, value in model.get_metrics_result().items()} == pytest.approx(found)
    model.reset_metrics()
    assert not any(float(np.sum(variable)) for variable in model.metrics_variables)


def test_metrics_come_in_the_order_in_which_they_were_given(strategy: sg.Strategy) -> None:
    model = build(sequential, strategy)
    for metrics in ([keras_models.nought, keras_models.one], [keras_models.one, keras_models.nought]):
        model.compile(loss="mse", optimizer="sgd", metrics=metrics)
        found = model.evaluate(X, Y, verbose=0)
        assert found[1:] == [float(metric is keras_models.one) for metric in metrics]


# Single batches


def classifier() -> Any:
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
    return compiled(keras.Sequential(layers), loss="binary_crossentropy")


def test_single_batches_are_those_of_one_device(strategy: sg.Strategy) -> None:
    def run(strategy: sg.Strategy | None) -> list[Any]:
        model = build(classifier, strategy)
        labels = LABELS[:, None]
        return [
            *model.train_on_batch(X, labels),
            *model.train_on_batch(X[:3], labels[:3], sample_weight=WEIGHTS[:3]),
            *model.train_on_batch(X, labels, class_weight={0: 0.3, 1: 2.0}),
            *model.train_on_batch(X, labels, return_dict=True).values(),
            *model.test_on_batch(X, labels),
            *model.test_on_batch(X[:1], labels[:1], sample_weight=WEIGHTS[:1], return_dict=True).values(),
            *model.predict_on_batch(X[:5]).flatten(),
        ]

    assert run(strategy) == pytest.approx(run(None), rel=1e-4)


# Predictions


def test_model_that_was_never_built_predicts_with_the_same_weights_everywhere(strategy: sg.Strategy) -> None:
    def make() -> Any:
        return keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(2)])

    ours, theirs = (build(make, each).predict(X, batch_size=16, verbose=0) for each in (strategy, None))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_predictions_keep_their_order_and_form(strategy: sg.Strategy) -> None:
    numbers = np.arange(20, dtype="float32")[:, None]

    def uneven() -> Iterator[Any]:
        for size, start in ((2, 0), (3, 2), (1, 5), (4, 6), (10, 10)):
            yield ({"first": numbers[start : start + size]},)

    model = build(keras_models.Structured, strategy)
    found = model.predict(uneven(), verbose=0)
    np.testing.assert_array_equal(found["same"], numbers)
    np.testing.assert_array_equal(found["both"][0], -numbers)
    np.testing.assert_array_equal(found["both"][1], 2 * numbers)


# How far a loop goes


# Within a pass, beyond its end; the others end with it or leave other remainders.
@pytest.mark.parametrize("steps_per_epoch", [3, 5, *(pytest.param(each, marks=pytest.mark.soak) for each in (2, 4))])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_steps_per_epoch_go_on_where_the_last_epoch_ended(strategy: sg.Strategy, steps_per_epoch: int) -> None:
    given = {"steps_per_epoch": steps_per_epoch, "epochs": 3}
    assert_equal(fit(sequential, given, strategy), fit(sequential, given, None))


def test_endless_data_for_validation_is_used_for_the_steps_that_were_asked_for(strategy: sg.Strategy) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield X[:7], Y[:7]

    counts = {"train": 0, "test": 0}

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            counts["train"] += 1

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            counts["test"] += 1

    model = build(sequential, strategy)
    steps = {"steps_per_epoch": 3, "validation_steps": 4, "shuffle": False, "verbose": 0}
    model.fit(endless(), validation_data=endless(), callbacks=[Count()], **steps)
    assert counts == {"train": 3, "test": 4}


@pytest.mark.parametrize(
    ("loop", "flag", "moment"),
    [
        ("fit", "stop_training", "on_train_batch_end"),
        ("evaluate", "stop_evaluating", "on_test_batch_end"),
        ("predict", "stop_predicting", "on_predict_batch_end"),
    ],
)
def test_callback_stops_a_loop(strategy: sg.Strategy, loop: str, flag: str, moment: str) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield (X[:7],) if loop == "predict" else (X[:7], Y[:7])

    model = build(sequential, strategy)
    batches: list[int] = []

    def stop(batch: int, logs: Any = None) -> None:
        batches.append(batch)
        setattr(model, flag, batch == 3)

    callback = keras.callbacks.Callback()
    setattr(callback, moment, stop)
    given = {"shuffle": False} if loop == "fit" else {}
    getattr(model, loop)(endless(), callbacks=[callback], verbose=0, **given)
    assert batches == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:Limiting")
def test_epochs_and_steps_are_capped_as_keras_is_set(strategy: sg.Strategy) -> None:
    before = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
    try:
        keras.config.set_max_epochs(2)
        keras.config.set_max_steps_per_epoch(3)
        model, history = fit(sequential, {"epochs": 5, "batch_size": 8}, strategy)
    finally:
        keras.config.set_max_epochs(before[0])
        keras.config.set_max_steps_per_epoch(before[1])
    assert len(history["loss"]) == 2
    assert int(model.optimizer.iterations) == 6


def test_variables_that_callbacks_change_between_batches_are_kept(strategy: sg.Strategy) -> None:
    model = build(lambda: compiled(keras_models.Remembering()), strategy)

    def count(batch: int, logs: Any = None) -> None:
        model.noted.assign_add(1)

    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = callback.on_test_batch_end = callback.on_predict_batch_end = count
    data = {"batch_size": 16, "verbose": 0, "callbacks": [callback]}
    model.fit(X, Y, validation_data=(X[:20], Y[:20]), **data)
    model.predict(X, **data)
    assert float(model.noted) == 4 + 2 + 4


def test_failed_validation_leaves_nothing_that_disturbs_the_next_fit(strategy: sg.Strategy) -> None:
    model = build(sequential, strategy)
    with pytest.raises(ValueError, match=r"shape|incompatible"):
        model.fit(X, Y, verbose=0, validation_data=(X.reshape(25, 8), Y[:25]))
    history = model.fit(X, Y, verbose=0, validation_data=(X, Y)).history
    assert np.isfinite(history["val_loss"]).all()


def test_model_that_is_dropped_is_dropped_in_the_replicas(strategy: sg.Strategy) -> None:
    import gc
    import weakref

    def train() -> Any:
        model, _ = fit(sequential, {}, strategy)
        model.evaluate(X, Y, verbose=0)
        return weakref.ref(model)

    model = train()
    gc.collect()
    assert model() is None
    kinds = strategy.local_results(strategy.run(keras_models.num_keras_layers))
    strategy.run(int)  # tells the replicas what is gone
    gc.collect()
    assert max(strategy.local_results(strategy.run(keras_models.num_keras_layers))) <= max(kinds)


def test_model_of_a_closed_strategy_predicts_on_its_own_and_refuses_to_train(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        model, _ = fit(sequential, {}, strategy)
        expected = model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected[0], rtol=1e-4, atol=1e-6)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected[1], rel=1e-5)
    with pytest.raises(StrategyError, match="MirroredStrategy was closed at"):
        model.fit(X, Y, verbose=0)


class Rows(keras.layers.Layer):
    """Counts rows, and does not say that they add up."""

    def build(self, shape: Any) -> None:
        self.num_rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="num_rows")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.num_rows.assign_add(keras.ops.shape(inputs)[0])
        return inputs


def test_integers_that_differ_between_replicas_are_said_once(strategy: sg.Strategy) -> None:
    model = build(lambda: compiled(keras.Sequential([keras.Input((4,)), Rows(), keras.layers.Dense(2)])), strategy)
    model.train_on_batch(X[:4], Y[:4])  # two rows each: nobody can tell
    with pytest.warns(sg.errors.StratagemWarning, match=r"/num_rows'.*aggregation='sum'") as told:
        model.fit(X[:5], Y[:5], batch_size=5, epochs=3, verbose=0)
    assert sum(each.category is sg.errors.StratagemWarning for each in told) == 1
    assert int(model.layers[0].num_rows) == 2 + 3 * 3
