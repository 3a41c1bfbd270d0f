"""Runs the Python of every document, as its reader would: `make test-docs`."""

import os
from pathlib import Path

import pytest

from tests import documents
from tests.cluster import nursery

pytestmark = [pytest.mark.docs, pytest.mark.timeout(180), pytest.mark.usefixtures("forked_tasks")]

PROGRAMS = {
    f"{page.relative_to(documents.ROOT)}:{number}": program
    for page in documents.PAGES
    for number, program in enumerate(documents.programs_of(page.read_text()), 1)
}
OF_KERAS = {name for name, program in PROGRAMS.items() if "import keras" in program}


def run_page(name: str, folder: Path, keras_programs: nursery.Nursery | None = None) -> None:
    """Runs a program of a page, in a folder of its own; lines of its tracebacks are those of the page."""
    program = folder / "page.py"
    program.write_text(PROGRAMS[name])
    environment = {**os.environ, "COLUMNS": "100"}
    done = nursery.run([program], 170, environment, cwd=folder, nursery=keras_programs)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - OF_KERAS))
def test_code_of_the_page_runs(name: str, tmp_path: Path) -> None:
    run_page(name, tmp_path)


@pytest.mark.parametrize("name", sorted(OF_KERAS))
def test_code_of_the_page_runs_with_keras(name: str, tmp_path: Path, keras_programs: nursery.Nursery) -> None:
    run_page(name, tmp_path, keras_programs)
