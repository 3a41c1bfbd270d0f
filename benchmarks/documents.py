"""Writes the tables of README and docs from the figures that are kept in `history/`: no figure is copied by hand.

A table stands between two comments, the first of which names it. `python -m benchmarks.documents` writes all of them.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.history import Ratios, newest
from benchmarks.tables import markdown

_TABLE = re.compile(r"(<!-- figures: (?P<name>[a-z ]+) -->\n\n)(.*?)(\n<!-- end of figures -->)", re.DOTALL)
_ROOT = Path(__file__).parents[1]

_MODELS = {
    "mlp": "mlp, 1.9 M parameters",
    "cnn": "cnn, 0.2 M",
    "transformer": "transformer, 3.7 M",
    "wide": "wide linear layers, 64 M",
}
_SMALL = {
    "linear": ("one layer of 8 x 2", 2),
    "stack10": ("10 layers of 8 x 8", 20),
    "stack100": ("100 layers", 200),
    "stack500": ("500 layers", 1000),
    "resnet50": ("ResNet-50's list of tensors, a few elements each", 320),
    "encoder12": ("a transformer of 12 layers, 16 wide", 147),
}


def documents() -> Iterator[Path]:
    """The documents that have tables."""
    for path in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))):
        if _TABLE.search(path.read_text()):
            yield path


def filled(text: str, figures: Ratios) -> str:
    """A document with its tables as the figures have them."""
    return _TABLE.sub(lambda found: found[1] + TABLES[found["name"]](figures) + found[4], text)


def _cell(figures: Ratios, benchmark: str, what: str, *, rounds: bool = False) -> str:
    """A figure; nothing if it was not measured."""
    ratio = figures.get(benchmark, {}).get(what)
    if ratio is None:
        return ""
    spread = ratio["spread"]
    return f"{ratio['value']:.2f}" + (f" ({spread[0]:.2f}..{spread[1]:.2f})" if rounds and spread else "")


def _training(figures: Ratios) -> str:
    columns = ("model", "replicas", "over DDP (rounds)", "over one process", "start-up, of DDP's", "memory, of DDP's")
    rows = []
    for model, words in _MODELS.items():
        for size in (2, 4):
            ending = f"{model}, {size} replicas"
            over = _cell(figures, "training", f"examples/s of DDP, {ending}", rounds=True)
            names = ("examples/s of one process", "start-up of torchrun + DDP", "memory (PSS) of DDP")
            others = [_cell(figures, "training", f"{name}, {ending}") for name in names]
            rows.append([words if size == 2 else "", str(size), over, *others])
    return markdown(columns, rows)


def _small(figures: Ratios) -> str:
    columns = ("model", "tensors", "ms of a step", "with `num_steps=16`", "DDP's", "over DDP (rounds)")
    rows = []
    for model, (words, num_tensors) in _SMALL.items():
        programs = ("MirroredStrategy 2", "the same, num_steps=16 2", "DDP 2")
        times = [_cell(figures, "run_cost", f"ms of a step, {model}, {program}") for program in programs]
        over = _cell(figures, "run_cost", f"{model} over DDP, 2 replicas", rounds=True)
        rows.append([words, f"{num_tensors:,}", *times, over])
    return markdown(columns, rows)


def _workers(figures: Ratios) -> str:
    rows = []
    for size in (2, 4):
        whats = [f"2 workers of {size // 2}: examples/s of DDP, {model}, {size} replicas" for model in _MODELS]
        words = f"2 workers of {size // 2} replica{'s' if size > 2 else ''}"
        rows.append([words, *(_cell(figures, "cluster", what) for what in whats)])
    whats = [f"central storage: examples/s of mirrored, {model}, 4 replicas" for model in _MODELS]
    words = "`CentralStorageStrategy`, 4 replicas, over `MirroredStrategy`"
    rows.append([words, *(_cell(figures, "cluster", what) for what in whats)])
    return markdown(("", *_MODELS), rows)


def _ratios(benchmark: str, names: dict[str, str]) -> Callable[[Ratios], str]:
    """A table of a benchmark's ratios in words."""

    def table(figures: Ratios) -> str:
        rows = [[words, _cell(figures, benchmark, what, rounds=True)] for what, words in names.items()]
        return markdown(("what", "ratio (rounds)"), rows)

    return table


TABLES: dict[str, Callable[[Ratios], str]] = {
    "training": _training,
    "small tensors": _small,
    "workers": _workers,
    "keras": _ratios(
        "keras_fit",
        {
            "examples/s of plain Keras, cnn, 2 replicas": "cnn",
            "examples/s of plain Keras, mlp, 2 replicas": "mlp",
            "examples/s of plain Keras, mlp, 2 replicas, 8 steps in an execution": "mlp, `steps_per_execution=8`",
        },
    ),
    "parameter server": _ratios(
        "parameter_server",
        {
            f"{model}: over {peer}": f"{words}, over {'Hogwild' if peer == 'hogwild' else 'torch.distributed.rpc'}"
            for model, words in _MODELS.items()
            for peer in ("hogwild", "rpc")
        },
    ),
    "placement": _ratios(
        "placement",
        {
            f"{model}: step {what}": f"a step of the {model} {words}, over plain torch"
            for model in ("mlp", "cnn")
            for what, words in (
                ("in a scope", "in a scope of `sg.device`"),
                ("in a scope, with the log", "with the log"),
            )
        },
    ),
    "sessions": _ratios(
        "sessions",
        {
            f"{name}: speed of two shares over one": f"{words}, on two halves of 2 cores over one of them"
            for name, words in (("products", "two products of 1500 x 1500"), ("towers", "two towers"))
        },
    ),
    "loader": _ratios(
        "loader", {"examples/s of DDP, 2 loader workers, 2 replicas": "a program that waits for its loader, over DDP"}
    ),
}


def main() -> None:
    """Writes the tables of all documents."""
    for path in documents():
        path.write_text(filled(path.read_text(), newest()))


if __name__ == "__main__":
    main()
