"""What a run costs before anything is computed, and what each tensor adds: where the time of a step goes.

Models whose computation is next to nothing: an empty step, one small layer, stacks of small layers, and the lists of
tensors of ResNet-50 and of a transformer of 12 layers at small widths. Under plain torch, strategies and DDP, in turns;
then the parts of a step of MirroredStrategy.
"""

import json
import os
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console

from benchmarks.contender import STEPS_IN_A_CALL
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.tables import TARGET_COLUMNS, Target, show
from benchmarks.training import (
    SINGLE,
    Contest,
    Measured,
    Program,
    machine,
    measure_contests,
    parse,
    ratio,
    speed,
    step_s,
)

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
_PARTS = "ms of the parts of a step, MirroredStrategy 2"
_OVER_DDP = 1.3
_EMPTY_MS = {Program("stratagem", 2): 0.3, Program("several_steps", 2): 0.1}


def contests(models: Sequence[str]) -> Iterator[Contest]:
    """All programs with each model; DDP takes no model without parameters."""
    for model in models:
        yield model, [each for each in PROGRAMS if (model, each.contender) != ("empty", "ddp")]


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
    for (model, program), figures in measured.items():
        own = [1000 * step_s(each) for each in figures]
        what = f"ms of a step, {model}, {_WORDS[program.contender]} {program.num_replicas}"
        bound = _EMPTY_MS.get(program) if model == "empty" else None
        found.append(Target(what, statistics.median(own), bound, at_most=True, spread=(min(own), max(own))))
    for size in (2, 4):
        for model in models:
            if (model, Program("ddp", size)) in measured:
                programs = Program("stratagem", size), Program("ddp", size)
                bound = _OVER_DDP if size == 2 and model.startswith("stack") else None
                found.append(ratio(f"{model} over DDP, {size} replicas", measured, model, programs, speed, bound))
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
    options = parse(__doc__ or "", MODELS, WORKLOADS)
    models = options.models
    measured = measure_contests(contests(models), options.rounds, Console(width=130))
    tables = {
        "ms of a step / of processor time in it": (("program", *models), rows(measured, models)),
        _PARTS: (("part", *models), parts(models)),
        "stratagem against DDP": (TARGET_COLUMNS, [each.cells() for each in targets(measured, models)]),
    }
    for title, (columns, cells) in tables.items():
        show(title, columns, cells)
    RESULTS.mkdir(exist_ok=True)
    figures = {f"{model}, {program}": found for (model, program), found in measured.items()}
    content = {"num_rounds": options.rounds, "environment": machine(), "measured": figures}
    content |= {"parts_ms": tables[_PARTS][1], "targets": [each.as_json() for each in targets(measured, models)]}
    (RESULTS / "run_cost.json").write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
