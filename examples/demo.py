"""Trains a convolutional network on handwritten digits: on one device, then mirrored on 2 and on 4.

All start from the same weights and see the same batches in the same order, so their losses agree;
accuracy and throughput stand side by side at the end, and in a picture. They train in short turns, and speeds are
compared turn by turn: when the machine is busy for a moment, it is busy for all of them. About a minute on two cores.

python examples/demo.py [--epochs 30] [--output demo.png] [--without-speed]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from digits import load_digits
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

GLOBAL_BATCH_SIZE = 256
NUM_DEVICES = (1, 2, 4)
NUM_ROUNDS = 6
COLORS = ("#9aa0a6", "#1a73e8", "#e8710a")

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Result:
    """What came of one training."""

    name: str
    losses: list[float]
    accuracy: float
    speeds: list[float]  # examples per second, of each round

    @property
    def examples_per_s(self) -> float:
        """The throughput of the round in the middle."""
        return statistics.median(self.speeds)

    def speed_ratios(self, other: "Result") -> list[float]:
        """The throughput over that of another training, round by round, from the least to the largest."""
        return sorted(own / others for own, others in zip(self.speeds, other.speeds, strict=True))

    def largest_difference(self, other: "Result") -> float:
        """How far the losses of two trainings were apart in the step where they were farthest."""
        return max(abs(own - others) for own, others in zip(self.losses, other.losses, strict=True))


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network and its optimizer, with the same weights every time."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """One step of training, as one would write it for one device."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


class Contender:
    """A training that goes on from round to round: in plain torch, or mirrored on devices that share the CPU.

    Args:
        num_devices: How many devices; 1 is plain torch, on all cores.
        train_set: What it learns.
        progress: Where it is shown.
        num_epochs: Those of all rounds.
    """

    def __init__(self, num_devices: int, train_set: TensorDataset, progress: Progress, num_epochs: int) -> None:
        self.name = "one device" if num_devices == 1 else f"{num_devices} replicas"
        self._num_devices, self._num_examples, self._progress = num_devices, len(train_set), progress
        order = torch.Generator().manual_seed(0)
        self._loader = DataLoader(train_set, batch_size=GLOBAL_BATCH_SIZE, shuffle=True, generator=order)
        self._model, self._optimizer = make_model()
        self._bar = progress.add_task(self.name, start=False, total=num_epochs, loss="waiting", speed="")
        self._losses: list[float] = []
        self._speeds: list[float] = []

    def train(self, num_epochs: int) -> None:
        """One round."""
        self._progress.update(self._bar, loss="starting" if not self._losses else f"loss {self._losses[-1]:.4f}")
        step = make_step(self._model, self._optimizer)
        if self._num_devices == 1:
            self._train(num_epochs, lambda: self._loader, lambda batch: step(*batch))
            return
        shares = [sg.config.LogicalDeviceConfiguration()] * self._num_devices
        sg.config.set_logical_device_configuration("cpu:0", shares)
        with sg.MirroredStrategy(sg.config.list_logical_devices("CPU")) as strategy:
            strategy.adopt(self._model, self._optimizer)
            self._train(
                num_epochs,
                lambda: strategy.distribute(self._loader),
                lambda batch: strategy.reduce("mean", strategy.run(step, args=batch)),
            )

    def result(self, test_set: TensorDataset) -> Result:
        """What has come of it."""
        images, labels = test_set.tensors
        with torch.no_grad():
            accuracy = (self._model(images).argmax(dim=1) == labels).float().mean().item()
        return Result(self.name, self._losses, accuracy, self._speeds)

    def _train(
        self, num_epochs: int, batches: Callable[[], Iterable[Any]], step: Callable[[Any], torch.Tensor]
    ) -> None:
        speeds: list[float] = []
        for epoch in range(num_epochs):
            start = time.perf_counter()
            self._losses += [step(batch).item() for batch in batches()]
            if epoch > 0 or num_epochs == 1:  # the first epoch of a round also warms up
                speeds.append(self._num_examples / (time.perf_counter() - start))
            self._progress.start_task(self._bar)
            speed = f"{statistics.median(speeds):,.0f} examples/s" if speeds else ""
            self._progress.update(self._bar, advance=1, loss=f"loss {self._losses[-1]:.4f}", speed=speed)
        self._speeds.append(statistics.median(speeds))


def race(contenders: list[Contender], num_epochs: int) -> None:
    """Lets them train in short turns, so that all of them have the same busy and quiet moments of the machine."""
    num_rounds = min(NUM_ROUNDS, num_epochs)
    for number in range(num_rounds):
        part = num_epochs * (number + 1) // num_rounds - num_epochs * number // num_rounds
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            contender.train(part)


def table(results: list[Result]) -> Table:
    """The results side by side."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for heading in (
        "test\naccuracy",
        "examples\nper second",
        "against\none device",
        "final\nloss",
        "largest loss\ndifference",
    ):
        shown.add_column(heading, justify="right")
    one, *_ = results
    for result in results:
        shown.add_row(
            result.name,
            f"{result.accuracy:.1%}",
            f"{result.examples_per_s:,.0f}",
            "-" if result is one else f"{statistics.median(result.speed_ratios(one)):.2f} x",
            f"{result.losses[-1]:.6f}",
            "-" if result is one else f"{result.largest_difference(one):.1e}",
        )
    return shown


def doubt(results: list[Result]) -> str:
    """What to say of the speeds where rounds differ by more than half, as on a busy machine; otherwise nothing."""
    one, *others = results
    for result in others:
        ratios = result.speed_ratios(one)
        least, largest = ratios[0], ratios[-1]
        if largest > 1.5 * least:
            return (
                f"The machine was busy: {result.name} had {least:.2f} to {largest:.2f} x the speed of one device, "
                f"from turn to turn. Run it again when nothing else runs."
            )
    return ""


def picture(results: list[Result], *, with_speed: bool) -> Figure:
    """The losses step by step, and the throughputs."""
    figure = Figure(figsize=(11 if with_speed else 8, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, width_ratios=(3, 2)) if with_speed else [figure.subplots()]
    draw_losses(panels[0], results)
    if with_speed:
        draw_speeds(panels[1], results)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def draw_losses(panel: Axes, results: list[Result]) -> None:
    """The lines lie on one another: from broad to narrow, all can be seen."""
    for result, color, width in zip(results, COLORS, (8, 4, 1.5), strict=True):
        steps = range(1, len(result.losses) + 1)
        panel.plot(steps, result.losses, color=color, linewidth=width, label=result.name)
    apart = max(result.largest_difference(results[0]) for result in results)
    panel.set(xlabel="step", ylabel="training loss", yscale="log", title=f"Losses at most {apart:.0e} apart")
    panel.legend(frameon=False)
    panel.grid(alpha=0.25)


def draw_speeds(panel: Axes, results: list[Result]) -> None:
    """A bar for each training."""
    bars = panel.bar(
        [result.name for result in results], [result.examples_per_s for result in results], color=COLORS, width=0.6
    )
    panel.bar_label(bars, fmt="{:,.0f}", padding=3)
    panel.set(ylabel="examples per second", title=f"Throughput on the same {_num_cores()} cores")
    panel.margins(y=0.12)
    panel.yaxis.set_major_formatter("{x:,.0f}")


def main() -> None:
    """Runs the trainings in turns and shows what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="where the picture goes")
    parser.add_argument("--without-speed", action="store_true", help="draw the losses alone, as on a busy machine")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs is at least 1, got {options.epochs}")
    if options.output.suffix != ".png" or not options.output.absolute().parent.is_dir():
        parser.error(f"--output is a .png file in a folder that exists, got {str(options.output)!r}")

    console = Console(highlight=False)
    train_set, test_set = load_digits()
    console.print(
        f"{len(train_set)} handwritten digits to learn, {len(test_set)} to test; "
        f"global batch {GLOBAL_BATCH_SIZE}; {_num_cores()} cores\n"
    )
    columns = (
        *(TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("epochs")),
        *(TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[speed]}"), TimeElapsedColumn()),
    )
    with Progress(*columns, console=console) as progress:
        contenders = [Contender(number, train_set, progress, options.epochs) for number in NUM_DEVICES]
        race(contenders, options.epochs)
        results = [contender.result(test_set) for contender in contenders]
    console.print(table(results))
    console.print(f"All three had the same {_num_cores()} cores; replicas divide them, not multiply them.")
    if words := doubt(results):
        console.print(words)
    picture(results, with_speed=not options.without_speed).savefig(options.output, dpi=130)
    console.print(f"picture: {options.output.absolute()}", soft_wrap=True)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
