"""Compares training speed, start-up and memory with plain torch and DDP, and judges the targets.

Programs (`contender`) measure their steps in turns, model by model. Start-up and memory are those of a program that is
alone on the machine, started in turns too.
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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.contender import PREFIX, Figures
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.processes import CommandFailed, run
from benchmarks.tables import TARGET_COLUMNS, Target, ratio_of, show
from benchmarks.turns import take_turns

NUM_WORKERS = 2

_TIMEOUT_S = 180.0
_LOSS_TOLERANCE, _BF16_TOLERANCE = 1e-3, 2e-2
_WITH_STATISTICS = ("resnet50",)

# The targets, for 2 cores. Against DDP by model and number of replicas; nowhere below 1.
_AGAINST_DDP = {("mlp", 2): 1.4, ("mlp", 4): 1.5, ("wide", 2): 1.5, ("transformer", 2): 1.15, ("cnn", 2): 1.05}
_AGAINST_SINGLE = {"mlp": 0.97, "cnn": 1.0, "transformer": 0.97}
_MEMORY_AGAINST_DDP = {("wide", 4): 0.75}
_START_UP_AGAINST_DDP = {2: 0.6}
_ALONE = ("mlp", "wide")  # of which start-up and memory are taken


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
        if self.contender == "launched":
            launcher = ["-m", "stratagem", "run", "--devices", f"cpu:{self.num_replicas}"]
        if self.contender in ("workers", "workers_bf16", "local_sgd"):
            devices = f"cpu:{self.num_replicas // NUM_WORKERS}"
            launcher = ["-m", "stratagem", "run", "--workers", str(NUM_WORKERS), "--devices", devices]
        replicas = ["--replicas", str(self.num_replicas)]
        return [sys.executable, *launcher, "-m", "benchmarks.contender", self.contender, model, *replicas]

    def measure(self, model: str, changes: Mapping[str, str] | None = None) -> Figures:
        """Runs it once, alone.

        Args:
            model: What it trains.
            changes: What its environment has besides that of all programs.
        Raises:
            CommandFailed: It has no figures to show.
        """
        started = {"BENCHMARK_STARTED": repr(time.time()), **(changes or {})}
        output = run(self.command(model), environment=environment() | started, timeout_s=_TIMEOUT_S)
        lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
        if not lines:
            raise CommandFailed(f"no figures\n{output[-3000:]}")
        figures: Figures = json.loads(lines[0].removeprefix(PREFIX))
        return figures


def environment() -> dict[str, str]:
    """The environment of all programs: nobody's number of threads is set."""
    left_out = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in left_out}


SINGLE = Program("single", 1)


Contest = tuple[str, Sequence[Program]]
"""A model, and the programs that measure it in turns."""

Measured = dict[tuple[str, Program], list[Figures]]
"""The figures of all rounds, by model and program."""


class Results:
    """All figures so far, and what follows from them."""

    name, title = "training", "Training"

    def __init__(self, models: Sequence[str], sizes: Sequence[int]) -> None:
        self.models, self.sizes = models, sizes
        self.steps: Measured = {}
        self.alone: Measured = {}

    def contests(self) -> Iterator[Contest]:
        """Who measures in turns with whom; one process with the fewest replicas only."""
        for model in self.models:
            for size in self.sizes:
                others = [Program("ddp", size), Program("stratagem", size)]
                yield model, [SINGLE, *others] if size == self.sizes[0] else others

    def programs_alone(self) -> list[tuple[str, Program]]:
        """Whose start-up and memory is taken."""
        models = [model for model in self.models if model in _ALONE]
        # By the library's launcher, as DDP by torch's.
        return [(model, Program(name, size)) for model in models for size in self.sizes for name in ("ddp", "launched")]

    def targets(self) -> list[Target]:
        """Every ratio of interest, with what it should be."""
        return [*self._speed_targets(), *self._other_targets()]

    def _speed_targets(self) -> Iterator[Target]:
        for size in self.sizes:
            for model in self.models:
                bound = _AGAINST_DDP.get((model, size), 1.0)
                programs = Program("stratagem", size), Program("ddp", size)
                yield ratio(f"examples/s of DDP, {model}, {size} replicas", self.steps, model, programs, speed, bound)
        for model in self.models if self.sizes[0] == 2 else ():
            programs = Program("stratagem", 2), SINGLE
            bound = _AGAINST_SINGLE.get(model)
            yield ratio(f"examples/s of one process, {model}, 2 replicas", self.steps, model, programs, speed, bound)

    def _other_targets(self) -> Iterator[Target]:
        kinds = (("start-up of torchrun + DDP", first_step_s), ("memory (PSS) of DDP", pss_mb))
        for what, of in kinds:
            for model, program in self.programs_alone():
                if program.contender == "launched":
                    size = program.num_replicas
                    bound = (
                        _START_UP_AGAINST_DDP.get(size)
                        if of is first_step_s
                        else _MEMORY_AGAINST_DDP.get((model, size))
                    )
                    programs = program, Program("ddp", size)
                    yield ratio(
                        f"{what}, {model}, {size} replicas", self.alone, model, programs, of, bound, at_most=True
                    )

    def wrong_losses(self) -> list[str]:
        """Programs that did not train as the first of their contest does: their speed means nothing."""
        wrong = []
        for model, programs in self.contests():
            # Batch normalization that is not synchronized has the statistics of a replica's rows, as with DDP.
            alike = [each for each in programs if each != SINGLE] if model in _WITH_STATISTICS else programs
            losses = [median(self.steps, model, program, lambda figures: figures["loss"]) for program in alike]
            for program, loss in zip(alike, losses, strict=True):
                tolerance = _BF16_TOLERANCE if program.contender.endswith("bf16") else _LOSS_TOLERANCE
                if abs(loss - losses[0]) > tolerance * max(1.0, abs(losses[0])):
                    wrong.append(f"{model}, {program}: loss {loss:.5f} where {alike[0]} has {losses[0]:.5f}")
        return wrong

    def rows(self) -> list[list[str]]:
        """The table of all programs."""
        rows = []
        for model, program in self.steps:
            seconds = [step_s(each) for each in self.steps[model, program]]
            rows.append(
                [
                    model,
                    program.contender,
                    str(program.num_replicas),
                    f"{_batch_size(model) / statistics.median(seconds):.1f}",
                    f"{1000 * statistics.median(seconds):.2f} ({1000 * min(seconds):.2f}..{1000 * max(seconds):.2f})",
                    f"{median(self.steps, model, program, lambda figures: figures['loss']):.4f}",
                ]
            )
        return rows

    def as_json(self) -> dict[str, Any]:
        """Everything, for later."""
        measured = {
            kind: {f"{model}, {program}": figures for (model, program), figures in found.items()}
            for kind, found in (("steps", self.steps), ("alone", self.alone))
        }
        return {"environment": machine(), "measured": measured, "targets": [each.as_json() for each in self.targets()]}


COLUMNS = ("model", "program", "replicas", "examples/s", "step ms (rounds)", "loss")


def ratio(
    what: str,
    measured: Measured,
    model: str,
    programs: tuple[Program, Program],
    of: Callable[[Figures], float],
    bound: float | None = None,
    *,
    at_most: bool = False,
) -> Target:
    """One program's median over another's, with the least and the greatest of one round."""
    own, others = ([of(each) for each in measured.get((model, program), [])] for program in programs)
    return ratio_of(what, own, others, bound, at_most=at_most)


def median(measured: Measured, model: str, program: Program, of: Callable[[Figures], float]) -> float:
    """A quantity, its median over the rounds."""
    return statistics.median(of(each) for each in measured[model, program])


def step_s(figures: Figures) -> float:
    """The median step of one round."""
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


def machine() -> dict[str, object]:
    """Where and with what it was measured."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": names[0].partition(": ")[2] if names else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def measure_contests(contests: Iterable[Contest], num_rounds: int, console: Console) -> Measured:
    """Lets the programs of each contest measure in turns.

    Raises:
        CommandFailed: A program failed.
    """
    measured: Measured = {}
    for model, programs in contests:
        console.print(f"[dim]{model}: {', '.join(map(str, programs))}[/]")
        commands = {program: program.command(model) for program in programs}
        for program, figures in take_turns(commands, num_rounds, environment()).items():
            measured[model, program] = figures
    return measured


def measure_alone(programs: Sequence[tuple[str, Program]], num_rounds: int, console: Console) -> Measured:
    """Starts each program in every round, when no other runs.

    Raises:
        CommandFailed: A program failed.
    """
    measured: Measured = {key: [] for key in programs}
    for number in range(num_rounds):
        console.print(f"[dim]start-up and memory, round {number + 1} of {num_rounds}[/]")
        for model, program in programs if number % 2 == 0 else reversed(programs):
            measured[model, program].append(program.measure(model))
    return measured


def main() -> None:
    """Measures, prints the tables, writes the files."""
    options = parse(__doc__ or "", ("mlp", "cnn", "transformer", "wide"), WORKLOADS)
    # The first import after a change compiles, and reads from the disk; that is nobody's start-up.
    warm_up = "import torch.distributed.run, torch._dynamo, stratagem"
    run([sys.executable, "-c", warm_up], environment=os.environ, timeout_s=_TIMEOUT_S)
    run_and_report(Results(options.models, options.replicas), options.rounds)


def parse(description: str, models: Sequence[str], known: Container[str]) -> argparse.Namespace:
    """What the command line asks for."""

    def listed(text: str) -> list[str]:
        if unknown := [model for model in text.split(",") if model not in known]:
            raise argparse.ArgumentTypeError(f"no model {', '.join(unknown)}; there are {', '.join(known)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", type=listed, default=list(models), help="their names, with commas between them")
    parser.add_argument("--replicas", type=lambda text: [int(size) for size in text.split(",")], default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if min(options.replicas) < 2 or options.rounds < 1:
        parser.error("at least 2 replicas and 1 round are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no run is left behind
    return options


def run_and_report(results: Results, num_rounds: int) -> None:
    """Measures all of it, writes it down, and says whether the targets are met."""
    console = Console(width=130)
    results.steps = measure_contests(results.contests(), num_rounds, console)
    results.alone = measure_alone(results.programs_alone(), num_rounds, console)
    targets = results.targets()
    show(results.title.lower(), COLUMNS, results.rows(), num_left=2)
    show("stratagem against the others", TARGET_COLUMNS, [target.cells() for target in targets])
    num_met, num_bounds = sum(target.met is True for target in targets), sum(t.bound is not None for t in targets)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{results.name}.json"
    path.write_text(json.dumps({"num_rounds": num_rounds, **results.as_json()}, indent=2))
    console.print(f"{num_met} of {num_bounds} targets met; figures in {path}")
    if wrong := results.wrong_losses():
        sys.exit("programs trained wrongly:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
