"""Compares Keras' `fit` on two replicas with plain Keras on torch in one process with all cores.

Every run is a command of its own, started in turns: round by round, model by model, the order turned
around every other round. Both see the same weights and the same data, in the same order.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import RESULTS
from benchmarks.processes import CommandFailed, run
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show

_PREFIX = "FIGURES "
_TIMEOUT_S = 180.0
_GLOBAL_BATCH_SIZE = 256
_NUM_EPOCHS = 4  # the first does not count
_NUM_REPLICAS = 2
_LOSS_TOLERANCE = 1e-3
_TARGETS = {"mlp": 1.0, "cnn": 1.0}

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


def fit(workload: Workload) -> Figures:
    """Makes a model, trains it, and says how long the steps of each epoch took."""
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
    )
    began: list[float] = []
    ended: list[float] = []
    times = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: began.append(time.perf_counter()),
        on_epoch_end=lambda *_: ended.append(time.perf_counter()),
    )
    history = model.fit(
        inputs, targets, batch_size=_GLOBAL_BATCH_SIZE, epochs=_NUM_EPOCHS, verbose=0, callbacks=[times]
    )
    seconds = [(end - begin) / workload.num_steps for begin, end in zip(began, ended, strict=True)]
    return {"step_s": seconds[1:], "loss": history.history["loss"][-1]}


def plain(workload: Workload) -> Figures:
    """Keras alone."""
    return fit(workload)


def mirrored(workload: Workload) -> Figures:
    """The same in the scope of a strategy."""
    import stratagem as sg  # noqa: PLC0415  # the other must not pay for it

    share = sg.config.LogicalDeviceConfiguration()
    sg.config.set_logical_device_configuration("cpu:0", [share] * _NUM_REPLICAS)
    with sg.MirroredStrategy() as strategy, strategy.scope():
        return fit(workload)


PROGRAMS: dict[str, Callable[[Workload], Figures]] = {"plain": plain, "mirrored": mirrored}


def measure(program: str, model: str) -> Figures:
    """Runs one program once, in a process of its own.

    Raises:
        CommandFailed: It has no figures to show.
    """
    left_out = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    command = [sys.executable, "-m", "benchmarks.keras_fit", "--program", program, "--models", model]
    output = run(command, environment=environment | {"KERAS_BACKEND": "torch"}, timeout_s=_TIMEOUT_S)
    lines = [line for line in output.splitlines() if line.startswith(_PREFIX)]
    if not lines:
        raise CommandFailed(f"no figures\n{output[-3000:]}")
    figures: Figures = json.loads(lines[0].removeprefix(_PREFIX))
    return figures


def measure_all(models: list[str], num_rounds: int) -> dict[str, dict[str, list[Figures]]]:
    """The figures of all rounds, by model and program."""
    found: dict[str, dict[str, list[Figures]]] = {model: {name: [] for name in PROGRAMS} for model in models}
    for round_number in range(num_rounds):
        for model in models:
            for name in PROGRAMS if round_number % 2 == 0 else reversed(PROGRAMS):
                found[model][name].append(measure(name, model))
    return found


def step_s(figures: Figures) -> float:
    """The median of the epochs of one run."""
    return statistics.median(figures["step_s"])


def target_of(model: str, found: dict[str, list[Figures]]) -> Target:
    """Examples per second of the replicas over those of one process."""
    own, plains = ([step_s(each) for each in found[name]] for name in ("mirrored", "plain"))
    ratios = [one / other for one, other in zip(plains, own, strict=True)]
    ratio = statistics.median(plains) / statistics.median(own)
    what = f"examples/s of plain Keras, {model}, {_NUM_REPLICAS} replicas"
    return Target(what, ratio, _TARGETS[model], spread=(min(ratios), max(ratios)))


def rows_of(model: str, found: dict[str, list[Figures]]) -> list[list[str]]:
    """The rows of one model in the table of all programs."""
    rows = []
    for name, figures in found.items():
        seconds = [step_s(each) for each in figures]
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
        print(_PREFIX + json.dumps(PROGRAMS[options.program](WORKLOADS[models[0]])), flush=True)
        return
    found = measure_all(models, options.rounds)
    rows = [row for model in models for row in rows_of(model, found[model])]
    targets = [target_of(model, found[model]) for model in models]
    show("Keras fit", COLUMNS, rows, num_left=2)
    show("Keras fit on 2 replicas against plain Keras", TARGET_COLUMNS, [target.cells() for target in targets])
    RESULTS.mkdir(exist_ok=True)
    content = {
        "num_rounds": options.rounds,
        "measured": found,
        "targets": [target.as_json() for target in targets],
    }
    (RESULTS / "keras_fit.json").write_text(json.dumps(content, indent=2))
    title = (
        f"# Keras fit\n\nMedians of {options.rounds} interleaved round(s); global batches of {_GLOBAL_BATCH_SIZE}.\n"
    )
    tables = [markdown(COLUMNS, rows, num_left=2), markdown(TARGET_COLUMNS, [target.cells() for target in targets])]
    (RESULTS / "keras_fit.md").write_text("\n".join([title, *tables]))
    for model, programs in found.items():
        losses = [figures["loss"] for each in programs.values() for figures in each]
        if max(losses) - min(losses) > _LOSS_TOLERANCE:
            sys.exit(f"{model}: the losses differ, {losses}; the programs do not train alike")


if __name__ == "__main__":
    main()
