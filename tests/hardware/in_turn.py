"""Runs the cases of a module one after the other in a program of their own, and says of each what came of it.

A program of their own because drivers leave threads behind, and strict devices last for the life of a process. Each
outcome is a line as soon as it is known, so that a case that hangs is known by its name.
"""

import importlib
import inspect
import json
import subprocess
import sys
import traceback
from types import ModuleType

import pytest

from stratagem.processes import launcher
from tests.hardware import target

_BEGINS, _OUTCOME = "begins ", "outcome "
SKIPPED = "skipped: "


def cases_of(module: ModuleType) -> list[str]:
    """The names of the cases of a module, in its order."""
    return [name for name, each in vars(module).items() if name.startswith("case_") and inspect.isfunction(each)]


def outcomes_of(module: ModuleType, kind: str | None, timeout_s: float) -> dict[str, str | None]:
    """For each case the traceback that it ended with, why it was left out, or `None` if it passed.

    Args:
        module: Has the cases.
        kind: The kind of real accelerators to run on; `None` for strict devices.
        timeout_s: How long all of them may take.
    """
    environment = {key: value for key, value in target.ENVIRONMENT.items() if not key.startswith("STRATAGEM_")}
    if kind is not None:
        environment |= {target.VARIABLE: kind, **target.EXACT}
    try:
        done = subprocess.run(
            # Drivers and their libraries warn of what is no concern of ours.
            [sys.executable, *(("-W", "error") if kind is None else ()), "-m", __name__, module.__name__],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
        said, end = done.stdout, f"the program ended with code {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        said, end = expired.stdout or b"", f"the program was ended after {timeout_s:g} s"
    return _read(said.decode(errors="replace"), cases_of(module), end)


def _read(text: str, cases: list[str], end: str) -> dict[str, str | None]:
    outcomes: dict[str, str | None] = {}
    under_way = ""
    for line in text.splitlines():
        if line.startswith(_BEGINS):
            under_way = line.removeprefix(_BEGINS)
        elif line.startswith(_OUTCOME):
            outcomes[under_way] = json.loads(line.removeprefix(_OUTCOME))
    for case in cases:
        last = f"{end} in this case" if case == under_way else f"{end} in {under_way or 'none of them'}, before this"
        outcomes.setdefault(case, f"{last}. It said:\n{text[-4000:]}")
    return outcomes


def _main(name: str) -> None:
    module = importlib.import_module(name)
    launcher.acquire()  # one fork server for all cases: starting one takes seconds
    for case in cases_of(module):
        print(f"{_BEGINS}{case}", flush=True)
        outcome = None
        try:
            getattr(module, case)()
        except pytest.skip.Exception as why:
            outcome = f"{SKIPPED}{why}"
        except BaseException:
            outcome = traceback.format_exc()
        print(f"\n{_OUTCOME}{json.dumps(outcome)}", flush=True)
    launcher.release()


if __name__ == "__main__":
    _main(sys.argv[1])
