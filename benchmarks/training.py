"""Compares training speed, start-up and memory with plain torch, DDP and Hogwild, and judges the targets.

Every run is a command of its own (`contender`), started in turns: round by round, model by model, the
order turned around every other round.
"""

import argparse
import dataclasses
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import training_plot
from benchmarks.contender import PREFIX, Figures
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.processes import CommandFailed, run
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show

NUM_WORKERS = 2

_TIMEOUT_S = 180.0
_LOSS_TOLERANCE = 1e-3
_WITH_STATISTICS = ("resnet50",)

# The targets, for 2 cores. Against DDP by model and number of replicas; nowhere below 1.
_AGAINST_DDP = {("mlp", 2): 1.3, ("mlp", 4): 1.5, ("wide", 2): 1.5, ("transformer", 2): 1.12, ("cnn", 2): 1.05}
_AGAINST_SINGLE = {"mlp": 0.9, "cnn": 1.0, "transformer": 0.97}
_AGAINST_HOGWILD = {"wide": 0.85}
_MEMORY_AGAINST_DDP = {("wide", 4): 0.75}
_START_UP_AGAINST_DDP = {2: 1.0}


@dataclasses.dataclass(frozen=True, order=True)
class Program:
    """A contender with its number of replicas."""

    contender: str
    num_replicas: int

    def __str__(self) -> str:
        return f"{self.contender} {self.num_replicas}" if self.contender != "single" else self.contender

    def command(self, model: str) -> list[str]:
        """What is started for one measurement."""
        launcher = []
        if self.contender == "ddp":
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_replicas}"]
        if self.contender in ("workers", "workers_bf16", "local_sgd"):
            devices = f"cpu:{self.num_replicas // NUM_WORKERS}"
            launcher = ["-m", "stratagem", "run", "--workers", str(NUM_WORKERS), "--devices", devices]
        replicas = ["--replicas", str(self.num_replicas)]
        return [sys.executable, *launcher, "-m", "benchmarks.contender", self.contender, model, *replicas]

    def measure(self, model: str) -> Figures:
        """Runs it once.

        Raises:
            CommandFailed: It has no figures to show.
        """
        left_out = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "BENCHMARK_STARTED")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        started = {"BENCHMARK_STARTED": repr(time.time())}
        output = run(self.command(model), environment=environment | started, timeout_s=_TIMEOUT_S)
        lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
        if not lines:
            raise CommandFailed(f"no figures\n{output[-3000:]}")
        figures: Figures = json.loads(lines[0].removeprefix(PREFIX))
        return figures


SINGLE = Program("single", 1)


class Results:
    """All figures so far, and what follows from them."""

    name, title = "training", "Training"

    def __init__(self, plan: dict[str, list[Program]], sizes: Sequence[int]) -> None:
        self.plan = plan
        self.sizes = sizes
        # One for each round; `None` where a run failed.
        self.figures: dict[tuple[str, Program], list[Figures | None]] = {
            (model, program): [] for model, programs in plan.items() for program in programs
        }

    def values(self, model: str, program: Program, of: Callable[[Figures], float]) -> list[float]:
        """A quantity in every round that has it."""
        return [of(each) for each in self.figures.get((model, program), []) if each is not None]

    def median(self, model: str, program: Program, of: Callable[[Figures], float]) -> float | None:
        """A quantity, its median over the rounds."""
        values = self.values(model, program, of)
        return statistics.median(values) if values else None

    def examples_per_s(self, model: str, program: Program) -> float | None:
        """From the median of the rounds' median steps."""
        seconds = self.median(model, program, step_s)
        return None if seconds is None else _batch_size(model) / seconds

    def ratio(self, model: str, programs: tuple[Program, Program], of: Callable[[Figures], float]) -> float | None:
        """One program's median over another's."""
        first, second = (self.median(model, program, of) for program in programs)
        return None if first is None or second is None else first / second

    def spread(
        self, model: str, programs: tuple[Program, Program], of: Callable[[Figures], float]
    ) -> tuple[float, float] | None:
        """The least and the greatest ratio of two programs within one round."""
        pairs = zip(*(self.figures.get((model, program), []) for program in programs), strict=False)
        ratios = [of(first) / of(second) for first, second in pairs if first is not None and second is not None]
        return (min(ratios), max(ratios)) if ratios else None

    def targets(self) -> list[Target]:
        """Every ratio of interest, with what it should be."""
        return [*self._speed_targets(), *self._other_targets()]

    def _speed_targets(self) -> Iterator[Target]:
        for size in self.sizes:
            for model in self.plan:
                bound = _AGAINST_DDP.get((model, size), 1.0)
                yield self._target(f"examples/s of DDP, {model}, {size} replicas", model, size, "ddp", speed, bound)
        for model in self.plan if 2 in self.sizes else ():
            bound = _AGAINST_SINGLE.get(model)
            yield self._target(f"examples/s of one process, {model}, 2 replicas", model, 2, "single", speed, bound)
        for model, bound in _AGAINST_HOGWILD.items():
            if (model, Program("hogwild", 2)) in self.figures:
                yield self._target(f"examples/s of Hogwild, {model}, 2 replicas", model, 2, "hogwild", speed, bound)

    def _other_targets(self) -> Iterator[Target]:
        for size in self.sizes:
            for model in self.plan:
                bound = _START_UP_AGAINST_DDP.get(size)
                what = f"start-up of torchrun + DDP, {model}, {size} replicas"
                yield self._target(what, model, size, "ddp", first_step_s, bound, at_most=True)
        for size in self.sizes:
            for model in self.plan:
                bound = _MEMORY_AGAINST_DDP.get((model, size))
                what = f"memory (PSS) of DDP, {model}, {size} replicas"
                yield self._target(what, model, size, "ddp", pss_mb, bound, at_most=True)

    def _target(
        self,
        what: str,
        model: str,
        size: int,
        against: str,
        of: Callable[[Figures], float],
        bound: float | None,
        *,
        at_most: bool = False,
    ) -> Target:
        other = SINGLE if against == "single" else Program(against, size)
        programs = (Program("stratagem", size), other)
        return Target(what, self.ratio(model, programs, of), bound, at_most, self.spread(model, programs, of))

    def wrong_losses(self) -> list[str]:
        """Synchronous programs that did not train as one process does: their speed means nothing."""
        wrong = []
        for model, program in self.figures:
            # Batch normalization that is not synchronized has the statistics of a replica's rows, as with DDP.
            like = Program("ddp", program.num_replicas) if model in _WITH_STATISTICS and program != SINGLE else SINGLE
            expected, found = (self.median(model, each, lambda figures: figures["loss"]) for each in (like, program))
            if program.contender == "hogwild" or expected is None or found is None:
                continue
            if abs(found - expected) > _LOSS_TOLERANCE * max(1.0, abs(expected)):
                wrong.append(f"{model}, {program}: loss {found:.5f} where {like} has {expected:.5f}")
        return wrong

    def rows(self) -> list[list[str]]:
        """The table of all programs."""
        rows = []
        for model, program in self.figures:
            seconds = self.values(model, program, step_s)
            if not seconds:
                rows.append([model, program.contender, str(program.num_replicas), "failed", *[""] * 6])
                continue
            ddp = Program("ddp", program.num_replicas)
            of_ddp = self.ratio(model, (program, ddp), speed)
            of_single = self.ratio(model, (program, SINGLE), speed)
            rows.append(
                [
                    model,
                    program.contender,
                    str(program.num_replicas),
                    f"{self.examples_per_s(model, program):.1f}",
                    f"{1000 * statistics.median(seconds):.1f} ({1000 * min(seconds):.1f}..{1000 * max(seconds):.1f})",
                    "" if of_ddp is None else f"{of_ddp:.2f}",
                    "" if of_single is None else f"{of_single:.2f}",
                    f"{self.median(model, program, first_step_s):.1f}",
                    f"{self.median(model, program, pss_mb):.0f}",
                    f"{self.median(model, program, lambda figures: figures['loss']):.4f}",
                ]
            )
        return rows

    def as_json(self) -> dict[str, Any]:
        """Everything, for later."""
        measured: dict[str, dict[str, Any]] = {model: {} for model in self.plan}
        for (model, program), figures in self.figures.items():
            measured[model][str(program)] = {
                "step_s": self.median(model, program, step_s),
                "examples_per_s": self.examples_per_s(model, program),
                "first_step_s": self.median(model, program, first_step_s),
                "pss_mb": self.median(model, program, pss_mb),
                "rounds": figures,
            }
        targets = [target.as_json() for target in self.targets()]
        return {"environment": _environment(), "measured": measured, "targets": targets}


COLUMNS = ("model", "program", "replicas", "examples/s", "step ms (rounds)", "x DDP", "x single")
COLUMNS += ("start-up s", "PSS MB", "loss")


def step_s(figures: Figures) -> float:
    """The median step of one run."""
    return statistics.median(figures["seconds"])


def speed(figures: Figures) -> float:
    """Steps per second; a ratio of these is a ratio of examples per second, since all have the same batch."""
    return 1 / step_s(figures)


def first_step_s(figures: Figures) -> float:
    """From the start of the command to the end of the first step."""
    return float(figures["first_step_s"])


def pss_mb(figures: Figures) -> float:
    """The memory of all processes."""
    return float(figures["pss_mb"])


def loopback_mb(figures: Figures) -> float:
    """What all processes of this machine sent to each other in a step."""
    return float(figures["loopback_mb"])


def _batch_size(model: str) -> int:
    return len(WORKLOADS[model].make_batch()[0])


def _environment() -> dict[str, object]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": names[0].partition(": ")[2] if names else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def make_plan(models: Sequence[str], sizes: Sequence[int]) -> dict[str, list[Program]]:
    """What to run for each model."""
    plan = {}
    for model in models:
        plan[model] = [SINGLE]
        for size in sizes:
            plan[model] += [Program("ddp", size), Program("stratagem", size)]
            if size == 2 and model in _AGAINST_HOGWILD:
                plan[model].append(Program("hogwild", size))
    return plan


def measure_all(results: Results, num_rounds: int, console: Console) -> int:
    """Runs the plan; returns how many runs failed. Results are written after every round."""
    num_failed = 0
    num_runs = num_rounds * len(results.figures)
    done = 0
    for round_number in range(num_rounds):
        for model, programs in results.plan.items():
            for program in programs if round_number % 2 == 0 else reversed(programs):
                done += 1
                console.print(f"[dim]{done}/{num_runs}  round {round_number + 1}  {model}  {program}[/]")
                try:
                    figures = program.measure(model)
                except CommandFailed as error:
                    num_failed += 1
                    figures = None
                    console.print(f"{model}, {program}: {error}", style="red", markup=False)
                results.figures[model, program].append(figures)
        write(results, round_number + 1)
    return num_failed


def write(results: Results, num_rounds: int) -> None:
    """Writes what is known so far: JSON, markdown and picture."""
    RESULTS.mkdir(exist_ok=True)
    content = {"num_rounds": num_rounds, **results.as_json()}
    (RESULTS / f"{results.name}.json").write_text(json.dumps(content, indent=2))
    environment = _environment()
    note = (
        f"Medians of {num_rounds} interleaved round(s) on {environment['cores']} cores ({environment['cpu']}), "
        f"torch {environment['torch']}. x DDP: examples per second over those of DDP with as many replicas; "
        f"x single: over those of one process on all cores. Memory is that of all processes, launchers included."
    )
    parts = [
        f"# {results.title}\n\n{note}\n",
        markdown(COLUMNS, results.rows(), num_left=2),
        "## Targets\n\nstratagem over the program that is named; `rounds` is the least and the most of one round.\n",
        markdown(TARGET_COLUMNS, [target.cells() for target in results.targets()]),
    ]
    (RESULTS / f"{results.name}.md").write_text("\n".join(parts))
    if type(results) is Results:
        training_plot.draw(content, RESULTS / "training.png")


def main() -> None:
    """Measures, prints the tables, writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(("mlp", "cnn", "transformer", "wide")))
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    models, sizes = options.models.split(","), [int(size) for size in options.replicas.split(",")]
    if unknown := [model for model in models if model not in WORKLOADS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if min(sizes) < 2 or options.rounds < 1:
        parser.error("at least 2 replicas and 1 round are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no run is left behind
    console = Console(width=130)
    # The first import after a change compiles, and reads from the disk; that is nobody's start-up.
    warm_up = "import torch.distributed.run, torch._dynamo, stratagem"
    run([sys.executable, "-c", warm_up], environment=os.environ, timeout_s=_TIMEOUT_S)

    run_and_report(Results(make_plan(models, sizes), sizes), options.rounds, console)


def run_and_report(results: Results, num_rounds: int, console: Console) -> None:
    """Measures all of it, and says whether the targets are met."""
    num_failed = measure_all(results, num_rounds, console)
    show(results.title.lower(), COLUMNS, results.rows(), num_left=2)
    targets = results.targets()
    show("stratagem against the others", TARGET_COLUMNS, [target.cells() for target in targets])
    num_met, num_bounds = sum(target.met is True for target in targets), sum(t.bound is not None for t in targets)
    console.print(f"{num_met} of {num_bounds} targets met; figures in {RESULTS}/{results.name}.json and .md")
    wrong = results.wrong_losses()
    for each in wrong:
        console.print(each, style="red", markup=False)
    if num_failed or wrong:
        sys.exit(f"{num_failed} run(s) failed, {len(wrong)} program(s) trained wrongly")


if __name__ == "__main__":
    main()
