"""Prints tables and targets on the screen and writes them as markdown."""

import dataclasses
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Target:
    """A ratio that is to be reached.

    Attributes:
        what: Which ratio, in words.
        value: Its measured value; `None` if a measurement is missing.
        bound: What it is to be; `None` if it is only of interest.
        at_most: Whether the bound is an upper one.
        spread: The least and the most of the rounds.
    """

    what: str
    value: float | None
    bound: float | None
    at_most: bool = False
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether it is reached; `None` if there is no bound."""
        if self.bound is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def cells(self) -> list[str]:
        """What a table shows of it."""
        sign = "<=" if self.at_most else ">="
        return [
            self.what,
            "missing" if self.value is None else f"{self.value:.2f}",
            "" if self.spread is None else f"{self.spread[0]:.2f}..{self.spread[1]:.2f}",
            "" if self.bound is None else f"{sign} {self.bound:.2f}",
            {True: "yes", False: "NO", None: ""}[self.met],
        ]

    def as_json(self) -> dict[str, object]:
        """What the JSON file says of it."""
        return {**dataclasses.asdict(self), "met": self.met}


def ratio_of(
    what: str, own: Sequence[float], others: Sequence[float], bound: float | None = None, *, at_most: bool = False
) -> Target:
    """The median of one's rounds over that of another's, with the least and the greatest ratio of one round."""
    if not own or not others:
        return Target(what, None, bound, at_most)
    ratios = [one / other for one, other in zip(own, others, strict=True)]
    return Target(what, statistics.median(own) / statistics.median(others), bound, at_most, (min(ratios), max(ratios)))


TARGET_COLUMNS = ("ratio", "measured", "rounds", "target", "met")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> None:
    """Prints a table; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < num_left else "right", no_wrap=True)
    for row in rows:
        style = {"yes": "green", "NO": "red"}.get(row[-1])
        table.add_row(*row, style=style)
    Console(width=130).print(table)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """The same table in markdown."""
    line = ["---" if number < num_left else "---:" for number in range(len(columns))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, line, *rows))
