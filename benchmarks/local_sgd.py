"""Compares local SGD with summed gradients: speed and bytes between two workers, and the loss after the same samples.

Speed and bytes are those of two workers on loopback; what crosses it is counted by the kernel. The loss is that of the
digits, with as many samples for everyone.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import stratagem as sg
from benchmarks.contender import SYNC_EVERY
from benchmarks.measure import RESULTS
from benchmarks.tables import show
from benchmarks.training import Measured, Program, loopback_mb, measure_contests, median, ratio, speed

PROGRAMS = (Program("workers", 2), Program("local_sgd", 2))
_WHAT = "steps/s of summed gradients, 2 workers of 1"
_DIGITS = Path(__file__).parents[1] / "examples" / "data" / "digits.npz"


def measure(model: str, num_rounds: int) -> Measured:
    """Two workers with one replica each, in turns."""
    return measure_contests([(model, PROGRAMS)], num_rounds, Console(width=130))


def rows(model: str, measured: Measured) -> list[list[str]]:
    """Steps per second, and megabytes on loopback in a step."""
    found = []
    for program in PROGRAMS:
        rate, sent_mb = (median(measured, model, program, of) for of in (speed, loopback_mb))
        of_summed = ratio(_WHAT, measured, model, (program, PROGRAMS[0]), speed)
        found.append([program.contender, f"{rate:.2f}", *of_summed.cells()[1:3], f"{sent_mb:.1f}"])
    return found


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The digits that the examples train on."""
    with np.load(_DIGITS) as data:
        images = torch.as_tensor(data["images"], dtype=torch.float32).flatten(1)
        return images / images.max(), torch.as_tensor(data["labels"], dtype=torch.int64)


def final_loss(strategy: sg.Strategy, epochs: int) -> float:
    """The loss over all digits after some epochs."""
    inputs, labels = digits()
    torch.manual_seed(0)
    with strategy, strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(inputs.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(epochs):
            for batch in strategy.distribute((inputs, labels), global_batch_size=64, shuffle=True):
                strategy.run(step, args=batch)
        strategy.synchronize()
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(inputs), labels))


def diloco(parameters: Any) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def compare_losses(epochs: int) -> list[tuple[str, str]]:
    """The loss after the same samples, by strategy."""
    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
    strategies: dict[str, Callable[[], sg.Strategy]] = {
        "MirroredStrategy": sg.MirroredStrategy,
        f"LocalSGDStrategy({SYNC_EVERY})": lambda: sg.LocalSGDStrategy(SYNC_EVERY),
        f"LocalSGDStrategy({SYNC_EVERY}, DiLoCo)": lambda: sg.LocalSGDStrategy(SYNC_EVERY, diloco),
    }
    return [(name, f"{final_loss(make(), epochs):.4f}") for name, make in strategies.items()]


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wide")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no run is left behind
    columns = ("program", "steps/s", "of summed gradients", "rounds", "MB on loopback in a step")
    measured = measure(options.model, options.rounds)
    show(f"2 workers of 1, {options.model}", columns, rows(options.model, measured))
    losses = compare_losses(options.epochs)
    show(f"loss on the digits after {options.epochs} epochs, 2 replicas", ("strategy", "loss"), losses)
    target = ratio(_WHAT, measured, options.model, (PROGRAMS[1], PROGRAMS[0]), speed)
    RESULTS.mkdir(exist_ok=True)
    content = {"num_rounds": options.rounds, "losses": dict(losses), "targets": [target.as_json()]}
    (RESULTS / "local_sgd.json").write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
