"""Trains a convolutional network on handwritten digits: on one device, then mirrored on 2 and on 4.

All start from the same weights and see the same batches in the same order, so their losses agree;
accuracy and throughput stand side by side at the end, and in a picture. About half a minute on two cores.

python examples/demo.py [--epochs 30] [--output demo.png]
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
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

GLOBAL_BATCH_SIZE = 256
NUM_DEVICES = (2, 4)
COLORS = ("#9aa0a6", "#1a73e8", "#e8710a")

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Result:
    """What came of one training."""

    name: str
    losses: list[float]
    accuracy: float
    examples_per_s: float

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


@dataclass(frozen=True)
class Race:
    """The trainings, all on the same data and shown in the same way."""

    train_set: TensorDataset
    test_set: TensorDataset
    num_epochs: int
    progress: Progress

    def on_one_device(self) -> Result:
        """Trains in plain torch, on all cores."""
        bar = self._bar("one device")
        loader = self._loader()
        model, optimizer = make_model()
        step = make_step(model, optimizer)
        return self._train(bar, model, lambda: loader, lambda batch: step(*batch))

    def mirrored(self, num_devices: int) -> Result:
        """Trains with a replica on each of the devices that the CPU is divided into."""
        bar = self._bar(f"{num_devices} replicas")
        loader = self._loader()
        sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * num_devices)
        with sg.MirroredStrategy(sg.config.list_logical_devices("CPU")) as strategy:
            with strategy.scope():
                model, optimizer = make_model()
            step = make_step(model, optimizer)
            return self._train(
                bar,
                model,
                lambda: strategy.distribute(loader),
                lambda batch: strategy.reduce("mean", strategy.run(step, args=batch)),
            )

    def _bar(self, name: str) -> Any:
        return self.progress.add_task(name, start=False, total=self.num_epochs, loss="starting", speed="")

    def _loader(self) -> DataLoader:
        order = torch.Generator().manual_seed(0)
        return DataLoader(self.train_set, batch_size=GLOBAL_BATCH_SIZE, shuffle=True, generator=order)

    def _train(
        self, bar: Any, model: nn.Module, batches: Callable[[], Iterable[Any]], step: Callable[[Any], torch.Tensor]
    ) -> Result:
        losses: list[float] = []
        speeds: list[float] = []
        for _ in range(self.num_epochs):
            start = time.perf_counter()
            losses += [step(batch).item() for batch in batches()]
            speeds.append(len(self.train_set) / (time.perf_counter() - start))
            self.progress.start_task(bar)
            speed = f"{statistics.median(speeds):,.0f} examples/s"
            self.progress.update(bar, advance=1, loss=f"loss {losses[-1]:.4f}", speed=speed)
        images, labels = self.test_set.tensors
        with torch.no_grad():
            accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
        # The first epoch also warms up; the median leaves out moments when the machine did something else.
        return Result(self.progress.tasks[bar].description, losses, accuracy, statistics.median(speeds[1:] or speeds))


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
            "-" if result is one else f"{result.examples_per_s / one.examples_per_s:.2f} x",
            f"{result.losses[-1]:.6f}",
            "-" if result is one else f"{result.largest_difference(one):.1e}",
        )
    return shown


def picture(results: list[Result]) -> Figure:
    """The losses step by step, and the throughputs."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    losses, speeds = figure.subplots(1, 2, width_ratios=(3, 2))
    # The lines lie on one another: from broad to narrow, all can be seen.
    for result, color, width in zip(results, COLORS, (8, 4, 1.5), strict=True):
        steps = range(1, len(result.losses) + 1)
        losses.plot(steps, result.losses, color=color, linewidth=width, label=result.name)
    apart = max(result.largest_difference(results[0]) for result in results)
    losses.set(xlabel="step", ylabel="training loss", yscale="log", title=f"Losses at most {apart:.0e} apart")
    losses.legend(frameon=False)
    losses.grid(alpha=0.25)

    bars = speeds.bar(
        [result.name for result in results], [result.examples_per_s for result in results], color=COLORS, width=0.6
    )
    speeds.bar_label(bars, fmt="{:,.0f}", padding=3)
    speeds.set(ylabel="examples per second", title=f"Throughput on the same {_num_cores()} cores")
    speeds.margins(y=0.12)
    speeds.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (losses, speeds):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Runs the trainings one after the other and shows what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="where the picture goes")
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
        race = Race(train_set, test_set, options.epochs, progress)
        results = [race.on_one_device(), *map(race.mirrored, NUM_DEVICES)]
    console.print(table(results))
    console.print(f"All three had the same {_num_cores()} cores; replicas divide them, not multiply them.")
    picture(results).savefig(options.output, dpi=130)
    console.print(f"picture: {options.output.absolute()}", soft_wrap=True)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main()
