"""Trains a small network on handwritten digits with Keras' `fit`, on as many devices as there are.

The losses are those of `keras_baseline.py`, which is plain Keras. All that is different, by `diff -u0`:

    +
    +import stratagem as sg

    +    parser.add_argument("--devices", type=int, default=2, help="how many logical devices the CPU is divided into")

    -    model = make_model()
    +    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * options.devices)
    +    strategy = sg.MirroredStrategy()
    +    with strategy.scope():
    +        model = make_model()

Two of these lines, `--devices` and `sg.config`, divide one CPU into several devices; a machine with several GPUs
does without.

python examples/keras_distributed.py [--devices 2] [--epochs 8]
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
from digits import load_digits

import stratagem as sg


def make_model() -> keras.Model:
    """Two convolutions and two dense layers."""
    return keras.Sequential(
        [
            keras.Input((1, 8, 8)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Trains, and tests after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="how many logical devices the CPU is divided into")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    train_set, test_set = [each.tensors for each in load_digits()]

    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * options.devices)
    strategy = sg.MirroredStrategy()
    with strategy.scope():
        model = make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(*train_set, batch_size=64, epochs=options.epochs, validation_data=test_set, verbose=0).history
    for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["val_accuracy"], strict=True), start=1):
        print(f"epoch {epoch:2}: loss {loss:.4f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
