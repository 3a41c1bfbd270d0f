"""What a run costs before anything is computed, and what each tensor adds: where the time of a step goes.

Models whose computation is next to nothing: an empty step, one small layer, stacks of small layers, and the lists of
tensors of ResNet-50 and of a transformer of 12 layers at small widths. Under plain torch, strategies and DDP, each in
processes of its own, in turns; then the parts of a step of MirroredStrategy.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence

from rich.console import Console

from benchmarks.contender import STEPS_IN_A_CALL
from benchmarks.measure import RESULTS
from benchmarks.processes import CommandFailed
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show
from benchmarks.training import SINGLE, Figures, Program, step_s

MODELS = ("empty", "linear", "stack10", "stack100", "stack500", "resnet50", "encoder12")
PROGRAMS = (
    SINGLE,
    Program("one_device", 1),
    *(Program(name, 2) for name in ("ddp", "stratagem", "several_steps", "central", "parameter_server", "workers")),
    Program("ddp", 4),
    Program("stratagem", 4),
)
_WORDS = {
    "single": "plain torch",
    "one_device": "OneDeviceStrategy",
    "ddp": "DDP",
    "stratagem": "MirroredStrategy",
    "several_steps": f"the same, num_steps={STEPS_IN_A_CALL}",
    "central": "CentralStorageStrategy",
    "parameter_server": "ParameterServerStrategy",
    "workers": "MultiWorkerMirroredStrategy",
}
_OVER_DDP = 1.3
_EMPTY_MS = {"stratagem": 0.3, "several_steps": 0.1}

Measured = dict[tuple[str, Program], list[Figures]]


def measure(models: Sequence[str], num_rounds: int, console: Console) -> Measured:
    """Runs every program with every model once a round, in turns; DDP takes no model without parameters."""
    measured: Measured = {
        (model, program): []
        for model in models
        for program in PROGRAMS
        if (model, program.contender) != ("empty", "ddp")
    }
    for number in range(num_rounds):
        for model, program in measured if number % 2 == 0 else reversed(measured):
            try:
                measured[model, program].append(program.measure(model))
            except CommandFailed as error:
                console.print(f"{model}, {program}: {error}", style="red", markup=False)
        console.print(f"[dim]round {number + 1} of {num_rounds}[/]")
    return measured


def rows(measured: Measured, models: Sequence[str]) -> list[list[str]]:
    """Milliseconds of a step, and of processor time in it."""
    found = []
    for program in PROGRAMS:
        cells = []
        for model in models:
            own = measured.get((model, program), [])
            wall, used = ([1000 * of(each) for each in own] for of in (step_s, lambda each: each["processor_s"]))
            cells.append(f"{statistics.median(wall):.2f} / {statistics.median(used):.2f}" if own else "")
        found.append([f"{_WORDS[program.contender]} {program.num_replicas}", *cells])
    return found


def targets(measured: Measured, models: Sequence[str]) -> list[Target]:
    """The ratios that are to be reached."""
    found = []
    for contender, bound in _EMPTY_MS.items():
        own = [1000 * step_s(each) for each in measured.get(("empty", Program(contender, 2)), [])]
        if own:
            what = f"ms of an empty step, {_WORDS[contender]}"
            found.append(Target(what, statistics.median(own), bound, at_most=True, spread=(min(own), max(own))))
    for size in (2, 4):
        for model in models:
            pair = [measured.get((model, Program(name, size)), []) for name in ("ddp", "stratagem")]
            ratios = [step_s(theirs) / step_s(own) for theirs, own in zip(*pair, strict=False)]
            if ratios:
                bound = _OVER_DDP if size == 2 and model.startswith("stack") else None
                spread = min(ratios), max(ratios)
                found.append(
                    Target(f"{model} over DDP, {size} replicas", statistics.median(ratios), bound, spread=spread)
                )
    return found


def parts(models: Sequence[str]) -> list[list[str]]:
    """Milliseconds of each part of a step of MirroredStrategy with 2 replicas; clocks make it a little longer."""
    os.environ["BENCHMARK_PARTS"] = "1"
    try:
        of_models = [Program("stratagem", 2).measure(model)["parts_s"] for model in models]
    finally:
        del os.environ["BENCHMARK_PARTS"]
    return [[part, *(f"{1000 * each[part]:.3f}" for each in of_models)] for part in of_models[0]]


def main() -> None:
    """Measures, prints the tables, writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    models = options.models.split(",")
    console = Console(width=130)
    measured = measure(models, options.rounds, console)
    tables = {
        "ms of a step / of processor time in it": (("program", *models), rows(measured, models)),
        "ms of the parts of a step, MirroredStrategy 2": (("part", *models), parts(models)),
        "stratagem against DDP": (TARGET_COLUMNS, [each.cells() for each in targets(measured, models)]),
    }
    for title, (columns, cells) in tables.items():
        show(title, columns, cells)
    RESULTS.mkdir(exist_ok=True)
    text = [f"## {title}\n\n{markdown(columns, cells)}" for title, (columns, cells) in tables.items()]
    (RESULTS / "run_cost.md").write_text("\n".join(text))
    figures = {f"{model}, {program}": found for (model, program), found in measured.items()}
    judged = [each.as_json() for each in targets(measured, models)]
    (RESULTS / "run_cost.json").write_text(json.dumps({"rounds": figures, "targets": judged}, indent=2))


if __name__ == "__main__":
    main()
