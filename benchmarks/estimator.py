"""Compares `Estimator.train` under MirroredStrategy with the custom loop of the same model, and judges the target.

Programs measure in turns, model by model. What is timed is a step with all that goes with it: the next batch, the run,
the loss of the custom loop, the hooks of the Estimator.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import stratagem as sg
from benchmarks import turns
from benchmarks.contender import NUM_WARM_UP, build, make_optimizer, train_step
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS, Workload
from benchmarks.tables import TARGET_COLUMNS, Target, ratio_of, show
from benchmarks.training import environment

_MODELS = ("mlp", "cnn")
_NUM_REPLICAS = 2
_TARGET = 0.95
_LOSS_TOLERANCE = 1e-3
_PROGRAMS = ("custom loop", "Estimator")
Figures = dict[str, float]
Measured = dict[tuple[str, str], list[Figures]]

_COLUMNS = ("model", "program", "examples/s", "step ms (rounds)", "x custom loop", "loss")


class Clock:
    """Takes the time between the ends of steps, round by round; the first step of a round does not count."""

    def __init__(self, workload: Workload) -> None:
        self._num_steps = workload.num_steps
        self._turns = turns.rounds()
        self._answer: Callable[[Figures], None] | None = None
        self._moments: list[float] = []
        self.num_steps = NUM_WARM_UP + turns.num_rounds() * (self._num_steps + 1)

    def step_ended(self, loss: float) -> None:
        """After every step."""
        self._moments.append(time.perf_counter())
        if self._answer is None and len(self._moments) == NUM_WARM_UP:
            self._next_round()
        elif self._answer is not None and len(self._moments) == self._num_steps + 1:
            seconds = [after - before for before, after in itertools.pairwise(self._moments)]
            self._answer({"step_s": statistics.median(seconds), "loss": loss})
            self._next_round()

    def _next_round(self) -> None:
        self._answer = next(self._turns, None)
        self._moments = []


def custom_loop(workload: Workload, strategy: sg.Strategy, clock: Clock) -> None:
    """The loop of the README."""
    with strategy.scope():
        model, optimizer = build(workload)

    step = train_step(workload, model, optimizer)
    for batch in strategy.distribute(_batches(workload, clock.num_steps)):
        clock.step_ended(strategy.reduce("mean", strategy.run(step, args=batch)).item())


def estimator(workload: Workload, strategy: sg.Strategy, clock: Clock) -> None:
    """The same training by an Estimator as it is by default: with its log, summaries and checkpoints."""

    def model_fn(mode: str) -> sg.estimator.EstimatorSpec:
        model = workload.make_model()
        loss = torch.nn.functional.cross_entropy
        return sg.estimator.EstimatorSpec(mode, model, loss, optimizer=make_optimizer(model))

    class Steps(sg.estimator.SessionRunHook):
        def after_run(self, run_context: sg.estimator.RunContext, run_values: sg.estimator.RunValues) -> None:
            clock.step_ended(run_values.loss)

    with tempfile.TemporaryDirectory() as folder:
        config = sg.estimator.RunConfig(random_seed=0, train_distribute=strategy)
        made = sg.estimator.Estimator(model_fn, folder, config)
        made.train(lambda: _batches(workload, clock.num_steps), hooks=[Steps()])


def _batches(workload: Workload, num_steps: int) -> Iterator[Any]:
    torch.manual_seed(1)
    batch = workload.make_batch()
    return (batch for _ in range(num_steps))


def run_one(program: str, model: str) -> None:
    """Measures here and now, whenever it is its turn."""
    workload = WORKLOADS[model]
    share = sg.config.LogicalDeviceConfiguration()
    sg.config.set_logical_device_configuration("cpu:0", [share] * _NUM_REPLICAS)
    train = {"custom loop": custom_loop, "Estimator": estimator}[program]
    with sg.MirroredStrategy() as strategy:
        train(workload, strategy, Clock(workload))


def measure(model: str, num_rounds: int) -> dict[tuple[str, str], list[Figures]]:
    """The figures of all rounds of one model, by program."""
    command = [sys.executable, "-m", "benchmarks.estimator", "--models", model, "--one"]
    commands = {(model, program): [*command, program] for program in _PROGRAMS}
    return turns.take_turns(commands, num_rounds, environment())


def _median_s(figures: Measured, model: str, program: str) -> float:
    return statistics.median(each["step_s"] for each in figures[model, program])


def _rows(figures: Measured) -> list[list[str]]:
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


def _target(figures: Measured, model: str) -> Target:
    """How many examples per second the Estimator has, over those of the loop."""
    loop, own = ([each["step_s"] for each in figures[model, program]] for program in _PROGRAMS)
    return ratio_of(f"examples/s of the custom loop, {model}, {_NUM_REPLICAS} replicas", loop, own, _TARGET)


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
    figures = {key: found for model in models for key, found in measure(model, options.rounds).items()}
    rows, targets = _rows(figures), [_target(figures, model) for model in models]
    show("Estimator and custom loop", _COLUMNS, rows, num_left=2)
    show("Estimator against the custom loop", TARGET_COLUMNS, [target.cells() for target in targets])
    RESULTS.mkdir(exist_ok=True)
    measured = {model: {program: figures[model, program] for program in _PROGRAMS} for model in models}
    content = {"num_rounds": options.rounds, "measured": measured, "targets": [each.as_json() for each in targets]}
    (RESULTS / "estimator.json").write_text(json.dumps(content, indent=2))
    for model in models:
        loop, own = (figures[model, program][-1]["loss"] for program in _PROGRAMS)
        if abs(loop - own) > _LOSS_TOLERANCE * max(1.0, abs(loop)):
            sys.exit(f"{model}: the Estimator has loss {own:.5f} where the custom loop has {loop:.5f}")


if __name__ == "__main__":
    main()
