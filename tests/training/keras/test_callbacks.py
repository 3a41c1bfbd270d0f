"""Keras' callbacks and policies under a strategy: each acts once, and what it changes reaches the replicas."""

import contextlib
import csv
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import stratagem as sg
from stratagem.errors import StratagemWarning
from tests.training.keras_models import Fragile, Optional, Scaled
from tests.training.keras_runs import ARRAYS, X, Y, assert_equal, assert_histories_equal, build, compiled, sequential

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

VALIDATED = ARRAYS | {"validation_data": (X[:20], Y[:20]), "epochs": 5, "verbose": 0}


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.Strategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        made.run(int)
        yield made


def fit(strategy: sg.Strategy | None, *callbacks: Any, make: Callable[[], Any] = sequential, **given: Any) -> Any:
    model = build(make, strategy)
    return model, model.fit(**VALIDATED | given, callbacks=list(callbacks)).history


def in_both(strategy: sg.Strategy, run: Callable[[sg.Strategy | None], Any]) -> tuple[Any, Any]:
    return run(strategy), run(None)


# Policies


@pytest.fixture
def policy() -> Iterator[Callable[[str], None]]:
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_that_of_one_device(strategy: sg.Strategy, policy: Callable[[str], None], name: str) -> None:
    policy(name)
    ours, theirs = in_both(strategy, functools.partial(fit, epochs=2))
    assert ours[0].layers[0].compute_dtype == name.removeprefix("mixed_")
    assert ours[0].layers[0].variable_dtype == "float32"
    assert isinstance(ours[0].optimizer, keras.optimizers.LossScaleOptimizer) == (name == "mixed_float16")
    assert_equal(ours, theirs, rtol=2e-2)


def scales_of(strategy: sg.Strategy | None, initial_scale: float, growth_steps: int) -> tuple[Any, list[float]]:
    scales: list[float] = []

    def make() -> Any:
        inner = keras.optimizers.SGD(0.05)
        options = {"initial_scale": initial_scale, "dynamic_growth_steps": growth_steps}
        return sequential(optimizer=keras.optimizers.LossScaleOptimizer(inner, **options))

    model = build(make, strategy)
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(float(model.optimizer.dynamic_scale))
    )
    model.fit(**VALIDATED, callbacks=[note])
    return model, scales


def test_loss_scale_grows_as_on_one_device(strategy: sg.Strategy, policy: Callable[[str], None]) -> None:
    policy("mixed_float16")
    (_, ours), (_, theirs) = scales_of(strategy, 16.0, 3), scales_of(None, 16.0, 3)
    assert ours == theirs
    assert ours[-1] == 16.0 * 2**6


def test_loss_scale_falls_and_updates_are_skipped_while_gradients_are_too_large(
    strategy: sg.Strategy, policy: Callable[[str], None]
) -> None:
    policy("mixed_float16")
    (model, ours), (_, theirs) = scales_of(strategy, 2.0**30, 100), scales_of(None, 2.0**30, 100)
    # A replica adds up fewer examples in half precision, so that some sums fit that would not on one device.
    assert theirs[-1] <= ours[-1] <= 2 * theirs[-1] < 2.0**30
    num_skipped = len({2.0**30, *ours}) - 1
    assert int(model.optimizer.iterations) == len(ours) - num_skipped


def test_settings_of_keras_reach_the_replicas(strategy: sg.Strategy) -> None:
    before = keras.config.epsilon()
    model = build(lambda: keras.Sequential([keras.layers.Lambda(_with_epsilon)]), strategy)
    try:
        keras.config.set_epsilon(0.25)
        np.testing.assert_allclose(model.predict(np.ones((4, 1)), verbose=0), 1.25)
    finally:
        keras.config.set_epsilon(before)
    np.testing.assert_allclose(model.predict(np.ones((4, 1)), verbose=0), 1.0, atol=1e-5)


def _with_epsilon(inputs: Any) -> Any:
    return inputs + keras.config.epsilon()


# Callbacks that change how training goes on


def test_learning_rate_reduced_on_a_plateau_reaches_the_replicas(strategy: sg.Strategy) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        return fit(strategy, keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.2, patience=1, min_delta=9))

    ours, theirs = in_both(strategy, run)
    assert len(set(ours[1]["learning_rate"])) > 2
    assert_equal(ours, theirs)


def test_learning_rate_of_each_epoch_and_each_batch_reaches_the_replicas(strategy: sg.Strategy) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        model = build(sequential, strategy)

        def slow_down(batch: int, logs: Any) -> None:
            model.optimizer.learning_rate = 0.9 * float(model.optimizer.learning_rate)

        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 / (epoch + 1)),
            keras.callbacks.LambdaCallback(on_train_batch_end=slow_down),
        ]
        return model, model.fit(**VALIDATED | {"epochs": 3}, callbacks=callbacks).history

    assert_equal(*in_both(strategy, run))


def test_training_stops_early_with_the_best_weights(strategy: sg.Strategy) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        stop = keras.callbacks.EarlyStopping(patience=2, min_delta=10, restore_best_weights=True)
        model, history = fit(strategy, stop)
        return model, history, stop.stopped_epoch

    (*ours, stopped), (*theirs, expected) = in_both(strategy, run)
    assert stopped == expected == 2
    assert len(ours[1]["loss"]) == 3
    assert_equal((ours[0], ours[1]), (theirs[0], theirs[1]))
    # What the replicas have is what was restored.
    np.testing.assert_allclose(ours[0].predict(X, verbose=0), theirs[0].predict(X, verbose=0), rtol=1e-4, atol=1e-5)


def test_training_ends_when_the_loss_is_no_number(strategy: sg.Strategy) -> None:
    targets = Y.copy()
    targets[20] = np.nan

    def run(strategy: sg.Strategy | None) -> Any:
        batches: list[int] = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
        with pytest.warns(StratagemWarning, match="update skipped") if strategy else contextlib.nullcontext():
            fit(strategy, keras.callbacks.TerminateOnNaN(), note, y=targets)
        return batches

    assert run(strategy) == run(None) == [0, 1]


CHANGES: dict[str, Callable[[Any], None]] = {
    "a weight": lambda model: model.layers[0].kernel.assign(0.5 * model.layers[0].kernel),
    "a momentum": lambda model: setattr(model.optimizer, "momentum", 0.1),
    "a norm to clip at": lambda model: setattr(model.optimizer, "clipnorm", 0.01),
    "a schedule": lambda model: setattr(
        model.optimizer, "learning_rate", keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
    "a layer that stops learning": lambda model: setattr(model.layers[0], "trainable", False),
    "a factor of the loss": lambda model: setattr(model.loss, "factor", 3.0),
    "an activation": lambda model: setattr(model.layers[0], "activation", keras.activations.sigmoid),
    "a regularizer": lambda model: setattr(model.layers[0].kernel, "regularizer", keras.regularizers.L2(1.0)),
    "a constraint": lambda model: setattr(model.layers[0].kernel, "constraint", keras.constraints.NonNeg()),
    "a value in a dict": lambda model: model.layers[0].options.update({"factor": 3.0}),
}


def with_options() -> Any:
    return compiled(keras.Sequential([Optional(8, activation="tanh"), keras.layers.Dense(2)]), loss=Scaled())


@pytest.fixture(scope="module")
def unchanged_loss() -> float:
    """The last loss of a training in which no callback changes anything."""
    return float(fit(None, make=with_options, epochs=3)[1]["loss"][-1])


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_what_a_callback_of_ones_own_changes_reaches_the_replicas(
    strategy: sg.Strategy, unchanged_loss: float, what: str
) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        model = build(with_options, strategy)
        model.build((None, 4))

        def change(epoch: int, _: Any) -> None:
            if epoch == 1:
                CHANGES[what](model)

        callback = keras.callbacks.LambdaCallback(on_epoch_begin=change)
        return model, model.fit(**VALIDATED | {"epochs": 3}, callbacks=[callback]).history

    ours, theirs = in_both(strategy, run)
    assert unchanged_loss != pytest.approx(theirs[1]["loss"][-1], rel=1e-3), "the change does nothing"
    assert_histories_equal(ours[1], theirs[1])


# Callbacks that write files


def test_log_in_a_file_has_each_epoch_once(strategy: sg.Strategy, tmp_path: Path) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        path = tmp_path / f"{strategy is None}.csv"
        fit(strategy, keras.callbacks.CSVLogger(path))
        with path.open() as file:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]

    ours, theirs = in_both(strategy, run)
    assert [row["epoch"] for row in ours] == [0, 1, 2, 3, 4]
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


def test_checkpoints_are_those_of_one_device_and_go_on_in_a_scope(strategy: sg.Strategy, tmp_path: Path) -> None:
    def run(strategy: sg.Strategy | None) -> Path:
        folder = tmp_path / str(strategy is None)
        folder.mkdir()
        fit(
            strategy,
            keras.callbacks.ModelCheckpoint(folder / "{epoch}-{loss:.3f}.keras"),
            keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_best_only=True, save_weights_only=True),
            keras.callbacks.ModelCheckpoint(folder / "batch.weights.h5", save_freq=7, save_weights_only=True),
        )
        return folder

    ours, theirs = in_both(strategy, run)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    assert len(list(ours.iterdir())) == 7
    [saved] = ours.glob("3-*.keras")
    with strategy.scope():
        loaded = keras.models.load_model(saved)
    plain = keras.models.load_model(next(theirs.glob("3-*.keras")))
    given = ARRAYS | {"epochs": 2, "verbose": 0}
    assert_equal((loaded, loaded.fit(**given).history), (plain, plain.fit(**given).history))
    for name in ("best.weights.h5", "batch.weights.h5"):
        loaded.load_weights(ours / name)
        plain.load_weights(theirs / name)
        np.testing.assert_allclose(loaded.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-4, atol=1e-5)


def test_tensorboard_gets_every_value_once(strategy: sg.Strategy, tmp_path: Path) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        folder = tmp_path / str(strategy is None)
        callback = keras.callbacks.TensorBoard(folder, histogram_freq=1, write_graph=False, update_freq=2)
        callback._summary_module = Summaries()
        fit(strategy, callback)
        return {name: _scalars_of(folder / name) for name in ("train", "validation")}

    ours, theirs = in_both(strategy, run)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].keys() == theirs[name].keys()
        for tag, events in ours[name].items():
            steps, values = zip(*events, strict=True)
            assert steps == tuple(step for step, _ in theirs[name][tag])
            np.testing.assert_allclose(values, [value for _, value in theirs[name][tag]], rtol=1e-4, atol=1e-6)
    assert [step for step, _ in ours["train"]["epoch_loss"]] == [0, 1, 2, 3, 4]
    assert [step for step, _ in ours["train"]["batch_loss"]] == list(range(2, 21, 2))


class Summaries:
    """What Keras uses of `tensorflow.summary`, which writes the files: here torch's writer does."""

    def __init__(self) -> None:
        self._writers: list[Any] = []
        self._recording: list[Callable[[], bool]] = [lambda: True]

    def create_file_writer(self, folder: str) -> Any:
        writer = SummaryWriter(folder)
        writer.as_default = lambda step=None: self._pushed(self._writers, writer)  # type: ignore[attr-defined]
        return writer

    def record_if(self, condition: Callable[[], bool]) -> Any:
        return self._pushed(self._recording, condition)

    def scalar(self, tag: str, value: Any, step: Any) -> None:
        if self._writers and self._recording[-1]():
            self._writers[-1].add_scalar(tag, float(value), int(step))

    def histogram(self, tag: str, value: Any, step: int) -> None:
        self._writers[-1].add_histogram(tag, keras.ops.convert_to_numpy(value), step)

    @contextlib.contextmanager
    def _pushed(self, stack: list[Any], item: Any) -> Iterator[None]:
        stack.append(item)
        yield
        stack.pop()


def _scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# Training that is interrupted and goes on


class InterruptionError(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Raises once, at the end of a batch or an epoch."""

    def __init__(self, epoch: int, batch: int | None = None) -> None:
        super().__init__()
        self._place = epoch, batch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._place:
            raise InterruptionError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch, None) == self._place:
            raise InterruptionError


def built(**given: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
    return compiled(model, optimizer=keras.optimizers.Adam(0.01), **given)


@pytest.mark.parametrize("batch", [2, None], ids=["in an epoch", "after an epoch"])
def test_interrupted_training_is_taken_up_as_if_nothing_had_been(
    strategy: sg.Strategy, tmp_path: Path, batch: int | None
) -> None:
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(InterruptionError):
        fit(strategy, backup, Interrupt(2, batch), make=built)
    resumed, history = fit(strategy, keras.callbacks.BackupAndRestore(tmp_path / "backup"), make=built)
    undisturbed, expected = fit(None, make=built)
    num_kept = 2 if batch is not None else 3
    assert len(history["loss"]) == 5 - num_kept
    assert_equal((resumed, history), (undisturbed, {name: values[num_kept:] for name, values in expected.items()}))


def test_backup_in_an_epoch_is_taken_up_as_on_one_device(strategy: sg.Strategy, tmp_path: Path) -> None:
    def run(strategy: sg.Strategy | None) -> Any:
        folder = tmp_path / str(strategy is None)
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=3)
        with pytest.raises(InterruptionError):
            fit(strategy, backup, Interrupt(1, 2), make=built)
        return fit(strategy, keras.callbacks.BackupAndRestore(folder, save_freq=3), make=built)

    assert_equal(*in_both(strategy, run))


def test_training_is_taken_up_after_a_step_that_failed_in_the_replicas(strategy: sg.Strategy, tmp_path: Path) -> None:
    def make() -> Any:
        return compiled(Fragile(2), optimizer=keras.optimizers.Adam(0.01))

    poisoned = X.copy()
    poisoned[40] = 1e6  # in the third batch, in the second replica's slice
    with pytest.raises(ValueError, match="an input above 1e5"):
        fit(strategy, keras.callbacks.BackupAndRestore(tmp_path), make=lambda: _built(make()), x=poisoned)
    with pytest.raises(ValueError, match="an input above 1e5"):
        fit(strategy, keras.callbacks.BackupAndRestore(tmp_path), make=lambda: _built(make()), x=poisoned)
    ours = fit(strategy, keras.callbacks.BackupAndRestore(tmp_path), make=lambda: _built(make()))
    assert_equal(ours, fit(None, make=lambda: _built(make())))


def _built(model: Any) -> Any:
    model(torch.zeros(1, 4))
    return model
