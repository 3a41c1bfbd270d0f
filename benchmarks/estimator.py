"""Compares `Estimator.train` under MirroredStrategy with the custom loop of the same model, and judges the target.

Every run is a command of its own, started in turns: round by round, model by model, the order turned around every
other round. What is timed is a step with all that goes with it: the next batch, the run, the loss of the custom loop,
the hooks of the Estimator.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console

import stratagem as sg
from benchmarks.contender import NUM_WARM_UP, PREFIX, build, make_optimizer, train_step
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS, Workload
from benchmarks.processes import CommandFailed, run
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show

_MODELS = ("mlp", "cnn")
_NUM_REPLICAS = 2
_TARGET = 0.95
_LOSS_TOLERANCE = 1e-3
_TIMEOUT_S = 180.0
_PROGRAMS = ("custom loop", "Estimator")
_COLUMNS = ("model", "program", "examples/s", "step ms (rounds)", "x custom loop", "loss")


def custom_loop(workload: Workload, strategy: sg.Strategy, num_steps: int) -> tuple[list[float], float]:
    """The loop of the README; the times of its steps and the last loss."""
    with strategy.scope():
        model, optimizer = build(workload)

    step = train_step(workload, model, optimizer)
    moments = []
    for batch in strategy.distribute(_batches(workload, num_steps)):
        loss = strategy.reduce("mean", strategy.run(step, args=batch)).item()
        moments.append(time.perf_counter())
    return _durations(moments), loss


def estimator(workload: Workload, strategy: sg.Strategy, num_steps: int) -> tuple[list[float], float]:
    """The same training by an Estimator as it is by default: with its log, summaries and checkpoints."""

    def model_fn(mode: str) -> sg.estimator.EstimatorSpec:
        model = workload.make_model()
        loss = torch.nn.functional.cross_entropy
        return sg.estimator.EstimatorSpec(mode, model, loss, optimizer=make_optimizer(model))

    class Clock(sg.estimator.SessionRunHook):
        def __init__(self) -> None:
            self.moments: list[float] = []
            self.loss = 0.0

        def after_run(self, run_context: sg.estimator.RunContext, run_values: sg.estimator.RunValues) -> None:
            self.moments.append(time.perf_counter())
            if len(self.moments) == num_steps:
                self.loss = run_values.loss

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = sg.estimator.RunConfig(random_seed=0, train_distribute=strategy)
        made = sg.estimator.Estimator(model_fn, folder, config)
        made.train(lambda: _batches(workload, num_steps), hooks=[clock])
    return _durations(clock.moments), clock.loss


def _batches(workload: Workload, num_steps: int) -> Iterator[Any]:
    torch.manual_seed(1)
    batch = workload.make_batch()
    return (batch for _ in range(num_steps))


def _durations(moments: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)][NUM_WARM_UP:]


def run_one(program: str, model: str) -> None:
    """Measures here and now; prints the figures."""
    workload = WORKLOADS[model]
    share = sg.config.LogicalDeviceConfiguration()
    sg.config.set_logical_device_configuration("cpu:0", [share] * _NUM_REPLICAS)
    measure: Callable[..., tuple[list[float], float]] = {"custom loop": custom_loop, "Estimator": estimator}[program]
    with sg.MirroredStrategy() as strategy:
        seconds, loss = measure(workload, strategy, NUM_WARM_UP + 1 + 2 * workload.num_steps)
    print(PREFIX + json.dumps({"step_s": statistics.median(seconds), "loss": loss}), flush=True)


def _measured(program: str, model: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.estimator", "--one", program, "--models", model]
    output = run(command, environment=os.environ, timeout_s=_TIMEOUT_S)
    lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
    if not lines:
        raise CommandFailed(f"no figures\n{output[-3000:]}")
    figures: dict[str, float] = json.loads(lines[0].removeprefix(PREFIX))
    return figures


Figures = dict[tuple[str, str], list[dict[str, float]]]


def _median_s(figures: Figures, model: str, program: str) -> float:
    return statistics.median(each["step_s"] for each in figures[model, program])


def _rows(figures: Figures) -> list[list[str]]:
    rows = []
    for (model, program), rounds in figures.items():
        seconds = [each["step_s"] for each in rounds]
        median_s = statistics.median(seconds)
        rows.append(
            [
                model,
                program,
                f"{len(WORKLOADS[model].make_batch()[0]) / median_s:.1f}",
                f"{1000 * median_s:.2f} ({1000 * min(seconds):.2f}..{1000 * max(seconds):.2f})",
                f"{_median_s(figures, model, _PROGRAMS[0]) / median_s:.3f}",
                f"{rounds[-1]['loss']:.4f}",
            ]
        )
    return rows


def _target(figures: Figures, model: str) -> Target:
    """How many examples per second the Estimator has, over those of the loop."""
    loop, own = ([each["step_s"] for each in figures[model, program]] for program in _PROGRAMS)
    ratios = [first / second for first, second in zip(loop, own, strict=True)]
    value = statistics.median(loop) / statistics.median(own)
    what = f"examples/s of the custom loop, {model}, {_NUM_REPLICAS} replicas"
    return Target(what, value, _TARGET, spread=(min(ratios), max(ratios)))


def main() -> None:
    """Measures, prints the tables, writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(_MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", choices=_PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.models.split(",")
    if unknown := [model for model in models if model not in WORKLOADS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if options.one:
        run_one(options.one, models[0])
        return
    console = Console(width=130)
    figures: Figures = {(model, program): [] for model in models for program in _PROGRAMS}
    for number in range(options.rounds):
        for model in models:
            for program in _PROGRAMS if number % 2 == 0 else reversed(_PROGRAMS):
                console.print(f"[dim]round {number + 1}/{options.rounds}  {model}  {program}[/]")
                figures[model, program].append(_measured(program, model))
    rows, targets = _rows(figures), [_target(figures, model) for model in models]
    show("Estimator and custom loop", _COLUMNS, rows, num_left=2)
    show("Estimator against the custom loop", TARGET_COLUMNS, [target.cells() for target in targets])
    RESULTS.mkdir(exist_ok=True)
    measured = {model: {program: figures[model, program] for program in _PROGRAMS} for model in models}
    content = {"num_rounds": options.rounds, "measured": measured, "targets": [each.as_json() for each in targets]}
    (RESULTS / "estimator.json").write_text(json.dumps(content, indent=2))
    tables = [
        markdown(_COLUMNS, rows, num_left=2),
        markdown(TARGET_COLUMNS, [target.cells() for target in targets]),
    ]
    (RESULTS / "estimator.md").write_text("# Estimator\n\n" + "\n".join(tables))
    for model in models:
        loop, own = (figures[model, program][-1]["loss"] for program in _PROGRAMS)
        if abs(loop - own) > _LOSS_TOLERANCE * max(1.0, abs(loop)):
            sys.exit(f"{model}: the Estimator has loss {own:.5f} where the custom loop has {loop:.5f}")


if __name__ == "__main__":
    main()
