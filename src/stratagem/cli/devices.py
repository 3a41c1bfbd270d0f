"""`stratagem devices`: what is here, how it is divided, how much memory is used."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from stratagem.devices.survey import Survey

_NOTHING = "-"
_PIPE_WIDTH = 120


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

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(_physical_table(found))
    console.print(_logical_table(found))
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _physical_table(found: "Survey") -> "Table":
    from stratagem.devices.device import mib

    table = _table("Physical devices", "device", "model", "visible", ">cores", ">memory", ">used", "compute")
    for each in found.physical:
        details, capability = each.details, each.details.compute_capability
        table.add_row(
            each.device.name,
            details.device_name,
            "yes" if each.visible else "no",
            str(details.num_cores or _NOTHING),
            mib(details.total_memory_bytes),
            _NOTHING if each.memory_used_bytes is None else mib(each.memory_used_bytes),
            _NOTHING if capability is None else ".".join(map(str, capability)),
        )
    return table


def _logical_table(found: "Survey") -> "Table":
    from stratagem.devices.device import mib

    table = _table("Logical devices", "device", "share of", "cores", ">threads", ">memory limit", "growth", "torch")
    for each in found.logical:
        table.add_row(
            each.name,
            each.physical.name,
            ",".join(map(str, each.cores)) or _NOTHING,
            str(each.num_threads or _NOTHING),
            "none" if each.memory_limit_bytes is None else mib(each.memory_limit_bytes),
            "on demand" if each.memory_growth else "at start",
            str(each.torch_device),
        )
    return table


def _table(title: str, *columns: str) -> "Table":
    """A table; a column that starts with > is aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table
