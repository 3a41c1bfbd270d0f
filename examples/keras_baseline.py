"""Trains a small network on handwritten digits with Keras' `fit`, on one device.

`keras_distributed.py` is the same program on many devices, and shows what is different.

python examples/keras_baseline.py [--epochs 8]
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
from digits import load_digits


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
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    train_set, test_set = [each.tensors for each in load_digits()]

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
