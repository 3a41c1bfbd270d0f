"""Synchronous steps of workers that push by themselves: whose gradients make the mean, and who waits for whom."""

import time
from typing import Any

import pytest
import torch

from stratagem.errors import StrategyError
from stratagem.parameters.local.gradient_slots import PER_RUN, GradientSlots, Round
from stratagem.parameters.local.shared_variables import SharedMemoryOfShards


def make_slots(num_workers: int) -> GradientSlots:
    memory = SharedMemoryOfShards.create(1)
    return GradientSlots.create([torch.zeros(2)], num_workers, memory.board, memory.locks, 2)


class Applied:
    """What was applied, and when; closes rounds as a worker does."""

    def __init__(self, slots: GradientSlots) -> None:
        self._slots = slots
        self.means: list[Any] = []

    def __call__(self, means: list[torch.Tensor | None], number: int) -> None:
        self.means.append([None if each is None else each.tolist() for each in means])
        self._slots._board.closed_round = number


def test_worker_without_gradients_completes_a_round_and_does_not_count_in_its_mean() -> None:
    slots = make_slots(3)
    applied = Applied(slots)
    first = Round(PER_RUN, 2, 4)
    slots.put(0, first, [None])
    assert slots.arrive(0, first._replace(weight=0), applied)
    slots.put(1, first, [torch.ones(2)])
    assert not slots.arrive(1, first, applied)
    assert applied.means == [[[1.0, 1.0]]]


def test_gradients_of_an_earlier_round_never_count() -> None:
    slots = make_slots(2)
    applied = Applied(slots)
    first = Round(PER_RUN, 2, 1)
    for own in (first, first.following()):
        slots.put(1, own, [torch.ones(2)])
        if own is first:
            slots.put(0, own, [torch.full((2,), 99.0)])
        assert slots.arrive(0, own, applied)
        assert not slots.arrive(1, own, applied)
    assert applied.means == [[[50.0, 50.0]], [[0.5, 0.5]]]


def test_wait_for_a_round_ends_with_an_error_that_names_the_update() -> None:
    slots = make_slots(3)
    second = Round(PER_RUN, 2, 1).following()
    slots.put(0, second, [torch.ones(2)])
    assert slots.arrive(0, second, Applied(slots))
    with pytest.raises(StrategyError, match="update 2 of a step needs 2 workers, 1 came in time"):
        slots.wait(second, time.monotonic())
