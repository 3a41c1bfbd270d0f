"""Keras models of a user's own module."""

from typing import Any

import keras
import torch


class Halved(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(8, activation="tanh")
        self.last = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return 0.5 * self.last(self.first(inputs))


class Twice(keras.Model):
    """Has a step of its own, with a metric of its own and a value that is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.error = keras.metrics.MeanSquaredError(name="error")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        self.zero_grad()
        outputs = self(inputs, training=True)
        loss = keras.ops.mean(keras.ops.square(outputs - targets))
        loss.backward()
        weights = self.trainable_weights[:]
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.error.update_state(targets, outputs)
        return {"error": self.error.result(), "twice": 2 * loss.detach()}


class AlwaysDropped(keras.layers.Layer):
    """Dropout in prediction too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        return keras.random.dropout(inputs, 0.5, seed=self.generator)


class Fragile(keras.Model):
    """Fails on inputs that are too large."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, torch.Tensor) and inputs.device.type != "meta" and float(inputs.max()) > 1e5:
            raise ValueError("an input above 1e5")
        return self.dense(inputs)


class Optional(keras.layers.Dense):
    """Keeps a setting in a dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = {"factor": 1.0}

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.options["factor"] * super().call(inputs)


class Scaled(keras.losses.Loss):
    """A loss with a setting of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.factor * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def cubed(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.absolute(y_true - y_pred) ** 3, axis=-1)


def nought(y_true: Any, y_pred: Any) -> float:
    return 0.0


def one(y_true: Any, y_pred: Any) -> float:
    return 1.0


class Dense(keras.Model):
    """The least that the models below add to."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


class Penalised(Dense):
    """Its loss is its own; no target is looked at."""

    def call(self, inputs: Any) -> Any:
        outputs = self.dense(inputs)
        self.add_loss(keras.ops.mean(keras.ops.square(outputs)))
        return outputs


class Weighted(Dense):
    """Has a loss and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fourfold = keras.metrics.Mean(name="fourfold")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.fourfold.update_state(4 * loss, sample_weight=len(x))
        return 0.5 * loss


class Reporting(Dense):
    """Reports a metric under another name, and one that is none."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "mean_output": keras.ops.mean(y_pred)}


class Around(Dense):
    """Adds to what Keras' own steps tell."""

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "ten": 10.0}

    def test_step(self, data: Any) -> Any:
        return {**super().test_step(data), "five": 5.0}


class Rivals(keras.Model):
    """Two parts with an optimizer each, of which one is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(2), keras.layers.Dense(2)
        self.other_optimizer = keras.optimizers.Adam(0.02)
        self.error = keras.metrics.Mean(name="error")

    def call(self, inputs: Any) -> Any:
        return self.first(inputs) + self.second(inputs)

    def train_step(self, data: Any) -> Any:
        inputs, targets = data
        for part, optimizer in ((self.first, self.optimizer), (self.second, self.other_optimizer)):
            self.zero_grad()
            loss = keras.ops.mean(keras.ops.square(self(inputs, training=True) - targets))
            loss.backward()
            with torch.no_grad():
                optimizer.apply([weight.value.grad for weight in part.trainable_weights], part.trainable_weights)
        self.error.update_state(loss, sample_weight=len(inputs))
        return {"error": self.error.result()}


class OfTorch(keras.Model):
    """Has layers of torch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
        self.head = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.head(self.body(inputs))


class OnlyInTraining(keras.Model):
    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs if training else 0 * inputs


class Remembering(Dense):
    """Keeps a counter and a mean, as some layers do, and a constant that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.counter = self.add_weight(**options, dtype="int32", name="counter")
        self.mean = self.add_weight(**options, name="mean")
        self.noted = self.add_weight(**options, name="noted")
        self.constant = self.add_weight(shape=(3,), initializer=_infinite, trainable=False, name="constant")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.counter.assign_add(1)
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs))
        # A counter must have one device's value inside a step, too.
        return self.dense(inputs) + keras.ops.cast(self.counter > 1000, "float32")


def _infinite(shape: Any, dtype: Any) -> Any:
    return keras.ops.full(shape, float("inf"), dtype=dtype)


class Typical(keras.metrics.Metric):
    """A metric that is no sum: it says so."""

    def __init__(self) -> None:
        super().__init__(name="typical")
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(0.5 * self.value + 0.5 * keras.ops.mean(y_true))

    def result(self) -> Any:
        return 1.0 * self.value


class Largest(keras.metrics.Metric):
    """A metric that is no sum, and does not say so."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")
        self.reset_state()

    def reset_state(self) -> None:
        self.value.assign(-1e9)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred - y_true)))

    def result(self) -> Any:
        return 1.0 * self.value


class Rowwise(keras.layers.Layer):
    """Goes through the rows one by one, and cannot do without any."""

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, torch.Tensor) or inputs.device.type == "meta":
            return inputs
        return torch.stack([row / row.norm() for row in inputs])


class Structured(keras.Model):
    def call(self, inputs: Any) -> Any:
        first = inputs["first"]
        return {"same": first, "both": [-first, 2 * first]}


def num_keras_layers() -> int:
    import gc

    gc.collect()
    return sum(issubclass(type(each), keras.layers.Layer) for each in gc.get_objects())
