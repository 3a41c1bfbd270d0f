"""Draws the batches of a call of several steps from the iterators among its arguments.

Owns how many steps are drawn before they run: as many as are asked for, but not more than fit into memory, and one at a
time where drawing takes random numbers, which the steps before must draw first.
"""

from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch

from stratagem import _tree
from stratagem.engine import random_state
from stratagem.inputs.reader import Pass
from stratagem.objects.per_replica import PerReplica
from stratagem.objects.step_arguments import NextBatch, StepArguments

MOST_STEPS: Final = 256
"""How many steps a call has at most: a program that asks for more gets them in several."""
_MOST_BYTES: Final = 64 * 2**20  # of batches that wait in this process


@final
class Drawing:
    """The steps of one `run(..., num_steps=...)`.

    Args:
        args: The arguments, in which each iterator stands for its next batch; or one iterator, whose batches they are.
        kwargs: The keyword arguments, likewise.
        num_steps: How many steps there are; fewer where an iterator ends.
    """

    def __init__(self, args: Any, kwargs: dict[str, Any], num_steps: int) -> None:
        self._num_steps = num_steps
        self._iterators: list[Pass] = []
        self._args, self._kwargs = _tree.map_only(Pass, self._place, (args, kwargs))
        # Programs that meet when they draw must draw equally often before they run.
        self._draws_together = any(each.meets_others for each in self._iterators)
        self._waiting: list[tuple[Any, ...]] = []
        self._num_drawn = self._num_done = 0
        self._has_ended = False
        self._exhausted: Pass | None = None
        self._error: Exception | None = None

    def _place(self, iterator: Pass) -> NextBatch:
        self._iterators.append(iterator)
        return NextBatch(len(self._iterators) - 1)

    def calls(self, most: int) -> Iterator[StepArguments]:
        """The arguments of the steps, in calls of at most so many; after each call, `note_done` tells of it."""
        while self._fill(most):
            yield StepArguments(self._args, self._kwargs, self._waiting)
        if self._exhausted is not None:
            self._exhausted.close()  # not before its last batch was used
        if self._error is not None:
            raise self._error

    def note_done(self, num_steps: int) -> None:
        """Takes note that the first steps of a call are done; the others are part of the next."""
        del self._waiting[:num_steps]
        self._num_done += num_steps

    def name_step(self, error: BaseException, place: int | None) -> None:
        """Adds to an error of a call in which of the steps it was."""
        if place is not None:
            number = self._num_done + place + 1
            error.add_note(
                f"in step {number} of the {self._num_steps} of this run; the steps before it are done, and what they "
                f"returned is lost"
            )

    def _fill(self, most: int) -> bool:
        """Draws until a call is full; whether it has any step."""
        if not self._waiting and self._num_drawn < self._num_steps:
            for each in self._iterators:
                each.prepare()
        before, num_bytes = self._random_state(most), 0
        while len(self._waiting) < most and self._num_drawn < self._num_steps and not self._has_ended:
            try:
                batches = self._draw()
            except Exception as error:  # it comes when its step does
                error.add_note(f"while reading the batch of step {self._num_drawn + 1} of the {self._num_steps}")
                self._error, self._has_ended = error, True
                break
            if batches is None:
                self._has_ended = True
                break
            self._waiting.append(batches)
            self._num_drawn += 1
            num_bytes += _num_bytes(batches)
            now = self._random_state(most)
            if self._draws_together:
                continue
            if num_bytes > _MOST_BYTES or (now is not None and before is not None and not now.is_same(before)):
                break
            before = now
        return bool(self._waiting)

    def _draw(self) -> tuple[Any, ...] | None:
        """The next batch of each iterator; nothing if one has none."""
        batches = []
        for each in self._iterators:
            try:
                batches.append(each.draw())
            except StopIteration:
                self._exhausted = each
                return None
        return tuple(batches)

    def _random_state(self, most: int) -> random_state.RandomState | None:
        """Where the random numbers are, if that matters to how many batches are drawn."""
        return random_state.current() if self._iterators and most > 1 and not self._draws_together else None


def _num_bytes(batches: tuple[Any, ...]) -> int:
    """How much memory batches take in this process."""
    held = [own for each in _tree.leaves(batches) if isinstance(each, PerReplica) for own in each.held]
    return sum(each.nbytes for each in held if isinstance(each, torch.Tensor | np.ndarray))
