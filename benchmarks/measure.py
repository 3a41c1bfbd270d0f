"""Takes measurements in turns and reports medians and ratios.

Owns the order of the runs (interleaved, so that a slow moment of the machine hits everyone) and
the form of the reports. What is measured is each benchmark's own.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Reading:
    """All measurements of one contender, in seconds."""

    seconds: list[float]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)


def interleaved(contenders: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, Reading]:
    """Measures every contender once a round, the order turned around every other round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for measure in contenders.values():
        measure()  # warms caches; does not count
    for round_number in range(num_rounds):
        order = list(contenders.items())
        for name, measure in order if round_number % 2 == 0 else reversed(order):
            seconds[name].append(measure())
    return {name: Reading(values) for name, values in seconds.items()}


def report(title: str, readings: Mapping[str, Reading], *, reference: str) -> None:
    """Prints the table and writes it as JSON under `results/`."""
    base_s = readings[reference].median_s
    table = Table(title=title, title_justify="left")
    for column in ("what", "median ms", "min ms", "max ms", f"x of {reference}"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, reading in readings.items():
        values = (reading.median_s, min(reading.seconds), max(reading.seconds))
        table.add_row(name, *(f"{1000 * value:.1f}" for value in values), f"{reading.median_s / base_s:.2f}")
    Console(width=110).print(table)
    RESULTS.mkdir(exist_ok=True)
    figures = {name: {**dataclasses.asdict(each), "median_s": each.median_s} for name, each in readings.items()}
    (RESULTS / f"{title.replace(' ', '_')}.json").write_text(json.dumps(figures, indent=2))
