"""Ratios of benchmarks are kept by version; one has fallen where all rounds are worse than all rounds before."""

import json
from pathlib import Path

import pytest

from benchmarks import documents, history


def ratio(value: float, low: float, high: float, *, at_most: bool = False) -> dict[str, object]:
    return {"value": value, "spread": (low, high), "at_most": at_most}


@pytest.mark.parametrize(
    ("before", "now", "has_fallen"),
    [
        (ratio(1.3, 1.2, 1.4), ratio(1.1, 1.0, 1.19), True),
        (ratio(1.3, 1.2, 1.4), ratio(1.1, 1.0, 1.21), False),
        (ratio(1.3, 1.2, 1.4), ratio(1.6, 1.5, 1.7), False),
        (ratio(0.3, 0.2, 0.4, at_most=True), ratio(0.5, 0.45, 0.6, at_most=True), True),
        (ratio(0.3, 0.2, 0.4, at_most=True), ratio(0.1, 0.1, 0.1, at_most=True), False),
        ({"value": 2.0, "spread": None, "at_most": False}, ratio(1.0, 0.9, 1.1), True),
    ],
)
def test_what_all_rounds_share_is_noise(before: dict[str, object], now: dict[str, object], has_fallen: bool) -> None:
    assert history.fell(before, now) is has_fallen


def test_ratios_are_kept_by_version_and_fallen_ones_come_first(tmp_path: Path) -> None:
    results, kept = tmp_path / "results", tmp_path / "history"
    results.mkdir()
    both = {"fast": ratio(1.3, 1.2, 1.4), "slow": ratio(1.0, 0.9, 1.1)}
    written = [{"what": what, **each, "bound": None, "met": None} for what, each in both.items()]
    (results / "one.json").write_text(json.dumps({"targets": written}))
    (results / "other.json").write_text(json.dumps({"seconds": [1.0]}))  # has no ratios
    path = history.record("0.1.0", kept, results)
    before = json.loads(path.read_text())
    now = {"one": {"fast": ratio(1.3, 1.25, 1.35), "slow": ratio(0.5, 0.4, 0.6), "new": ratio(1.0, 1.0, 1.0)}}
    assert history.rows(before, now) == [
        ["one: slow", "1.00 (0.90..1.10)", "0.50 (0.40..0.60)", "NO"],
        ["one: fast", "1.30 (1.20..1.40)", "1.30 (1.25..1.35)", "yes"],
    ]


def test_the_tables_of_the_documents_are_those_of_the_figures() -> None:
    paths = list(documents.documents())
    assert {"README.md", "performance.md"} <= {path.name for path in paths}
    for path in paths:
        assert documents.filled(path.read_text(), history.newest()) == path.read_text(), (
            f"{path} has other figures than benchmarks/history; python -m benchmarks.documents writes them"
        )


def test_a_table_has_what_was_measured_and_leaves_the_rest_empty() -> None:
    text = "a\n\n<!-- figures: keras -->\n\nold\n<!-- end of figures -->\n\nb\n"
    figures = {"keras_fit": {"examples/s of plain Keras, cnn, 2 replicas": ratio(1.234, 1.1, 1.5)}}
    new = documents.filled(text, figures)
    assert "| cnn | 1.23 (1.10..1.50) |\n| mlp |  |\n" in new
    assert documents.filled(new, figures) == new
    assert new.startswith("a\n")
    assert new.endswith("<!-- end of figures -->\n\nb\n")
