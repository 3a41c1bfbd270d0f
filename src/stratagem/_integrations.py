"""Connects libraries that a program uses beside torch, once it uses them.

The parts that know such a library stand above the strategies; they are named here, not imported.
"""

import importlib
import sys

_INTEGRATIONS = {"keras": "stratagem.training.keras_fit"}


def connect() -> None:
    """Connects every known library that the program has imported."""
    for library, module in _INTEGRATIONS.items():
        if library in sys.modules:
            importlib.import_module(module).install()
