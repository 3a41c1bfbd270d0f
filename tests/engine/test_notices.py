"""Who is called the slowest, and how often."""

import time
import warnings
from collections.abc import Sequence

import pytest

from stratagem.engine.notices import Stragglers


def num_warnings(stragglers: Stragglers, runs: Sequence[Sequence[float]], counts: Sequence[int] | None = None) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for busy_s in runs:
            stragglers.note(busy_s, counts)
    return len(caught)


def test_one_that_is_always_far_slower_is_named_once() -> None:
    assert num_warnings(Stragglers(), [(1.0, 3.0, 1.1)] * 30) == 1


def test_it_is_named_again_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stragglers, now = Stragglers(), time.monotonic()
    assert num_warnings(stragglers, [(1.0, 3.0)] * 20) == 1
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert num_warnings(stragglers, [(1.0, 3.0)]) == 1


@pytest.mark.parametrize(
    "runs",
    [
        [(1.0, 3.0)] * 19 + [(1.0, 1.0)] + [(1.0, 3.0)] * 19,
        [(1.0, 3.0), (3.0, 1.0)] * 30,
        [(1.0, 1.9)] * 30,
        [(0.001, 0.004)] * 30,
        [(1.0,)] * 30,
    ],
    ids=["now and then", "in turns", "a little", "for a moment", "one replica"],
)
def test_others_are_not(runs: Sequence[Sequence[float]]) -> None:
    assert num_warnings(Stragglers(), runs) == 0


def test_replicas_without_examples_are_not_compared() -> None:
    assert num_warnings(Stragglers(), [(3.0, 0.1)] * 30, (2, 0)) == 0
    assert num_warnings(Stragglers(), [(3.0, 0.1, 1.0)] * 30, (2, 0, 2)) == 1
