"""Puts the subcommands together and turns errors into one line and an exit code."""

import os
import sys
from typing import Annotated

import typer

from stratagem import __version__
from stratagem._checks import require_folder
from stratagem.cli.devices import devices
from stratagem.cli.run import SETTINGS, RunCommand, run
from stratagem.errors import LaunchError, StratagemError

_USER_ERROR = 2

app = typer.Typer(name="stratagem", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(devices)
app.command(cls=RunCommand, context_settings=SETTINGS)(run)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stratagem {__version__}")
        raise typer.Exit


@app.callback()
def stratagem(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """One training program on one device, on many devices or on many machines."""
    require_folder(LaunchError)


def main() -> None:
    """The entry point of the `stratagem` command."""
    try:
        app()
    except StratagemError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(_USER_ERROR)
    except OSError as error:
        typer.echo(f"error: cannot write the output: {error}", err=True)
        os._exit(1)  # a second attempt at exit would fail as the first did
