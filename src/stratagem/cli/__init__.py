"""Words on a terminal: the `stratagem` command.

One file for each subcommand and one row for it in `app`. Nothing here imports torch before a
command has been chosen, so that `stratagem --help` answers at once.
"""

from stratagem.cli.app import main

__all__ = ["main"]
