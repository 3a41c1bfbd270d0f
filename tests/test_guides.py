"""The guides name what exists, and leave nothing out: names, options of strategies, errors and what else they are."""

import inspect
import re
from pathlib import Path

import pytest

import stratagem as sg
from stratagem import errors

FOLDER = Path(__file__).parents[1] / "docs/guides"
GUIDE = (FOLDER / "when_something_fails.md").read_text()
# A name, perhaps with where it is found; then what else it is.
ROWS = re.findall(r"^\| `(\w+)`(?: \([^|]*\))? \| ([^|]*) \|", GUIDE, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        (sg.MirroredStrategy, "custom_loops"),
        (sg.MultiWorkerMirroredStrategy, "several_machines"),
        (sg.RayCluster, "several_machines"),
        (sg.LocalSGDStrategy, "local_sgd"),
        (sg.TPUStrategy, "tpu"),
        (sg.estimator.RunConfig, "estimator"),
        (sg.SessionConfig, "graphs_and_sessions"),
    ],
)
def test_guides_name_every_option(kind: type, page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text()
    assert not [name for name in inspect.signature(kind).parameters if not re.search(rf"`{name}\b", text)]


def classes() -> dict[str, type[BaseException]]:
    found = {
        name: each for name, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__
    }
    return {**found, "OutOfMemoryError": sg.OutOfMemoryError}


def test_every_error_and_warning_has_a_row() -> None:
    named = [name for name, _ in ROWS]
    assert len(named) == len(set(named))
    assert set(named) == classes().keys() - {"StratagemError"}
    assert "`sg.StratagemError`" in GUIDE


def test_rows_say_what_else_an_error_is() -> None:
    for name, text in ROWS:
        kind = classes()[name]
        if issubclass(kind, errors.StratagemWarning):
            continue
        said = set(re.findall(r"`(?:\w+\.)*(\w+)`", text))
        ancestors = {each.__name__ for each in kind.__mro__}
        assert said <= ancestors, name
        # A class that Python or torch has is the reader's to know of; of the family only what can be caught instead.
        outside = {each.__name__ for each in kind.__bases__ if not issubclass(each, errors.StratagemError)}
        assert outside - {"Exception"} <= said, name
