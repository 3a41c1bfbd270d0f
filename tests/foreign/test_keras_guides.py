"""Programs after Keras' guides and examples, written again in small: what `fit` and its kin give in plain Keras."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from keras.src.utils.naming import reset_uids

import stratagem as sg
from tests.foreign.programs import ROWS, Program, Programs, Runner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Where each step waits for the others, a model that Keras trains is that of one device.
programs = Programs(
    seldom=[row for row in ROWS if row not in ("one device", "mirrored 2")],
    without=("parameter server 2",),
    tolerance=5e-5,
)
# Files that one worker writes, the others do not find.
ALONE = {"without": ("parameter server 2", "2 workers of 1")}

NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(10, 4)).astype("float32")  # batches of 4: the last has 2
Y = (X @ NUMBERS.normal(size=(4, 2))).astype("float32")
LABELS = np.arange(10) % 3
RARE = (np.arange(10) % 5 == 0).astype("float32")
IMAGES = NUMBERS.normal(size=(10, 8, 8, 1)).astype("float32")
SERIES = NUMBERS.normal(size=(10, 5, 2)).astype("float32")
TOKENS = np.array([[1, 2, 3, 4, 0], [5, 6, 0, 0, 0], [7, 1, 2, 0, 0], [3, 3, 3, 3, 3], [4, 0, 0, 0, 0]] * 2)


def made(on: Runner, make: Callable[[], Any]) -> Any:
    """What a function makes in the scope, from the same weights each time."""
    reset_uids()
    keras.utils.set_random_seed(1)
    with on.scope():
        return make()


def fitted(model: Any, x: Any, y: Any = None, **given: Any) -> Any:
    """The history of the usual training."""
    keras.utils.set_random_seed(2)
    usual = {"epochs": 2, "verbose": 0, "shuffle": False} | ({} if y is None else {"batch_size": 4})
    return model.fit(x, y, **usual | given).history


def trained(on: Runner, make: Callable[[], Any], x: Any, y: Any = None, **given: Any) -> Any:
    """The history, the weights and the optimizer's variables of the usual training."""
    model = made(on, make)
    return fitted(model, x, y, **given), model.get_weights(), [each.numpy() for each in model.optimizer.variables]


def compiled(model: Any, **given: Any) -> Any:
    model.compile(**{"loss": "mse", "optimizer": keras.optimizers.Adam(0.01)} | given)
    return model


def mlp(**given: Any) -> Any:
    return compiled(keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(2)]), **given)


def classifier(**given: Any) -> Any:
    usual = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}
    return compiled(keras.Sequential([keras.Input((4,)), layers.Dense(6, "relu"), layers.Dense(3)]), **usual | given)


# The functional API


@programs()
def residual_connections_and_validation(on: Runner) -> Any:
    def make() -> Any:
        inputs = keras.Input((4,), name="digits")
        x = layers.Dense(6, activation="relu")(inputs)
        x = layers.add([layers.Dense(6, activation="relu")(x), x])
        outputs = layers.Dense(3, activation="softmax")(x)
        return compiled(keras.Model(inputs, outputs), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    model = made(on, make)
    history = fitted(model, X, LABELS, validation_split=0.2)
    return history, model.evaluate(X, LABELS, batch_size=4, verbose=0), model.predict(X, batch_size=4, verbose=0)


@programs()
def autoencoder_of_two_models_and_a_shared_layer(on: Runner) -> Any:
    def make() -> Any:
        encoder = keras.Sequential([keras.Input((4,)), layers.Dense(2, "tanh")], name="encoder")
        decoder = keras.Sequential([keras.Input((2,)), layers.Dense(4)], name="decoder")
        shared = layers.Dense(4)
        inputs = keras.Input((4,))
        return compiled(keras.Model(inputs, decoder(encoder(shared(shared(inputs))))))

    return trained(on, make, X, X)


@programs()
def tickets_with_several_inputs_and_outputs(on: Runner) -> Any:
    def make() -> Any:
        title, body, tags = (
            keras.Input((5,), name="title"),
            keras.Input((5,), name="body"),
            keras.Input((4,), name="tags"),
        )
        both = [layers.LSTM(3)(layers.Embedding(8, 3)(title)), layers.LSTM(2)(layers.Embedding(8, 3)(body))]
        x = layers.concatenate([*both, tags])
        outputs = {"priority": layers.Dense(1)(x), "department": layers.Dense(3)(x)}
        losses = {
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        }
        metrics = {"priority": ["mae"], "department": ["accuracy"]}
        weights = {"priority": 1.0, "department": 0.2}
        model = keras.Model({"title": title, "body": body, "tags": tags}, outputs)
        return compiled(model, loss=losses, loss_weights=weights, metrics=metrics)

    x = {"title": TOKENS, "body": TOKENS[::-1], "tags": X}
    return trained(on, make, x, {"priority": RARE, "department": LABELS})


@programs()
def lists_of_inputs_outputs_and_losses(on: Runner) -> Any:
    def make() -> Any:
        image, series = keras.Input((8, 8, 1)), keras.Input((5, 2))
        x1 = layers.GlobalMaxPooling2D()(layers.Conv2D(3, 3)(image))
        x2 = layers.GlobalMaxPooling1D()(layers.Conv1D(3, 3)(series))
        x = layers.concatenate([x1, x2])
        losses = [keras.losses.MeanSquaredError(), keras.losses.CategoricalCrossentropy()]
        metrics = [[keras.metrics.MeanAbsolutePercentageError()], [keras.metrics.CategoricalAccuracy()]]
        model = keras.Model([image, series], [layers.Dense(1)(x), layers.Dense(3, activation="softmax")(x)])
        return compiled(model, loss=losses, metrics=metrics, loss_weights=[2.0, 1.0])

    return trained(on, make, [IMAGES, SERIES], [Y[:, :1], np.eye(3)[LABELS]])


@programs()
def features_of_a_trained_model(on: Runner) -> Any:
    model = made(on, classifier)
    fitted(model, X, LABELS)
    with on.scope():
        features = keras.Model(model.inputs, [layer.output for layer in model.layers])
    return features.predict(X, batch_size=4, verbose=0)


# Subclasses, layers, losses and metrics of one's own


class Linear(layers.Layer):
    def __init__(self, units: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape: Any) -> None:
        self.w = self.add_weight(shape=(input_shape[-1], self.units), initializer="random_normal", trainable=True)
        self.b = self.add_weight(shape=(self.units,), initializer="zeros", trainable=True)

    def call(self, inputs: Any) -> Any:
        return ops.matmul(inputs, self.w) + self.b

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


class Block(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(6), Linear(2)

    def call(self, inputs: Any) -> Any:
        return self.second(ops.relu(self.first(inputs)))


class Regularized(layers.Layer):
    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.rate = rate

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.rate * ops.mean(inputs**2))
        return inputs


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.regularized, self.norm = Block(), Regularized(), layers.BatchNormalization(synchronized=True)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.regularized(self.block(self.norm(inputs, training=training)))


@programs()
def layers_of_ones_own_in_a_subclass(on: Runner) -> Any:
    return trained(on, lambda: compiled(Subclassed()), X, Y)


@programs()
def weights_that_are_regularized(on: Runner) -> Any:
    def make() -> Any:
        dense = layers.Dense(6, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(0.01))
        return compiled(keras.Sequential([dense, layers.Dense(2, kernel_constraint="max_norm")]))

    return trained(on, make, X, Y)


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


class OwnLoss(keras.losses.Loss):
    def __init__(self, factor: float = 0.1, name: str = "own") -> None:
        super().__init__(name=name)
        self.factor = factor

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return own_loss(y_true, y_pred) + self.factor * ops.mean(ops.square(0.5 - y_pred), axis=-1)


class TruePositives(keras.metrics.Metric):
    def __init__(self, name: str = "true_positives", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable(shape=(), name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        found = ops.cast(ops.reshape(y_true, (-1,)), "int32") == ops.cast(ops.argmax(y_pred, axis=1), "int32")
        self.count.assign_add(ops.sum(ops.cast(found, "float32")))

    def result(self) -> Any:
        return self.count.value

    def reset_state(self) -> None:
        self.count.assign(0)


@programs()
def losses_of_ones_own(on: Runner) -> Any:
    return [trained(on, lambda loss=loss: mlp(loss=loss), X, Y, epochs=1) for loss in (own_loss, OwnLoss(), "huber")]


@programs()
def metrics_of_ones_own(on: Runner) -> Any:
    history, weights, _ = trained(on, lambda: classifier(metrics=[TruePositives()]), X, LABELS)
    return history, weights


# Weights of classes and samples


@programs()
def rare_classes(on: Runner) -> Any:
    def make() -> Any:
        metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall"), keras.metrics.AUC()]
        model = keras.Sequential([layers.Dense(6, "relu"), layers.Dense(1, "sigmoid")])
        return compiled(model, loss="binary_crossentropy", metrics=[*metrics, keras.metrics.FalseNegatives()])

    return trained(on, make, X, RARE, class_weight={0: 0.3, 1: 2.0}, validation_data=(X, RARE))


@programs()
def weights_of_samples(on: Runner) -> Any:
    weights = np.where(LABELS == 2, 2.0, 0.5).astype("float32")
    given = {"sample_weight": weights, "validation_data": (X[:5], LABELS[:5], weights[:5])}
    return trained(on, lambda: classifier(weighted_metrics=["accuracy"], metrics=["accuracy"]), X, LABELS, **given)


# Sequences


def tagger(*recurrent: Any) -> Any:
    model = keras.Sequential([layers.Embedding(8, 4, mask_zero=True), *recurrent, layers.Dense(3)])
    return compiled(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


@programs()
def padded_sequences(on: Runner) -> Any:
    makers: Mapping[str, Callable[[], Any]] = {
        "lstm": lambda: tagger(layers.LSTM(4)),
        "two ways": lambda: tagger(layers.Bidirectional(layers.LSTM(3, return_sequences=True)), layers.GRU(3)),
    }
    return {name: trained(on, make, TOKENS, LABELS) for name, make in makers.items()}


@programs()
def tags_of_tokens_with_a_mask(on: Runner) -> Any:
    """The mask reaches the loss: padding does not count."""
    return trained(on, lambda: tagger(layers.LSTM(4, return_sequences=True)), TOKENS, (TOKENS + 1) % 3)


@programs()
def masked_series_and_cells(on: Runner) -> Any:
    def make() -> Any:
        cells = layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)])
        return compiled(keras.Sequential([layers.Masking(), cells, layers.Dense(2)]))

    series = SERIES * (TOKENS > 0)[:, :, None]
    return trained(on, make, series.astype("float32"), Y)


@programs()
def encoder_and_decoder(on: Runner) -> Any:
    def make() -> Any:
        source, target = keras.Input((5,)), keras.Input((5,))
        _, *state = layers.LSTM(3, return_state=True)(layers.Embedding(8, 3)(source))
        x = layers.LSTM(3, return_sequences=True)(layers.Embedding(8, 3)(target), initial_state=state)
        model = keras.Model([source, target], layers.Dense(8, activation="softmax")(x))
        return compiled(model, loss="sparse_categorical_crossentropy")

    return trained(on, make, [TOKENS, TOKENS], np.roll(TOKENS, 1, axis=1))


class Positions(layers.Layer):
    """Tokens and where they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = layers.Embedding(8, 4), layers.Embedding(5, 4)

    def call(self, inputs: Any) -> Any:
        return self.tokens(inputs) + self.places(ops.arange(5))


@programs()
def text_classification_with_a_transformer(on: Runner) -> Any:
    def make() -> Any:
        inputs = keras.Input((5,))
        x = Positions()(inputs)
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(4)(layers.Dense(6, "relu")(x)))
        outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
        return compiled(keras.Model(inputs, outputs), loss="sparse_categorical_crossentropy")

    return trained(on, make, TOKENS, LABELS)


# Images and tables


@programs()
def convolutional_network(on: Runner) -> Any:
    def make() -> Any:
        stack = [layers.Rescaling(0.5), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
        model = keras.Sequential([keras.Input((8, 8, 1)), *stack, layers.Dense(3, "softmax")])
        return compiled(model, loss="categorical_crossentropy", metrics=["accuracy"])

    return trained(on, make, IMAGES, np.eye(3)[LABELS], validation_data=(IMAGES[:5], np.eye(3)[LABELS[:5]]))


@programs()
def transfer_learning_and_fine_tuning(on: Runner) -> Any:
    def base() -> Any:
        inputs = keras.Input((8, 8, 1))
        x = layers.BatchNormalization(synchronized=True)(layers.SeparableConv2D(3, 3)(inputs))
        return keras.Model(inputs, layers.GlobalAveragePooling2D()(layers.Activation("relu")(x)))

    def make() -> Any:
        body = base()
        body.trainable = False
        inputs = keras.Input((8, 8, 1))
        return compiled(keras.Model(inputs, layers.Dense(2)(body(inputs, training=False))))

    model = made(on, make)
    first = fitted(model, IMAGES, Y)
    model.trainable = True
    compiled(model, optimizer=keras.optimizers.SGD(1e-3))
    return first, fitted(model, IMAGES, Y, epochs=1), model.get_weights()


@programs()
def features_that_are_prepared(on: Runner) -> Any:
    def make() -> Any:
        normal = layers.Normalization()
        normal.adapt(X)
        numbers, kinds = keras.Input((4,)), keras.Input((1,), dtype="int64")
        x = layers.concatenate([normal(numbers), layers.CategoryEncoding(3, output_mode="one_hot")(kinds)])
        return compiled(keras.Model([numbers, kinds], layers.Dense(2)(x)))

    return trained(on, make, [X, LABELS[:, None]], Y)


@programs()
def collaborative_filtering(on: Runner) -> Any:
    def make() -> Any:
        user, film = keras.Input((1,)), keras.Input((1,))
        latent = [layers.Flatten()(layers.Embedding(10, 3)(each)) for each in (user, film)]
        return compiled(keras.Model([user, film], layers.Dot(1)(latent)), loss="binary_crossentropy")

    return trained(on, make, [np.arange(10)[:, None], LABELS[:, None]], RARE)


# Learning rates and callbacks


@programs()
def learning_rates_by_schedule(on: Runner) -> Any:
    kinds = keras.optimizers.schedules
    rates = (
        kinds.ExponentialDecay(0.1, 2, 0.5, staircase=True),
        kinds.CosineDecay(0.1, 5, warmup_steps=2, warmup_target=0.2),
    )
    return [trained(on, lambda rate=rate: mlp(optimizer=keras.optimizers.RMSprop(rate)), X, Y) for rate in rates]


@programs()
def learning_rates_by_callback(on: Runner) -> Any:
    def at(epoch: int, rate: float) -> float:
        return rate if epoch < 1 else rate * 0.1

    def callbacks() -> list[Any]:
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10.0, factor=0.5)
        return [keras.callbacks.LearningRateScheduler(at), plateau]

    model = made(on, lambda: mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)))
    return fitted(model, X, Y, epochs=4, callbacks=callbacks()), model.get_weights()


@programs(**ALONE)
def early_stopping_and_checkpoints(on: Runner) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        best = str(Path(folder) / "best.keras")
        callbacks = [
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
            keras.callbacks.CSVLogger(str(Path(folder) / "log.csv")),
        ]
        model = made(on, lambda: mlp(optimizer=keras.optimizers.SGD(0.9)))
        history = fitted(model, X, Y, epochs=5, validation_data=(X[:3], -Y[:3]), callbacks=callbacks)
        with on.scope():
            loaded = keras.models.load_model(best)
        lines = (Path(folder) / "log.csv").read_text().splitlines()
    return history, model.get_weights(), loaded.evaluate(X, Y, batch_size=4, verbose=0), len(lines)


class Watching(keras.callbacks.Callback):
    """Keeps what it sees, raises the rate, and stops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, float(logs["loss"])))
        self.model.optimizer.learning_rate = 0.02 * (batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(self.model.get_weights())
        self.model.stop_training = epoch == 1


@programs()
def callbacks_of_ones_own(on: Runner) -> Any:
    model, watching = made(on, mlp), Watching()
    return fitted(model, X, Y, epochs=5, callbacks=[watching]), watching.seen


@programs()
def averaged_weights_and_added_gradients(on: Runner) -> Any:
    optimizer = {"use_ema": True, "ema_momentum": 0.5, "gradient_accumulation_steps": 2}
    model = made(on, lambda: mlp(optimizer=keras.optimizers.AdamW(0.01, **optimizer)))
    history = fitted(model, X, Y, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return history, model.get_weights()


# Saving and loading


@programs(**ALONE)
def model_that_is_saved_loaded_and_trained_on(on: Runner) -> Any:
    def make() -> Any:
        return compiled(keras.Sequential([keras.Input((4,)), Linear(5), layers.Dense(2)]), loss=own_loss)

    with tempfile.TemporaryDirectory() as folder:
        model, path = made(on, make), str(Path(folder) / "model.keras")
        fitted(model, X, Y)
        model.save(path)
        with on.scope():
            loaded = keras.models.load_model(path, custom_objects={"Linear": Linear, "own_loss": own_loss})
        return fitted(loaded, X, Y), loaded.get_weights(), int(loaded.optimizer.iterations)


@programs(**ALONE)
def weights_that_are_saved_loaded_and_copied(on: Runner) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        first, second = made(on, classifier), made(on, classifier)
        fitted(first, X, LABELS)
        fitted(second, -X, LABELS, epochs=1)  # an optimizer without variables takes none
        first.save_weights(Path(folder) / "model.weights.h5")
        second.load_weights(Path(folder) / "model.weights.h5")
    with on.scope():
        clone = keras.models.clone_model(first)
        clone.set_weights(first.get_weights())
        clone.compile(loss="mse", optimizer="sgd")
    return second.evaluate(X, LABELS, batch_size=4, verbose=0), clone.predict(X, verbose=0), fitted(second, X, LABELS)


# Data, and loops of one's own


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def endless() -> Iterator[Any]:
    while True:
        yield X[:4], Y[:4]
        yield X[4:9], Y[4:9], np.ones(5, "float32")


@programs()
def data_of_other_kinds(on: Runner) -> Any:
    table = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    loader = torch.utils.data.DataLoader(table, batch_size=4)
    kinds = [({"x": Batches()}, {}), ({"x": loader}, {}), ({"x": endless()}, {"steps_per_epoch": 3})]
    return [trained(on, mlp, **data, **given) for data, given in kinds]


@programs()
def loop_over_batches(on: Runner) -> Any:
    model = made(on, classifier)
    seen: list[Any] = [model.train_on_batch(X[:4], LABELS[:4], return_dict=True) for _ in range(2)]
    seen.append(model.train_on_batch(X[4:], LABELS[4:], class_weight={0: 1.0, 1: 2.0, 2: 0.5}))
    model.reset_metrics()
    seen.append(model.test_on_batch(X[:5], LABELS[:5], return_dict=True))
    return [_numbers(each) for each in seen], model.predict_on_batch(X[:3]), model.get_weights()


def _numbers(logs: Any) -> Any:
    return {name: float(value) for name, value in logs.items()} if isinstance(logs, dict) else list(map(float, logs))


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_keras(program: Program, row: sg.Strategy) -> None:
    program.check(row)
