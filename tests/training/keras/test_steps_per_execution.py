"""`compile(steps_per_execution=k)`: replicas loop over the steps, and everything is as with one step at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.engine import child_calls
from stratagem.engine.recipe import Call
from stratagem.processes.group import ChildGroup
from tests.training.keras_models import Twice
from tests.training.keras_runs import X, Y, build, compiled, sequential

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:model 'sequential' gives other numbers"),
]

MAKERS: dict[str, Callable[[], sg.Strategy]] = {
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored 2": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored 2 torch": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="torch"),
    "local sgd 2": lambda: sg.LocalSGDStrategy(2, devices=["cpu:0", "cpu:1"]),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def each(request: pytest.FixtureRequest, four_cpus: None) -> Iterator[sg.Strategy]:
    with MAKERS[request.param]() as made:
        made.run(int)
        yield made


@pytest.fixture(scope="module")
def mirrored(four_cpus: None) -> Iterator[sg.Strategy]:
    with MAKERS["mirrored 2"]() as made:
        made.run(int)
        yield made


class Recorder(keras.callbacks.Callback):
    """Notes when it is called, and with which logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("end", batch))
        self.logs.append({name: float(value) for name, value in logs.items()})


def eventful(**options: Any) -> Any:
    """With statistics, random numbers, an optimizer with a state, and metrics of several kinds."""
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    metrics = ["mae", keras.metrics.R2Score(), keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, "mean")]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    return compiled(model, optimizer=keras.optimizers.Adam(0.05), metrics=metrics, **options)


def own_step(**options: Any) -> Any:
    return compiled(Twice(), **options)


def outcome(make: Callable[..., Any], strategy: sg.Strategy, steps_per_execution: Any) -> tuple[Any, Recorder]:
    """All that fit, evaluate and predict come to; 7 batches, the last of which has 2 rows."""
    model = build(lambda: make(steps_per_execution=steps_per_execution), strategy)
    recorder = Recorder()
    data: dict[str, Any] = {"batch_size": 8, "verbose": 0}
    validation = X[:20], Y[:20]
    fitted = model.fit(X, Y, epochs=2, shuffle=False, validation_data=validation, callbacks=[recorder], **data)
    evaluated = model.evaluate(X, Y, **data)
    predicted = model.predict(X, **data)
    weights = [each.tolist() for each in (*model.get_weights(), *map(np.asarray, _values(model.optimizer.variables)))]
    return (fitted.history, evaluated, predicted.tolist(), weights), recorder


def _values(variables: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(each) for each in variables]


@pytest.mark.parametrize("make", [eventful, own_step])
def test_all_is_as_with_one_step_at_a_time(each: sg.Strategy, make: Callable[..., Any]) -> None:
    expected, single = outcome(make, each, 1)
    got, recorder = outcome(make, each, np.int64(3))  # numbers of numpy are numbers
    assert got == expected
    epoch = [("begin", 0), ("end", 2), ("begin", 3), ("end", 5), ("begin", 6), ("end", 8)]
    assert recorder.seen == epoch * 2
    assert recorder.logs == [single.logs[number] for number in (2, 5, 6, 9, 12, 13)]


def test_an_execution_is_one_call_of_all_replicas(mirrored: sg.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps: list[int] = []
    original = ChildGroup.call

    def call(self: Any, function: Any, parts: Any, *others: Any, shared: Any = ()) -> Any:
        if function is child_calls.run:
            num_steps.append(len(Call.of((*shared, *parts[0])[1]).steps))
        return original(self, function, parts, *others, shared=shared)

    monkeypatch.setattr(ChildGroup, "call", call)
    model = build(lambda: sequential(steps_per_execution=5), mirrored)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert num_steps == [5, 2]
    model.predict(X, batch_size=8, verbose=0)
    assert num_steps == [5, 2, 5, 2]


def test_a_step_that_fails_leaves_the_state_of_the_one_before(mirrored: sg.Strategy) -> None:
    class Failing(Twice):
        def train_step(self, data: Any) -> Any:
            if data[0].max() > 100:
                raise ValueError("too large")
            return super().train_step(data)

    spoiled = X.copy()
    spoiled[40] = 1000.0
    expected = build(lambda: compiled(Failing()), mirrored)
    expected.fit(X[:40], Y[:40], batch_size=8, shuffle=False, verbose=0)
    model = build(lambda: compiled(Failing(), steps_per_execution=7), mirrored)
    with pytest.raises(ValueError, match="too large") as caught:
        model.fit(spoiled, Y, batch_size=8, shuffle=False, verbose=0)
    assert any(each.startswith("in step 6 of the 7 of this run") for each in caught.value.__notes__)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)


def test_single_batches_are_trained_on_as_ever(mirrored: sg.Strategy) -> None:
    model = build(lambda: sequential(steps_per_execution=3), mirrored)
    plain = build(sequential, None)
    for _ in range(2):
        ours, theirs = model.train_on_batch(X[:8], Y[:8]), plain.train_on_batch(X[:8], Y[:8])
        np.testing.assert_allclose(ours, theirs, rtol=2e-5)


def test_workers_of_a_parameter_server_are_given_all_steps(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(1) as strategy:
        model = build(lambda: sequential(steps_per_execution=3), strategy)
        plain = build(sequential, None)
        data: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}
        ours, theirs = model.fit(X, Y, **data).history, plain.fit(X, Y, **data).history
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=2e-5)
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=2e-5)


def test_outside_a_scope_it_is_refused_as_keras_does() -> None:
    model = build(lambda: sequential(steps_per_execution=3), None)
    with pytest.raises(ValueError, match="`steps_per_execution` must be 1 with the PyTorch backend"):
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.parametrize("wrong", [0, -1, "auto", 2.0, None])
def test_compile_refuses_what_is_no_number_of_steps(mirrored: sg.Strategy, wrong: Any) -> None:
    with pytest.raises(sg.errors.StrategyError, match="steps_per_execution is a positive int, got"):
        build(lambda: sequential(steps_per_execution=wrong), mirrored)
