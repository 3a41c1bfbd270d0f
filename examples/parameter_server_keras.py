"""Trains a small network on handwritten digits with Keras' `fit`, asynchronously: every worker at its own pace.

The program is that of `keras_distributed.py` with another strategy. Several batches are trained on at a time; at the
end of an epoch all are done, and its metrics have counted every image once.

python examples/parameter_server_keras.py [--workers 2] [--epochs 4]
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
from digits import load_digits

import stratagem as sg


def main() -> None:
    """Trains, and tests after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    train_set, test_set = [each.tensors for each in load_digits()]

    with sg.ParameterServerStrategy(options.workers, verbose=True) as strategy:
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((1, 8, 8)),
                    keras.layers.Flatten(),
                    keras.layers.Dense(64, activation="relu"),
                    keras.layers.Dense(10),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(loss=loss, optimizer=keras.optimizers.Adam(2e-3), metrics=["accuracy"])
        history = model.fit(
            *train_set,
            batch_size=32,
            epochs=options.epochs,
            validation_data=test_set,
            validation_batch_size=397,
            verbose=0,
        ).history
    for epoch, (value, accuracy) in enumerate(zip(history["loss"], history["val_accuracy"], strict=True)):
        print(f"epoch {epoch + 1:2}: loss {value:.4f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
