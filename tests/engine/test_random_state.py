"""The state of all random generators, taken and put back."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.engine import random_state
from stratagem.engine.random_state import RandomState


def draw() -> tuple[float, ...]:
    """One number of each generator, and a half of each pair that a generator makes."""
    return random.expovariate(1.0), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with random_state.kept():
        yield


FORMS: dict[str, Callable[[RandomState], RandomState]] = {
    "itself": lambda state: state,
    "bytes": lambda state: random_state.from_bytes(random_state.to_bytes(state)),
    "values": lambda state: random_state.from_values(random_state.to_values(state)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_drawn", [0, 1, 2])
def test_generators_draw_the_same_again(form: str, num_drawn: int) -> None:
    random_state.seed(7)
    for _ in range(num_drawn):  # with and without the second half of a pair
        draw()
    state = FORMS[form](random_state.current())
    drawn = [draw() for _ in range(3)]
    random_state.restore(state)
    assert [draw() for _ in range(3)] == drawn


def test_block_leaves_the_generators_alone() -> None:
    before = random_state.current()
    with random_state.kept():
        random_state.seed(3)
        draw()
    assert random_state.current().is_same(before)


@pytest.mark.parametrize(
    "draw_one", [random.random, np.random.rand, np.random.randn, lambda: torch.rand(()), random_state.draw]
)
def test_state_differs_after_any_generator_has_drawn(draw_one: Callable[[], Any]) -> None:
    before = random_state.current()
    assert random_state.current().is_same(before)
    draw_one()
    assert not random_state.current().is_same(before)


def test_seed_decides_what_is_drawn() -> None:
    drawn = []
    for seed in (5, 5, 6):
        random_state.seed(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]
