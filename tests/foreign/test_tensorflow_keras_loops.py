"""TensorFlow's guides on custom loops with a Keras model, optimizer and loss; compared with plain Keras."""

from typing import Any

import keras
import pytest
import torch

import stratagem as sg
from tests.foreign.parts import vectors
from tests.foreign.programs import ROWS, Program, Programs, Runner

programs = Programs(seldom=[name for name in ROWS if name not in ("mirrored 2", "2 workers of 1")])

BATCH = vectors(7)
GLOBAL_BATCH = len(BATCH[0])


def built(on: Runner, optimizer: Any) -> Any:
    with on.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01), name="hidden"),
                keras.layers.Dense(3, name="out"),
            ],
            name="net",  # workers compare names, and those that Keras makes count the models of a process
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return model, optimizer(), loss


def state(model: Any, optimizer: Any) -> Any:
    # What an optimizer keeps is in the order of its making; the names have a number of the process.
    return [each.value for each in model.variables], [each.value for each in optimizer.variables]


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


@programs(tolerance=1e-5)
def the_loop_of_the_guide(on: Runner) -> Any:
    model, optimizer, loss_object = built(on, adam)

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        per_example = loss_object(labels, model(images, training=True))
        loss = sg.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
        loss = loss + sg.scale_regularization_loss(model.losses)
        model.zero_grad()
        loss.backward()
        gradients = [each.value.grad for each in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = [on.sum(on(train_step, *BATCH)) for _ in range(3)]
    optimizer.learning_rate = 0.1
    optimizer.variables[2].assign(torch.zeros_like(optimizer.variables[2].value))
    losses += [on.sum(on(train_step, *(each[:1] for each in BATCH))) for _ in range(2)]
    return losses, state(model, optimizer)


@programs(tolerance=1e-5)
def gradients_taken_as_by_a_tape(on: Runner) -> Any:
    model, optimizer, loss_object = built(on, lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5))

    def train_step(images: torch.Tensor, labels: torch.Tensor, model: Any, optimizer: Any) -> torch.Tensor:
        per_example = loss_object(labels, model(images, training=True))
        loss = sg.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)
        gradients = torch.autograd.grad(loss, [each.value for each in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def evaluate(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(images)

    losses = [on.sum(on(train_step, *BATCH, model=model, optimizer=optimizer)) for _ in range(3)]
    return losses, on.rows(on(evaluate, BATCH[0])), state(model, optimizer)


@programs(tolerance=1e-5)
def two_optimizers_of_one_step(on: Runner) -> Any:
    first, adafactor, loss_object = built(on, keras.optimizers.Adafactor)
    second, other, _ = built(on, adam)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> Any:
        losses = [loss_object(y, first(x)).mean(), loss_object(y, second(x)).mean()]
        for model, optimizer, loss in zip((first, second), (adafactor, other), losses, strict=True):
            model.zero_grad()
            loss.backward()
            optimizer.apply([each.value.grad for each in model.trainable_variables], model.trainable_variables)
        return losses

    return [on.mean(on(train_step, *BATCH)) for _ in range(3)], state(first, adafactor), state(second, other)


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_keras(program: Program, row: sg.Strategy) -> None:
    program.check(row)


def test_an_optimizer_is_known_after_a_run_that_failed(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        layer, optimizer = keras.layers.Dense(1), adam()
        layer.build((None, 4))

        def step(x: torch.Tensor, fails: bool) -> torch.Tensor:
            for each in layer.trainable_variables:
                each.value.grad = None
            layer(x).square().mean().backward()
            optimizer.apply([each.value.grad for each in layer.trainable_variables], layer.trainable_variables)
            if fails:
                raise ValueError("after the update")
            return optimizer.iterations.value

        for fails in (False, True, False):
            if fails:
                with pytest.raises(ValueError, match="after the update"):
                    strategy.run(step, args=(BATCH[0], True))
            else:
                found = strategy.run(step, args=(BATCH[0], False))
    assert found[0] == found[1]
    assert found[0] in (2, 3)  # whoever fails first may end the update of the other


def test_asynchronous_workers_want_an_optimizer_that_is_built(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(2) as strategy:
        with strategy.scope():
            layer, optimizer = keras.layers.Dense(1), adam()
            layer.build((None, 4))

        def step(x: torch.Tensor) -> torch.Tensor:
            for each in layer.trainable_variables:
                each.value.grad = None
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.apply([each.value.grad for each in layer.trainable_variables], layer.trainable_variables)
            return loss

        with pytest.raises(sg.errors.StrategyError, match="build it in the scope"):
            strategy.reduce("mean", strategy.run(step, args=(BATCH[0],))).item()
        strategy.revive()
        with strategy.scope():
            layer, optimizer = keras.layers.Dense(1), adam()
            layer.build((None, 4))
            optimizer.build(layer.trainable_variables)
        losses = [float(strategy.reduce("mean", strategy.run(step, args=(BATCH[0],)))) for _ in range(5)]
        assert losses == sorted(losses, reverse=True)
        assert int(optimizer.iterations.value) == 5
