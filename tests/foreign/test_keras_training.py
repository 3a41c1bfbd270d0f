"""Programs after Keras' guides, that train with `fit` and `train_on_batch`: what plain Keras gives in one process."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from keras.src.utils.naming import reset_uids

import stratagem as sg
from stratagem import _tree
from tests.contracts.strategies_under_test import alone, opened_row
from tests.foreign.programs import SELDOM, Distributed, Plain, Program, Programs, Runner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Those that wait for each step: equal too where several workers train asynchronously.
one_by_one = Programs()
programs = Programs(seldom=(*SELDOM, "mirrored 3 torch"))

NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(12, 4)).astype("float32")
Y = NUMBERS.normal(size=(12, 2)).astype("float32")
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 5, "shuffle": False, "verbose": 0}  # 5, 5 and 2 rows


def made(on: Runner, make: Callable[[], Any]) -> Any:
    """What a function makes, from the same weights and with the same names each time."""
    reset_uids()
    keras.utils.set_random_seed(1)
    with on.scope():
        return make()


def dense(kind: Callable[..., Any] = keras.Model, **given: Any) -> Any:
    """A functional model of any class, compiled."""
    inputs = keras.Input((4,))
    model = kind(inputs, layers.Dense(2)(layers.Dense(3, activation="tanh")(inputs)))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), **given})
    return model


def numbers(values: Any) -> Any:
    return [torch.as_tensor(np.asarray(each)) for each in values]


class BatchLogs(list[Any]):
    """Logs of batches: where workers train asynchronously they are those of an earlier step."""


class Batches(keras.callbacks.Callback):
    """Writes down the logs of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = BatchLogs()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(dict(logs))


def fitted(model: Any, **given: Any) -> Any:
    """All that is to be seen of a training: logs of epochs and batches, weights, metrics."""
    batches = Batches()
    callbacks = [batches, *given.pop("callbacks", ())]
    history = model.fit(**{**FIT, "epochs": 2, "callbacks": callbacks, **given}).history
    evaluated = model.evaluate(X[:7], Y[:7], batch_size=5, verbose=0, return_dict=True)
    metrics = [each.numpy() for each in model.metrics_variables]
    return history, batches.seen, evaluated, numbers(model.get_weights()), numbers(metrics)


class Stepping(keras.Model):
    """The part of a step that all guides have."""

    def update(self, loss: Any) -> None:
        self.zero_grad()
        loss.backward()
        weights = list(self.trainable_weights)
        gradients = [each.value.grad for each in weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, weights)


class FirstExample(Stepping):
    """The first one of "Customizing what happens in fit() with PyTorch": logs are nested."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        self.update(loss)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@programs()
def the_first_example_of_the_guide(on: Runner) -> Any:
    return fitted(made(on, lambda: dense(FirstExample, loss="mse", metrics=["mae"])))


class LowerLevel(Stepping):
    """The second one: a loss and metrics of its own, nothing of `compile`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=True)
        loss = self.loss_fn(y, y_pred)
        self.update(loss)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_fn(y, y_pred))
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self) -> Any:
        return [self.loss_tracker, self.mae_metric]


@programs()
def the_lower_level_example_of_the_guide(on: Runner) -> Any:
    return fitted(made(on, lambda: dense(LowerLevel)))


class OwnLoss(Stepping):
    """Returns the loss that it computed, which no metric knows of."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        loss = ops.mean(ops.square(self(x, training=True) - y))
        self.update(loss)
        return {"loss": loss}


@programs()
def a_loss_that_the_step_computed_itself(on: Runner) -> Any:
    model = made(on, lambda: dense(OwnLoss, loss="mse", metrics=["mae"]))
    watching = [
        keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=10.0, patience=1),
        keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=3, restore_best_weights=True),
    ]
    return fitted(model, epochs=6, callbacks=watching), float(model.optimizer.learning_rate)


class Odd(Stepping):
    """Returns variables, numbers, texts, what is made of results, and nestings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_steps = keras.Variable(0, dtype="int32", trainable=False, name="num_steps")
        self.tracker = keras.metrics.Mean(name="tracker")
        self.total = keras.metrics.Sum(name="total")

    def train_step(self, data: Any) -> Any:
        x, y = data
        error = ops.mean(ops.square(self(x, training=True) - y), axis=-1)
        loss = ops.mean(error)
        self.update(loss)
        self.num_steps.assign_add(1)
        self.tracker.update_state(loss, sample_weight=2.0)
        self.total.update_state(ops.sum(error))
        before = self.tracker.result()
        self.tracker.update_state(error)
        return {
            "before": before,
            "num_steps": self.num_steps,
            "scores": {"twice": 2 * self.tracker.result(), "more": {"total": self.total.result(), "three": 3}},
            "phase": "warm",
            "nothing": None,
            "loss": loss.detach().numpy(),
        }


@programs()
def logs_of_every_kind(on: Runner) -> Any:
    batches = Batches()
    model = made(on, lambda: dense(Odd, loss="mse"))
    model.fit(**FIT, callbacks=[batches])
    logs = [{**each, "phase": each["phase"] == "warm", "nothing": each["nothing"] is None} for each in batches.seen]
    return BatchLogs(logs), numbers(model.get_weights())


# Layers that several models share


def network(*units: int, width: int) -> Any:
    inner = [layers.Dense(each, activation="tanh") for each in units[:-1]]
    return keras.Sequential([keras.Input((width,)), *inner, layers.Dense(units[-1])])


def rivals(compile_between: bool) -> Any:
    """A generator, a discriminator, and both behind each other, as books have them."""
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    generator, discriminator = network(3, 4, width=2), network(3, 1, width=4)
    discriminator.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    discriminator.trainable = False
    noise = keras.Input((2,))
    both = keras.Model(noise, discriminator(generator(noise)))
    both.compile(keras.optimizers.Adam(0.05), loss)
    if not compile_between:
        discriminator.trainable = True
    return generator, discriminator, both


@programs()
@one_by_one()
def a_classical_gan(on: Runner) -> Any:
    generator, discriminator, both = made(on, lambda: rivals(False))
    noise = np.random.default_rng(3)
    losses = []
    for real in (X[:5], X[5:10], X[10:]):
        fake = generator.predict(noise.normal(size=(len(real), 2)).astype("float32"), verbose=0)
        discriminator.trainable = True
        images, labels = np.concatenate([real, fake]), np.repeat([1.0, 0.0], len(real)).astype("float32")[:, None]
        losses.append(discriminator.train_on_batch(images, labels, return_dict=True))
        discriminator.trainable = False
        latent = noise.normal(size=(len(real), 2)).astype("float32")
        losses.append(both.train_on_batch(latent, np.ones((len(real), 1), "float32"), return_dict=True))
    weights = numbers([*generator.get_weights(), *discriminator.get_weights()])
    return losses, weights


def shared() -> Any:
    """A body with two heads, each a model."""
    body, (one, two) = layers.Dense(3, activation="tanh"), (layers.Dense(2), layers.Dense(2))
    inputs = keras.Input((4,))
    first, second = (keras.Model(inputs, head(body(inputs))) for head in (one, two))
    for model in (first, second):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return body, first, second


@programs()
@one_by_one()
def a_body_that_is_frozen_and_thawed_by_turns(on: Runner) -> Any:
    body, first, second = made(on, shared)
    seen = []
    for trainable, activation in ((True, "tanh"), (False, "relu"), (True, "relu"), (False, "tanh")):
        for model in (first, second):
            body.trainable = trainable
            body.activation = keras.activations.get(activation)
            seen.append(model.train_on_batch(X[:5], Y[:5]))
            body.trainable = not trainable
            seen.append(model.test_on_batch(X[:5], Y[:5]))
    return seen, numbers([*first.get_weights(), *second.get_weights()])


class Gan(keras.Model):
    """After "DCGAN to generate face images": two networks with an optimizer each; noise comes with the data."""

    def __init__(self, discriminator: Any, generator: Any) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.built = True

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> Any:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data: Any) -> Any:
        real, noise = data
        d_loss = self.trained(self.discriminator, self.d_optimizer, self.d_loss(real, noise))
        misleading = torch.zeros((len(noise), 1))
        loss = self.loss_fn(misleading, self.discriminator(self.generator(noise)))
        g_loss = self.trained(self.generator, self.g_optimizer, loss)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}

    def d_loss(self, real: Any, noise: Any) -> Any:
        images = torch.concat([self.generator(noise), real], axis=0)
        labels = torch.concat([torch.ones((len(noise), 1)), torch.zeros((len(real), 1))], axis=0)
        return self.loss_fn(labels, self.discriminator(images))

    def trained(self, network: Any, optimizer: Any, loss: Any) -> Any:
        self.zero_grad()
        loss.backward()
        weights = list(network.trainable_weights)
        gradients = [each.value.grad for each in weights]
        with torch.no_grad():
            optimizer.apply(gradients, weights)
        return loss


def gan() -> Any:
    model = Gan(network(3, 1, width=4), network(3, 4, width=2))
    model.compile(keras.optimizers.Adam(0.05), keras.optimizers.Adam(0.02), keras.losses.BinaryCrossentropy(True))
    return model


@programs()
def the_dcgan_of_the_examples(on: Runner) -> Any:
    model = made(on, gan)
    history = model.fit(**FIT, epochs=2).history
    return history, numbers(model.get_weights())


# Optimizers


def by_layer(*, loss_scale: bool = False, chosen: bool = False) -> Any:
    optimizers = keras.optimizers
    first, others = optimizers.Nadam(0.05), optimizers.SGD(0.05, momentum=0.9)
    chooses: Any = optimizers.OptimizerMap(others, {"dense/.*": first})
    multi = optimizers.MultiOptimizer(chooses.__call__ if chosen else chooses)
    return dense(loss="mse", optimizer=optimizers.LossScaleOptimizer(multi, initial_scale=4.0) if loss_scale else multi)


@programs()
def an_optimizer_for_each_part(on: Runner) -> Any:
    found = []
    for options in ({}, {"chosen": True}, {"loss_scale": True}):
        model = made(on, lambda options=options: by_layer(**options))
        found.append(fitted(model))
        found.append(numbers(each.numpy() for each in model.optimizer.variables))
    return found


def of_eight_bits() -> Any:
    inputs = keras.Input((4,))
    # Keras rounds the gradient of a bias to bfloat16, that of a replica as that of a batch.
    inner = layers.Dense(3, activation="tanh", use_bias=False)(inputs)
    model = keras.Model(inputs, layers.Dense(2, use_bias=False)(inner))
    for layer in model.layers[1:]:
        layer.quantize("float8")
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@programs()
def scales_and_histories_of_float8(on: Runner) -> Any:
    # Parts of 4 rows are exact in binary: with others a value of eight bits is now and then rounded the other way.
    return fitted(made(on, of_eight_bits), epochs=3, batch_size=4)


# What layers keep


class Noting(layers.Layer):
    """Keeps what `add_weight(aggregation=)` is for."""

    def build(self, shape: Any) -> None:
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.total = self.add_weight(**options, name="total", aggregation="sum")
        self.num_rows = self.add_weight(**options, name="num_rows", dtype="int32", aggregation="sum")
        self.average = self.add_weight(**options, name="average", aggregation="mean")
        self.last = self.add_weight(**options, name="last", aggregation="only_first_replica")
        self.num_calls = self.add_weight(**options, name="num_calls", dtype="int32")
        self.plain = self.add_weight(**options, name="plain")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.total.assign_add(ops.sum(inputs))
            self.num_rows.assign_add(ops.shape(inputs)[0])
            self.average.assign(ops.mean(inputs))
            self.last.assign(inputs[0, 0])
            self.num_calls.assign_add(1)
            self.plain.assign(0.5 * self.plain + 0.5 * ops.mean(inputs))
        return inputs


def noting() -> Any:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(Noting()(inputs)))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@programs()
def layers_that_add_up(on: Runner) -> Any:
    return fitted(made(on, noting))


# Single numbers in metrics


def of_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


class Tracking(layers.Layer):
    """Keeps a metric of its own, of a number that it makes of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="activity")
        self.summed = keras.metrics.Sum(name="summed")

    def call(self, inputs: Any) -> Any:
        self.tracker.update_state(ops.mean(inputs))
        self.tracker.update_state(ops.mean(inputs), sample_weight=ops.shape(inputs)[0])
        self.tracker.update_state(ops.mean(inputs), sample_weight=0.5)
        self.summed.update_state(ops.sum(inputs))
        return inputs


class OwnMean(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(ops.mean(y_true))


class Latest(keras.metrics.Metric):
    """Tells its variable itself, which is no number yet."""

    def __init__(self) -> None:
        super().__init__(name="latest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.max(y_true))

    def result(self) -> Any:
        return self.value


def tracking() -> Any:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(Tracking()(inputs)))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[of_batch, OwnMean(name="own"), Latest()])
    return model


@programs()
def single_numbers_in_metrics(on: Runner) -> Any:
    return fitted(made(on, tracking))


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_programs_of_keras_give_what_they_give_in_one_process(program: Program, row: sg.Strategy) -> None:
    program.check(row)


def asynchronous_workers(number: int) -> Any:
    """A fixture with so many workers."""

    @pytest.fixture(scope="module")
    def workers(
        request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[sg.Strategy]:
        make = alone(lambda: sg.ParameterServerStrategy(number))
        with opened_row(make, request, tmp_path_factory.mktemp("row")) as made:
            yield made

    return workers


one_worker = asynchronous_workers(1)  # asynchronous, but steps come one after the other
asynchronous = asynchronous_workers(2)


@pytest.mark.soak
@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_programs_with_one_asynchronous_worker(program: Program, one_worker: sg.Strategy) -> None:
    def without_logs_of_batches(on: Runner) -> Any:
        return _tree.map(lambda each: 0 if isinstance(each, BatchLogs) else each, program.body(on))

    Program(without_logs_of_batches).check(one_worker)


@pytest.mark.parametrize("program", list(one_by_one), ids=repr)
def test_programs_that_wait_for_each_step_with_asynchronous_workers(
    program: Program, asynchronous: sg.Strategy
) -> None:
    program.check(asynchronous)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_metrics_of_every_kind_with_asynchronous_workers(asynchronous: sg.Strategy) -> None:
    # Without training, so that no order of the steps matters.
    models = [made(on, tracking) for on in (Plain(), Distributed(asynchronous))]
    for model in models:
        model.trainable = False
    plain, found = (model.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True) for model in models)
    # Workers add their changes to the one that is no sum, so that it may be any number; it must be one.
    assert np.isfinite([found.pop("latest"), plain.pop("latest")]).all()
    assert found == pytest.approx(plain, rel=1e-5)
    history = models[1].fit(**{**FIT, "x": np.tile(X, (20, 1)), "y": np.tile(Y, (20, 1))}, epochs=2).history
    assert np.isfinite(history["latest"]).all()
