"""`stratagem devices`: what is here, how it is divided, how much memory is used."""

import io
import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from stratagem.devices.survey import Survey

_NOTHING = "-"
_PIPE_WIDTH = 1000  # a pipe has no width: nothing is cut


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Show physical and logical devices, their cores and their memory."""
    # Imported here, for torch takes over a second and `stratagem --help` must not wait for it.
    from stratagem.devices import survey

    found = survey()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found)


def _show(found: "Survey") -> None:
    from rich.console import Console

    terminal, page = Console(), io.StringIO()
    width = terminal.width if terminal.is_terminal else _PIPE_WIDTH
    console = Console(file=page, width=width, force_terminal=terminal.is_terminal)
    console.print(_physical_table(found))
    console.print(_logical_table(found))
    for line in page.getvalue().splitlines():
        typer.echo(line.rstrip())
    for note in found.notes:
        typer.echo(f"note: {note}")


def _physical_table(found: "Survey") -> "Table":
    from stratagem.devices.device import mib

    columns = ["device", "model", "visible", ">cores", ">memory", ">used"]
    rows = [
        [
            each.device.name,
            each.details.device_name,
            "yes" if each.visible else "no",
            str(each.details.num_cores or _NOTHING),
            mib(each.details.total_memory_bytes),
            _NOTHING if each.memory_used_bytes is None else mib(each.memory_used_bytes),
        ]
        for each in found.physical
    ]
    if any(each.details.compute_capability for each in found.physical):
        columns.append("compute")
        for row, each in zip(rows, found.physical, strict=True):
            row.append(".".join(map(str, each.details.compute_capability or ())) or _NOTHING)
    return _table("Physical devices", columns, rows)


def _logical_table(found: "Survey") -> "Table":
    from stratagem.devices.device import mib

    columns = ["device", "share of", "cores", ">threads", ">memory limit", "growth", "torch"]
    rows = [
        [
            each.name,
            f"{each.physical.device_type}:{each.physical.index}",
            _ranges(each.cores) or _NOTHING,
            str(each.num_threads or _NOTHING),
            "none" if each.memory_limit_bytes is None else mib(each.memory_limit_bytes),
            "on demand" if each.memory_growth else "at start",
            str(each.torch_device),
        ]
        for each in found.logical
    ]
    return _table("Logical devices", columns, rows)


def _ranges(cores: tuple[int, ...]) -> str:
    """Neighbouring numbers as ranges: `0-3,8`."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def _table(title: str, columns: list[str], rows: list[list[str]]) -> "Table":
    """A table whose first column is never cut; a column that starts with > is aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table
