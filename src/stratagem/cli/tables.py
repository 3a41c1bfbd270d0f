"""Tables on a terminal, and without one.

Only loaded once a command shows a table, for rich takes time.
"""

import io
from typing import Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 1000  # a pipe has no width: nothing is cut


def show(*tables: Table) -> None:
    """Prints tables as wide as the terminal is."""
    terminal, page = Console(), io.StringIO()
    width = terminal.width if terminal.is_terminal else _PIPE_WIDTH
    console = Console(file=page, width=width, force_terminal=terminal.is_terminal)
    for each in tables:
        console.print(each)
    for line in page.getvalue().splitlines():
        typer.echo(line.rstrip())


def is_terminal() -> bool:
    """Whether somebody looks at what is shown."""
    return Console().is_terminal


def ranges(cores: tuple[int, ...]) -> str:
    """Neighbouring numbers as ranges: `0-3,8`."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A table whose first column is never cut; a column that starts with > is aligned to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=justify, no_wrap=number == 0)
    for row in rows:
        made.add_row(*row)
    return made
