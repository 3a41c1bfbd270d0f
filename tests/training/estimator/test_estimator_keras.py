"""An Estimator of a Keras model trains, evaluates and predicts as Keras does on one device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem import estimator as sge
from stratagem.errors import StratagemWarning
from tests.training.keras_models import Halved

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(50, 4)).astype("float32")  # batches of 16: the last has 2
Y = (X @ RANDOM.normal(size=(4, 2)) + 0.1 * RANDOM.normal(size=(50, 2))).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2, size=50).astype("float32")


@pytest.fixture(scope="module")
def mirrored(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(int)
        yield strategy


@pytest.fixture(params=["default", pytest.param("one_device", marks=pytest.mark.soak), "mirrored"])
def strategy(request: pytest.FixtureRequest, mirrored: sg.MirroredStrategy) -> sg.Strategy | None:
    return {"default": None, "one_device": sg.OneDeviceStrategy("cpu:0"), "mirrored": mirrored}[request.param]


def compiled(model: Any) -> Any:
    model.compile(
        loss="mse",
        optimizer=keras.optimizers.Adam(0.01),
        metrics=["mae", keras.metrics.RootMeanSquaredError(name="root")],
    )
    return model


def functional() -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    return compiled(keras.Model(inputs, keras.layers.Dense(2)(hidden)))


def sequential() -> Any:
    return compiled(keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]))


def subclassed() -> Any:
    return compiled(Halved())


def data(num_epochs: int | None = 1) -> sge.Input:
    return sge.Input((X, Y), global_batch_size=16, num_epochs=num_epochs)


def make(folder: Path, model: Any, strategy: sg.Strategy | None = None, **more: Any) -> sge.Estimator:
    settings = {"train_distribute": strategy, "eval_distribute": strategy, "save_summary_steps": 0, "random_seed": 3}
    return sge.model_to_estimator(keras_model=model, model_dir=folder, config=sge.RunConfig(**settings | more))


class Losses(sge.SessionRunHook):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def after_run(self, run_context: sge.RunContext, run_values: sge.RunValues) -> None:
        self.losses.append(run_values.loss)
        self.rates.append(run_values.learning_rate)


@pytest.mark.parametrize("build", [functional, sequential, subclassed])
def test_train_evaluate_and_predict_equal_keras(tmp_path: Path, strategy: sg.Strategy | None, build: Any) -> None:
    keras.utils.set_random_seed(1)
    model = build()
    model(X[:1])
    start = model.get_weights()
    estimator = make(tmp_path, model, strategy)
    record = Losses()
    estimator.train(lambda: data(num_epochs=2), hooks=[record])
    assert all(map(np.array_equal, model.get_weights(), start)), "the model itself is as it was"
    result, predictions = estimator.evaluate(data), list(estimator.predict(lambda: sge.Input(X, global_batch_size=16)))
    model.fit(X, Y, epochs=2, batch_size=16, shuffle=False, verbose=0)
    for ours, theirs in zip(weights(estimator), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    expected = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    assert result == pytest.approx({**expected, "global_step": 8}, abs=1e-5)
    np.testing.assert_allclose(torch.stack(predictions), model.predict(X, batch_size=16, verbose=0), atol=1e-5)
    assert len(record.losses) == 8
    assert record.rates == pytest.approx([0.01] * 8)


def weights(estimator: sge.Estimator) -> list[Any]:
    return [estimator.get_variable_value(name).numpy() for name in estimator.get_variable_names()]


def test_weights_of_examples_are_the_third_part_of_a_batch(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    model = functional()
    estimator = make(tmp_path, model, mirrored)
    estimator.train(lambda: sge.Input((X, Y, WEIGHTS), global_batch_size=16))
    model.fit(X, Y, sample_weight=WEIGHTS, batch_size=16, shuffle=False, verbose=0)
    for ours, theirs in zip(weights(estimator), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_resumed_training_equals_an_uninterrupted_one(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    class Fail(sge.SessionRunHook):
        def before_run(self, run_context: sge.RunContext) -> None:
            if run_context.global_step == 5:
                raise KeyboardInterrupt

    def dropping() -> Any:
        model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(2)])
        # Of Nadam's variables Keras leaves one out of the list of them.
        model.compile(loss="mse", optimizer=keras.optimizers.Nadam(0.01))
        return model

    def shuffled() -> sge.Input:
        return sge.Input((X, Y), global_batch_size=16, num_epochs=3, shuffle=True)

    model = dropping()
    model(X[:1])
    whole, first, rest = Losses(), Losses(), Losses()
    settings = {"save_checkpoints_steps": 2}
    uninterrupted = make(tmp_path / "a", model, mirrored, **settings)
    uninterrupted.train(shuffled, hooks=[whole], max_steps=9)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "b", model, mirrored, **settings).train(shuffled, hooks=[first, Fail()], max_steps=9)
    resumed = make(tmp_path / "b", model, mirrored, **settings)
    resumed.train(shuffled, hooks=[rest], max_steps=9)
    assert rest.losses == whole.losses[4:]
    assert all(map(np.array_equal, weights(resumed), weights(uninterrupted)))


def test_function_makes_models_that_cannot_be_copied(tmp_path: Path) -> None:
    class Scaled(keras.Model):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def call(self, inputs: Any) -> Any:
            return 2 * self.layer(inputs)

        def get_config(self) -> Any:
            raise NotImplementedError("it has none")

    def scaled() -> Any:
        return compiled(Scaled(keras.layers.Dense(2)))

    with pytest.raises(sge.EstimatorError, match=r"cannot be copied: it has none\. Give keras_model a function"):
        make(tmp_path, scaled()).train(data)
    estimator = make(tmp_path, scaled)
    estimator.train(lambda: data(num_epochs=5))
    with pytest.warns(StratagemWarning, match="has no checkpoint"):
        before = make(tmp_path / "other", scaled).evaluate(data)
    assert estimator.evaluate(data)["loss"] < before["loss"]


def test_warm_start_and_export_know_weights_by_their_paths(tmp_path: Path) -> None:
    model = functional()
    estimator = make(tmp_path / "a", model)
    estimator.train(data)
    names = estimator.get_variable_names()
    assert [name.rsplit("/", maxsplit=1)[1] for name in names] == ["kernel", "bias", "kernel", "bias"]
    folder = Path(estimator.export(tmp_path / "exported"))
    from safetensors.torch import load_file

    assert list(load_file(folder / "weights.safetensors")) == sorted(names)
    taken: dict[str, torch.Tensor] = {}

    class Look(sge.SessionRunHook):
        def after_create_session(self, run_context: sge.RunContext) -> None:
            taken.update({each.path: each.value.detach().clone() for each in run_context.module.variables})

    keras.utils.clear_session()  # names count anew
    config = sge.RunConfig(save_summary_steps=0)
    chosen = sge.WarmStartSettings(tmp_path / "a", vars_to_warm_start=f"{names[0]}$")
    warm = sge.model_to_estimator(keras_model=model, model_dir=tmp_path / "b", config=config, warm_start_from=chosen)
    warm.train(data, hooks=[Look()], steps=1)
    assert torch.equal(taken[names[0]], estimator.get_variable_value(names[0]))
    assert not torch.equal(taken[names[2]], estimator.get_variable_value(names[2]))


def test_statistics_of_the_global_batch_equal_keras(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    start: list[Any] = []

    def normalized() -> Any:
        norm = keras.layers.BatchNormalization(synchronized=sg.has_strategy())
        # Without a bias: its gradient is nothing but rounding, which Adam makes large.
        layers = [keras.Input((4,)), keras.layers.Dense(8, use_bias=False), norm, keras.layers.Dense(2)]
        model = compiled(keras.Sequential(layers))
        start.extend([] if start else model.get_weights())
        model.set_weights(start)
        return model

    model = normalized()
    estimator = make(tmp_path, normalized, mirrored)
    estimator.train(data)
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    for ours, theirs in zip(weights(estimator), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


BAD: list[tuple[Any, str]] = [
    (3, r"keras_model is a compiled Keras model, or a function that makes one, got int 3"),
    (lambda: 3, r"returns a Keras model, got int 3"),
    (keras.Sequential([keras.layers.Dense(2)]), r"keras_model is a compiled model; call 'sequential\w*'\.compile"),
]


@pytest.mark.parametrize(("model", "message"), BAD, ids=["number", "function", "not compiled"])
def test_model_is_refused(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(sge.EstimatorError, match=message):
        make(tmp_path, model).train(data)


def test_batches_without_labels_are_named(tmp_path: Path) -> None:
    with pytest.raises(sge.EstimatorError, match=r"the step of Keras failed with .* have no labels: let input_fn give"):
        make(tmp_path, functional()).train(lambda: sge.Input(X, global_batch_size=16))


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path, functional()).train(data)
    other = compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    with pytest.raises(sge.CheckpointMismatchError, match="does not match the model: missing"):
        make(tmp_path, other).train(data)
    sgd = functional()
    sgd.compile(loss="mse", optimizer="sgd")
    with pytest.raises(sge.CheckpointMismatchError, match=r"optimizer Adam with .* the model has SGD"):
        make(tmp_path, sgd).train(data)


def test_options_of_torch_modules_are_refused(tmp_path: Path) -> None:
    for model in ({"keras_model": functional()}, {"module": functional()}):
        with pytest.raises(sge.EstimatorError, match="compiled with all that it needs; leave out loss"):
            sge.model_to_estimator(**model, loss=torch.nn.functional.mse_loss, model_dir=tmp_path)


def test_model_may_come_by_position(tmp_path: Path) -> None:
    config = sge.RunConfig(save_summary_steps=0, random_seed=3)
    estimator = sge.model_to_estimator(functional(), model_dir=tmp_path, config=config).train(data)
    assert estimator.evaluate(data)["global_step"] > 0
