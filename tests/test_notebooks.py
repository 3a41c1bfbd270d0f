"""Runs every notebook again: its cells give the outputs that the file shows."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests import documents, notebooks
from tests.cluster.nursery import Nursery

pytestmark = [pytest.mark.docs, pytest.mark.timeout(240)]

_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="session")
def kernels() -> Iterator[Nursery]:
    with notebooks.kernels() as nursery:
        yield nursery


@pytest.mark.parametrize("file", notebooks.FILES, ids=lambda file: file.stem)
def test_cells_give_the_outputs_that_the_notebook_shows(file: Path, kernels: Nursery) -> None:
    kept, found = notebooks.read(file), notebooks.execute(file, kernels)
    for old, new in zip(kept.cells, found.cells, strict=True):
        assert [described(each) for each in new.get("outputs", ())] == [described(each) for each in outputs_of(old)]
        assert_alike(notebooks.text_of(new), notebooks.text_of(old), old.metadata.get("tags", ()))


def test_cells_of_the_guide_run_in_a_kernel(kernels: Nursery, tmp_path: Path) -> None:
    blocks = documents.blocks_of((documents.ROOT / "docs/guides/notebooks.md").read_text())
    sources = [block.code for block in blocks]
    sources += [
        """
import sys, traceback
strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
try:
    strategy.run(failing, args=next(iter(strategy.distribute(data, global_batch_size=64))))
except ValueError as error:
    traceback.print_exception(error, file=sys.stdout)
strategy.close()
"""
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebooks.execute_cells(notebook, kernels, tmp_path)
    shown = [notebooks.text_of(cell) for cell in notebook.cells]
    assert "epoch 2: loss" in shown[1]
    assert shown[2].startswith("bad row 812 - raised in replica 1:\n")
    assert "configure them before that line, or after strategy.close()" in shown[3]
    assert 'Cell In[3], line 3, in failing\n    raise ValueError("bad row 812")\n' in shown[-1]
    assert "stratagem" not in shown[-1], "the library's frames are left out"


def outputs_of(cell: Any) -> list[Any]:
    assert not [each for each in cell.get("outputs", ()) if each.get("name") == "stderr"], cell.source
    return list(cell.get("outputs", ()))


def described(output: Any) -> tuple[str, ...]:
    return (output.output_type, output.get("name", ""), *sorted(output.get("data", ())))


def assert_alike(new: str, old: str, tags: list[str]) -> None:
    """The same words and whole numbers; others to the accuracy that processors of another kind leave.

    Numbers of a cell with the tag `varies` are those of one run; lines of one with `unordered` come in any order.
    """
    if "unordered" in tags:
        new, old = ("\n".join(sorted(each.splitlines())) for each in (new, old))
    assert words_of(new) == words_of(old)
    if "varies" not in tags:
        for found, kept in zip(_NUMBER.findall(new), _NUMBER.findall(old), strict=True):
            is_whole = kept.isdigit()
            assert float(found) == pytest.approx(float(kept), abs=0 if is_whole else 2e-3, rel=0 if is_whole else 1e-2)


def words_of(text: str) -> list[str]:
    return _NUMBER.sub("#", text).split()


@pytest.mark.parametrize("file", notebooks.FILES, ids=lambda file: file.stem)
def test_notebook_has_run_from_top_to_bottom_and_says_how_long_it_takes(file: Path) -> None:
    cells = notebooks.read(file).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert re.match(r"# \w", cells[0].source)
    assert re.search(r"(A few seconds|Under a minute) on two cores", cells[0].source)


_PAIRS = {
    "distributed_keras": "distributed_keras_baseline",
    "distributed_estimator": "distributed_estimator_baseline",
    "distributed_customized_training": "customized_training_baseline",
}


@pytest.mark.parametrize("name", _PAIRS)
def test_distributed_notebook_has_the_losses_of_the_baseline(name: str) -> None:
    plain, distributed = (shown_by(each) for each in (_PAIRS[name], name))
    losses, accuracies = losses_in(plain)
    assert len(losses) > 3
    assert accuracies[-1] > 90
    assert losses_in(distributed)[0] == pytest.approx(losses, abs=1e-3)


def losses_in(text: str) -> tuple[list[float], list[float]]:
    """The losses, and the accuracies in percent."""
    found = re.findall(r"(?:epoch|step) \d+: loss (\S+), (?:test )?accuracy (\S+)%", text)
    return [float(loss) for loss, _ in found], [float(accuracy) for _, accuracy in found]


def shown_by(name: str) -> str:
    return "\n".join(map(notebooks.text_of, notebooks.read(notebooks.FOLDER / f"{name}.ipynb").cells))


@pytest.mark.parametrize("name", _PAIRS)
def test_distributed_notebook_shows_how_it_differs_from_the_baseline(name: str) -> None:
    """What follows the last cell of the baseline, and the lines that only simulate, are no difference."""
    plain, distributed = (code_of(each) for each in (_PAIRS[name], name))
    changed = [line for line in difflib.ndiff(plain, distributed) if line.startswith(("-", "+"))]
    cells = notebooks.read(notebooks.FOLDER / f"{name}.ipynb").cells
    shown = cells[0].source.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert shown
    assert set(shown) <= {line[0] + line[2:] for line in changed}
    assert {line[1:] for line in shown if line[0] == "-"} == {line[2:] for line in changed if line[0] == "-"} - {""}


def code_of(name: str) -> list[str]:
    cells = notebooks.read(notebooks.FOLDER / f"{name}.ipynb").cells
    return [line for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()]
