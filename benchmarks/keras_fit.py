"""Compares Keras' `fit` on two replicas with plain Keras on torch in one process with all cores.

Programs measure their epochs in turns, model by model. All see the same weights and the same data, in the same order.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import turns
from benchmarks.measure import RESULTS
from benchmarks.tables import TARGET_COLUMNS, Target, ratio_of, show
from benchmarks.training import environment

_GLOBAL_BATCH_SIZE = 256
_NUM_REPLICAS = 2
_LOSS_TOLERANCE = 1e-3
_TARGETS = {"mirrored": {"mlp": 1.0, "cnn": 1.0}, "mirrored, 8 steps in an execution": {"mlp": 1.05}}

Figures = dict[str, Any]


def _mlp() -> Any:
    import keras  # noqa: PLC0415  # the command that starts the others does without

    dense = keras.layers.Dense
    return keras.Sequential(
        [keras.Input((784,)), dense(1024, activation="relu"), dense(1024, activation="relu"), dense(10)]
    )


def _cnn() -> Any:
    import keras  # noqa: PLC0415

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *(layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(2)),
            *(layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(2)),
            *(layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model of `benchmarks.models`, in Keras."""

    make_model: Callable[[], Any]
    shape: tuple[int, ...]
    num_steps: int


WORKLOADS = {"mlp": Workload(_mlp, (784,), 40), "cnn": Workload(_cnn, (28, 28, 1), 10)}


def fit(workload: Workload, **options: Any) -> None:
    """Makes a model, trains it, and says in each round how long the steps of an epoch took."""
    import keras  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    num_examples = workload.num_steps * _GLOBAL_BATCH_SIZE
    inputs = random.normal(size=(num_examples, *workload.shape)).astype("float32")
    targets = random.integers(10, size=num_examples)
    model = workload.make_model()
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    all_turns = turns.rounds()

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        """Takes the time of every epoch but the first."""

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            if epoch > 0:
                self.answer = next(all_turns)
                self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            if epoch > 0:
                self.answer({"step_s": (time.perf_counter() - self.start) / workload.num_steps, "loss": logs["loss"]})

        def on_train_end(self, logs: object = None) -> None:
            next(all_turns, None)  # until the others have measured, too

    num_epochs = 1 + turns.num_rounds()
    model.fit(inputs, targets, _GLOBAL_BATCH_SIZE, epochs=num_epochs, verbose=0, callbacks=[Turns()])


def plain(workload: Workload) -> None:
    """Keras alone."""
    fit(workload)


def mirrored(workload: Workload, **options: Any) -> None:
    """The same in the scope of a strategy."""
    import stratagem as sg  # noqa: PLC0415  # the other must not pay for it

    share = sg.config.LogicalDeviceConfiguration()
    sg.config.set_logical_device_configuration("cpu:0", [share] * _NUM_REPLICAS)
    with sg.MirroredStrategy() as strategy, strategy.scope():
        fit(workload, **options)


PROGRAMS: dict[str, Callable[[Workload], None]] = {
    "plain": plain,
    "mirrored": mirrored,
    "mirrored, 8 steps in an execution": lambda workload: mirrored(workload, steps_per_execution=8),
}


def measure(model: str, num_rounds: int) -> dict[str, list[Figures]]:
    """The figures of all rounds, by program."""
    command = [sys.executable, "-m", "benchmarks.keras_fit", "--models", model, "--program"]
    commands = {name: [*command, name] for name in PROGRAMS}
    return turns.take_turns(commands, num_rounds, environment() | {"KERAS_BACKEND": "torch"})


def targets_of(model: str, found: dict[str, list[Figures]]) -> Iterator[Target]:
    """Examples per second of the replicas over those of one process."""
    plains = [each["step_s"] for each in found["plain"]]
    for name, bounds in _TARGETS.items():
        own = [each["step_s"] for each in found[name]]
        what = f"examples/s of plain Keras, {model}, {_NUM_REPLICAS} replicas" + name.removeprefix("mirrored")
        yield ratio_of(what, plains, own, bounds.get(model))


def rows_of(model: str, found: dict[str, list[Figures]]) -> list[list[str]]:
    """The rows of one model in the table of all programs."""
    rows = []
    for name, figures in found.items():
        seconds = [each["step_s"] for each in figures]
        middle = statistics.median(seconds)
        rows.append(
            [
                *(model, name, f"{_GLOBAL_BATCH_SIZE / middle:.1f}"),
                f"{1000 * middle:.2f} ({1000 * min(seconds):.2f}..{1000 * max(seconds):.2f})",
                f"{figures[-1]['loss']:.4f}",
            ]
        )
    return rows


COLUMNS = ("model", "program", "examples/s", "step ms (rounds)", "loss")


def main() -> None:
    """Measures, prints the tables, writes the files; or is one of the programs that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", choices=list(PROGRAMS), help="only train the first model with this program, here")
    options = parser.parse_args()
    models = options.models.split(",")
    if unknown := [model for model in models if model not in WORKLOADS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if options.program is not None:
        PROGRAMS[options.program](WORKLOADS[models[0]])
        return
    found = {model: measure(model, options.rounds) for model in models}
    rows = [row for model in models for row in rows_of(model, found[model])]
    targets = [target for model in models for target in targets_of(model, found[model])]
    show("Keras fit", COLUMNS, rows, num_left=2)
    show("Keras fit on 2 replicas against plain Keras", TARGET_COLUMNS, [target.cells() for target in targets])
    RESULTS.mkdir(exist_ok=True)
    content = {"num_rounds": options.rounds, "measured": found, "targets": [target.as_json() for target in targets]}
    (RESULTS / "keras_fit.json").write_text(json.dumps(content, indent=2))
    for model, programs in found.items():
        for each in zip(*programs.values(), strict=True):
            losses = [figures["loss"] for figures in each]
            if max(losses) - min(losses) > _LOSS_TOLERANCE:
                sys.exit(f"{model}: the losses differ, {losses}; the programs do not train alike")


if __name__ == "__main__":
    main()
