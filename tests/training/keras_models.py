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
