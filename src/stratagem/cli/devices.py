"""`stratagem devices`: what is here, how it is divided, how much memory is used."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from stratagem.devices.survey import Survey

_NOTHING = "-"


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show what is on each device and which processes use it, until Ctrl-C.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks with --watch.", min=0.1)] = 1.0,
) -> None:
    """Show physical and logical devices, their cores and their memory."""
    if watch:
        from stratagem.cli import watching

        watching.watch(interval, as_json=as_json)
    # Imported here, for torch takes over a second and `stratagem --help` must not wait for it.
    from stratagem.devices import survey

    found = survey()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found)


def _show(found: "Survey") -> None:
    from stratagem.cli.tables import show

    show(physical_table(found), _logical_table(found))
    for note in found.notes:
        typer.echo(f"note: {note}")


def physical_table(found: "Survey") -> "Table":
    """All physical devices, with what is used of their memory."""
    from stratagem.cli.tables import table
    from stratagem.devices.device import mib

    columns = ["device", "model", "visible", ">cores", ">memory", ">used"]
    rows = [
        [
            each.device.name,
            each.details.device_name,
            "yes" if each.visible else "no",
            str(each.details.num_cores or _NOTHING),
            mib(each.details.total_memory_bytes) if each.details.total_memory_bytes else _NOTHING,
            _NOTHING if each.memory_used_bytes is None else mib(each.memory_used_bytes),
        ]
        for each in found.physical
    ]
    if any(each.details.compute_capability for each in found.physical):
        columns.append("compute")
        for row, each in zip(rows, found.physical, strict=True):
            row.append(".".join(map(str, each.details.compute_capability or ())) or _NOTHING)
    return table("Physical devices", columns, rows)


def _logical_table(found: "Survey") -> "Table":
    from stratagem.cli.tables import ranges, table
    from stratagem.devices.device import mib

    columns = ["device", "share of", "cores", ">threads", ">memory limit", "growth", "torch"]
    rows = [
        [
            each.name,
            f"{each.physical.device_type}:{each.physical.index}",
            ranges(each.cores) or _NOTHING,
            str(each.num_threads or _NOTHING),
            "none" if each.memory_limit_bytes is None else mib(each.memory_limit_bytes),
            "on demand" if each.memory_growth else "at start",
            str(each.torch_device),
        ]
        for each in found.logical
    ]
    return table("Logical devices", columns, rows)
