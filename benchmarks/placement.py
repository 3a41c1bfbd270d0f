"""Compares a training step inside a device scope, with and without the placement log, with plain torch.

All run in one process and take turns step by step; a ratio is that of the median steps of a round. The
last ratio is a control: plain torch after a scope, compared with plain torch. What it is off 1 is what the machine adds
to all of them. On a busy machine use --processor-time: one thread, and only the time that this process computed.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable

import torch

import stratagem as sg
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS, Workload
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show

_DEVICE = "/gpu:1"
_BOUNDS = {"in a scope": 1.10, "in a scope, with the log": 1.5, "after a scope (control)": 1.03}
_SECONDS_PER_ROUND = 1.0

Scope = Callable[[], contextlib.AbstractContextManager[object]]
Clock = Callable[[], float]


def make_step(workload: Workload, scope: Scope) -> Callable[[], None]:
    """One step of training, whose model and data are made in a scope."""
    with scope():
        torch.manual_seed(0)
        model = workload.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs, targets = workload.make_batch()

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, inputs, targets).backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], clock: Clock) -> float:
    """How long one call takes."""
    start = clock()
    step()
    return clock() - start


def measure(workload: Workload, num_rounds: int, clock: Clock) -> dict[str, list[float]]:
    """The seconds of a step of each contender, round by round."""
    placed = make_step(workload, lambda: sg.device(_DEVICE))

    def in_scope() -> None:
        with sg.device(_DEVICE):
            placed()

    def logged() -> None:
        with sg.log_placement(), sg.device(_DEVICE):
            placed()

    plain = make_step(workload, contextlib.nullcontext)
    seconds = take_turns(
        {"plain torch": plain, "in a scope": in_scope, "in a scope, with the log": logged}, num_rounds, clock
    )
    return seconds | measure_after(plain, num_rounds, clock)


def measure_after(plain: Callable[[], None], num_rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Plain steps, and plain steps right after a scope whose tensors are gone; only the steps count."""
    scope = sg.device(_DEVICE)(lambda: None)
    ahead = {"plain torch, again": lambda: None, "after a scope (control)": scope}
    return take_turns(dict.fromkeys(ahead, plain), num_rounds, clock, ahead)


def take_turns(
    steps: dict[str, Callable[[], None]],
    num_rounds: int,
    clock: Clock,
    ahead: dict[str, Callable[[], None]] | None = None,
) -> dict[str, list[float]]:
    """The median step of each contender in each round; they take turns step by step, in changing order."""
    num_steps = max(4, int(_SECONDS_PER_ROUND / sum(seconds_of(step, clock) for step in steps.values())))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_rounds):
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(num_steps):
            for name in list(steps) if number % 2 else list(reversed(steps)):
                if ahead:
                    ahead[name]()
                taken[name].append(seconds_of(steps[name], clock))
        for name, values in taken.items():
            seconds[name].append(statistics.median(values))
    return seconds


def main() -> None:
    """Prints the table and writes it under `results/`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"], choices=list(WORKLOADS))
    parser.add_argument("--processor-time", action="store_true", help="one thread, and only the time that it computed")
    options = parser.parse_args()
    if options.processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if options.processor_time else time.perf_counter
    sg.config.simulate_devices("GPU", 2)
    targets, figures = [], {}
    for name in options.models:
        seconds = figures[name] = measure(WORKLOADS[name], options.rounds, clock)
        for what, bound in _BOUNDS.items():
            reference = "plain torch, again" if what.startswith("after") else "plain torch"
            ratios = [value / base for value, base in zip(seconds[what], seconds[reference], strict=True)]
            spread = min(ratios), max(ratios)
            targets.append(Target(f"{name}: step {what}", statistics.median(ratios), bound, True, spread))
    rows = [target.cells() for target in targets]
    show("Placement: time of a training step, of plain torch's", TARGET_COLUMNS, rows)
    RESULTS.mkdir(exist_ok=True)
    report = {"seconds": figures, "targets": [target.as_json() for target in targets]}
    (RESULTS / "placement.json").write_text(json.dumps(report, indent=2))
    (RESULTS / "placement.md").write_text(markdown(TARGET_COLUMNS, rows))


if __name__ == "__main__":
    main()
