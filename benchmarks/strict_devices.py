"""Measures what strict devices cost: the time of a training step on one, over that of the same step on the CPU.

Each contender is a process of its own, as strict devices last for the life of one, and they take turns. A ratio is
that of the medians of all rounds; `one number` is the smallest operation there is.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import stratagem as sg
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.tables import markdown, show

_ONE_NUMBER = "one number plus one"
_SECONDS_EACH = 1.0
_COLUMNS = ["step", "CPU, ms", "strict device, ms", "ratio"]


def measured(device: str, models: list[str]) -> dict[str, float]:
    """The median seconds of a step of each model on a device."""
    found = {name: _median(_step_of(name, device)) for name in models}
    number = torch.ones(1, device=device)
    return {**found, _ONE_NUMBER: _median(lambda: number.add_(1))}


def _step_of(name: str, device: str) -> Callable[[], object]:
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = (each.to(device) for each in workload.make_batch())

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, inputs, targets).backward()
        optimizer.step()

    return step


def _median(step: Callable[[], object]) -> float:
    for _ in range(2):
        step()
    taken: list[float] = []
    end = time.perf_counter() + _SECONDS_EACH
    while time.perf_counter() < end or len(taken) < 3:
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """Prints the table and writes it under `results/`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer", "stack100"])
    parser.add_argument("--measure", choices=["cpu", "gpu:0"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        if options.measure != "cpu":
            sg.config.simulate_devices("GPU", 1, strict=True)
        print(json.dumps(measured(options.measure, options.models)))
        return
    seconds: dict[str, dict[str, list[float]]] = {"cpu": {}, "gpu:0": {}}
    for _ in range(options.rounds):
        for device, all_found in seconds.items():
            command = [sys.executable, "-m", "benchmarks.strict_devices", "--measure", device, "--models"]
            done = subprocess.run([*command, *options.models], stdout=subprocess.PIPE, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                all_found.setdefault(name, []).append(value)
    rows = []
    for name in seconds["cpu"]:
        cpu, strict = (statistics.median(seconds[device][name]) for device in seconds)
        rows.append([name, f"{1000 * cpu:.3g}", f"{1000 * strict:.3g}", f"{strict / cpu:.2g}"])
    show("Strict devices: time of a training step, of the CPU's", _COLUMNS, rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "strict_devices.json").write_text(json.dumps(seconds, indent=2))
    (RESULTS / "strict_devices.md").write_text(markdown(_COLUMNS, rows))


if __name__ == "__main__":
    main()
