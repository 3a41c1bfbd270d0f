"""Draws where the main program's time goes in a step of MirroredStrategy with 2 replicas: a flame graph.

`py-spy` (`pip install py-spy`) looks at the program 500 times a second; what is not in `strategy.run` is left out.
Each box is a function, as wide as its share of the time, above the one that called it.
"""

import argparse
import collections
import os
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.contender import distributed_step, divide
from benchmarks.models import WORKLOADS
from benchmarks.processes import run

mpl.use("svg")

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "flame.svg"
_ROOT = "run (stratagem/engine/lockstep.py"
_COLOURS = {"stratagem": "#1d6fa3", "torch": "#e09f3e", "": "#c9ced6"}
_LEAST_SHARE = 0.004
_MAX_DEPTH = 16
_TIMEOUT_S = 120.0

Stacks = dict[tuple[str, ...], int]


def train(model: str, seconds: float) -> None:
    """The program that is looked at."""
    import stratagem as sg  # noqa: PLC0415  # only the program needs it

    divide(sg, 2)
    with sg.MirroredStrategy() as strategy:
        step = distributed_step(strategy, WORKLOADS[model])
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            step()


def record(model: str, seconds: float) -> Stacks:
    """How often the program was seen in each chain of calls inside `run`."""
    with tempfile.NamedTemporaryFile("r") as file:
        program = [sys.executable, "-m", "benchmarks.flame", "--train", str(seconds), "--model", model]
        options = ["--rate", "500", "--format", "raw", "--function", "--output", file.name]
        run(["py-spy", "record", *options, "--", *program], environment=os.environ, timeout_s=_TIMEOUT_S)
        found: Stacks = collections.Counter()
        for line in file.read().splitlines():
            stack, _, number = line.rpartition(" ")
            frames = stack.split(";")
            inside = next((place for place, frame in enumerate(frames) if _ROOT in frame), None)
            if inside is not None:
                found[tuple(frames[inside:])] += int(number)
    return found


def draw(stacks: Stacks, model: str, path: Path) -> None:
    """The picture."""
    total = sum(stacks.values())
    figure, axes = plt.subplots(figsize=(12, 5.6), layout="constrained")
    axes.set(xlim=(0, 1), ylim=(0, _MAX_DEPTH), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    _draw_above(axes, stacks, depth=0, left=0.0, total=total)
    figure.suptitle(f"strategy.run of {model}, MirroredStrategy with 2 replicas, replica 0", fontweight="bold")
    with mpl.rc_context({"svg.hashsalt": "flame", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_above(axes: "plt.Axes", stacks: Stacks, *, depth: int, left: float, total: int) -> None:
    callees: dict[str, Stacks] = {}
    for stack, number in stacks.items():
        if stack:
            callees.setdefault(stack[0], {})[stack[1:]] = number
    for frame, inside in sorted(callees.items(), key=lambda each: -sum(each[1].values())):
        share = sum(inside.values()) / total
        if share < _LEAST_SHARE or depth == _MAX_DEPTH:
            continue
        name, _, file = frame.partition(" (")
        colour = next(each for key, each in _COLOURS.items() if key in file)
        axes.add_patch(plt.Rectangle((left, depth), share, 0.94, facecolor=colour, edgecolor="white", linewidth=0.6))
        if (room := int(share * 165)) > 3:
            ink = "white" if "stratagem" in file else "#22262b"
            axes.text(left + 0.002, depth + 0.47, name[:room], va="center", fontsize=7, color=ink, clip_on=True)
        _draw_above(axes, inside, depth=depth + 1, left=left, total=total)
        left += share


def main() -> None:
    """Looks at the program and draws; or is the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stack100", choices=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.model, options.train)
        return
    draw(record(options.model, options.seconds), options.model, options.output)


if __name__ == "__main__":
    main()
