"""Runs cases on strict devices, many in one process: torch has one private slot, and nobody gives it back.

A case is a function whose name begins with `case_`, in a module that a test names. All cases of the module run in one
program between its `prepare` and `finish`, forked from the nursery; each is a test of its own, which fails with the
traceback that the case had.
"""

import importlib
import inspect
import json
import sys
import traceback
from types import ModuleType

from tests.cluster import nursery


def cases_of(module: ModuleType) -> list[str]:
    """The names of the cases of a module, in its order."""
    return [name for name, each in vars(module).items() if name.startswith("case_") and inspect.isfunction(each)]


def outcomes_of(module: ModuleType, environment: dict[str, str]) -> dict[str, str | None]:
    """For each case the traceback that it ended with, or `None`."""
    done = nursery.run(["-m", __name__, module.__name__], 110, environment)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def _main(name: str) -> None:
    module = importlib.import_module(name)
    outcomes: dict[str, str | None] = {}
    module.prepare()
    for case in cases_of(module):
        try:
            getattr(module, case)()
            outcomes[case] = None
        except BaseException:
            outcomes[case] = traceback.format_exc()
    module.finish()
    print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
