"""Compares this tree with another revision of it, side by side: `python -m benchmarks.against REVISION`.

The programs are those of this tree; they import the library of one revision or of the other, and measure in turns.
Memory is that of programs that run alone, started in turns too.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import turns
from benchmarks.processes import CommandFailed
from benchmarks.tables import TARGET_COLUMNS, Target, ratio_of, show
from benchmarks.training import Figures, Program, environment, pss_mb, step_s

MODELS = ("mlp", "cnn", "transformer", "wide", "stack10", "stack100", "stack500")
PROGRAMS = tuple(
    Program(name, size)
    for name, size in (("stratagem", 2), ("stratagem", 4), ("central", 2), ("workers", 2), ("parameter_server", 2))
)
_OTHERS = {"keras": ("keras_fit", "--program", "mirrored"), "estimator": ("estimator", "--one", "Estimator")}
_MODELS_OF_OTHERS = ("mlp", "cnn")
_OF_MEMORY = ("mlp", "wide")
_ROOT = Path(__file__).parents[1]
_NOW, _THEN = "now", "then"


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The tree of a revision, for the time of a block."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(_ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def seconds_of(figures: Figures) -> float:
    """How long a step took, whichever program says so."""
    return float(figures["step_s"]) if "step_s" in figures else step_s(figures)


def command_of(program: Program | str, model: str) -> list[str]:
    """What is started, whichever library it imports."""
    if isinstance(program, Program):
        return program.command(model)
    name, *options = _OTHERS[program]
    return [sys.executable, "-m", f"benchmarks.{name}", "--models", model, *options]


def speed(program: Program | str, model: str, tree: Path, num_rounds: int) -> Target:
    """How fast this tree is, over the other one."""
    command = command_of(program, model)
    sources = {_NOW: _ROOT / "src", _THEN: tree / "src"}
    everyones = {key: ["env", f"PYTHONPATH={source}", *command] for key, source in sources.items()}
    found = turns.take_turns(everyones, num_rounds, environment() | {"KERAS_BACKEND": "torch"})
    now, then = ([1 / seconds_of(each) for each in found[key]] for key in (_NOW, _THEN))
    return ratio_of(f"speed, {program}, {model}", now, then, 1.0)


def memory(program: Program, model: str, tree: Path, num_rounds: int) -> Target:
    """How much memory this tree takes, over the other one."""
    found: dict[str, list[float]] = {_NOW: [], _THEN: []}
    for number in range(num_rounds):
        for key in (_NOW, _THEN) if number % 2 == 0 else (_THEN, _NOW):
            source = (_ROOT if key == _NOW else tree) / "src"
            found[key].append(pss_mb(program.measure(model, {"PYTHONPATH": str(source)})))
    return ratio_of(f"memory (PSS), {program}, {model}", found[_NOW], found[_THEN], 1.0, at_most=True)


def compare(tree: Path, models: Sequence[str], num_rounds: int, console: Console) -> list[Target]:
    """All ratios; what the other revision cannot run is left out, and said."""
    contests = [(program, model) for program in PROGRAMS for model in models]
    contests += [(program, model) for program in _OTHERS for model in _MODELS_OF_OTHERS if model in models]
    measured = []
    for program, model in contests:
        try:
            measured.append(speed(program, model, tree, num_rounds))
            if model in _OF_MEMORY and isinstance(program, Program):
                measured.append(memory(program, model, tree, 3))
        except CommandFailed as error:
            console.print(f"{program}, {model}: left out, {str(error).strip().splitlines()[-1]}")
            continue
        console.print(*measured[-1].cells())
    return measured


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="a commit, a tag or a branch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with checked_out(options.revision) as tree:
        measured = compare(tree, options.models, options.rounds, Console(width=130))
    show(f"this tree over {options.revision}", TARGET_COLUMNS, [each.cells() for each in measured])


if __name__ == "__main__":
    main()
