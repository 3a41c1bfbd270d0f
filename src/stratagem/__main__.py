"""Runs the command line as `python -m stratagem`."""

from stratagem.cli import main

main()
