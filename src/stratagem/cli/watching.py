"""`stratagem devices --watch`: what is on each device and which processes use it, again and again.

Loads torch once; each look is a new one. On a terminal it takes the place of the one before, elsewhere they follow each
other: in JSON, one line for each.
"""

import json
import time
from typing import TYPE_CHECKING

import typer

from stratagem.devices import usage
from stratagem.devices.device import mib
from stratagem.devices.survey import survey

if TYPE_CHECKING:
    from rich.table import Table

_CLEAR = "\x1b[H\x1b[2J"
_NOTHING = "-"


def watch(interval_s: float, *, as_json: bool) -> None:
    """Shows devices and their users until Ctrl-C."""
    try:
        while True:
            found = usage.of_this_machine()
            if as_json:
                typer.echo(json.dumps({**survey().as_dict(), "processes": [vars(each) for each in found]}))
            else:
                _show(found)
            time.sleep(interval_s)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _show(found: list[usage.Usage]) -> None:
    from stratagem.cli.devices import physical_table
    from stratagem.cli.tables import is_terminal, show

    if is_terminal():
        typer.echo(_CLEAR, nl=False)
    show(physical_table(survey()), _process_table(found))
    if not found:
        typer.echo("note: no process that this user may look at uses a device through stratagem")


def _process_table(found: list[usage.Usage]) -> "Table":
    from stratagem.cli.tables import table

    rows = [
        [each.device, str(each.pid), str(each.program), each.command]
        + [_NOTHING if size is None else mib(size) for size in (each.memory_bytes, each.peak_bytes, each.limit_bytes)]
        for each in found
    ]
    return table("Processes", ["device", ">process", ">of program", "command", ">memory", ">peak", ">limit"], rows)
