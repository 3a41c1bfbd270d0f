"""Random numbers of the replicas: reproducible, and different in each.

The main program of one machine is replica 0, and what it draws inside a run is what one device would
draw. On several machines the main programs must draw alike (they shuffle the same data), so that
there the first replica of each has a stream of its own inside runs.
"""

import contextlib
import functools
import zlib
from collections.abc import Iterator
from typing import final

import torch

_STEP = 1_000_003
_EVERYONES = contextlib.nullcontext()


def seed_of(seed: int, replica: int) -> int:
    """The seed of one replica."""
    return seed + _STEP * replica


class _Seeds:
    """How often the program has seeded torch, and whether that is noticed yet."""

    number = 0
    noticed = False


_seeds = _Seeds()


def _notice_seeds() -> None:
    """Counts calls of `torch.manual_seed`, once for the process: a state that is seeded anew may look the same."""
    if _seeds.noticed:
        return
    _seeds.noticed, original = True, torch.manual_seed

    @functools.wraps(original)
    def manual_seed(seed: int) -> torch.Generator:
        _seeds.number += 1
        return original(seed)

    torch.manual_seed = manual_seed


@final
class RandomNumbers:
    """The random numbers of a main program and of the replica in it.

    Args:
        replica: The number of that replica among those of all machines.
        apart: Whether it has a stream of its own.
        on_device: Whether replicas draw on an accelerator, so that the state of the host does not show it.
    """

    def __init__(self, replica: int, *, apart: bool, on_device: bool = False) -> None:
        self._replica = replica
        self._apart = apart
        self._counts_seeds = apart or on_device
        self._after_run: torch.Tensor | None = None
        self._stream = torch.get_rng_state()
        self._num_seeded = 0
        if self._counts_seeds:
            _notice_seeds()

    def new_seed(self) -> int | None:
        """A seed for the other replicas whenever the program has drawn or seeded random numbers."""
        state = torch.get_rng_state()
        seeded_anew, self._num_seeded = self._num_seeded != _seeds.number, _seeds.number
        if (
            not (seeded_anew and self._counts_seeds)
            and self._after_run is not None
            and torch.equal(state, self._after_run)
        ):
            return None
        return zlib.crc32(state.numpy().tobytes())

    def note_run(self) -> None:
        """Remembers the state after a run, to see whether the program draws before the next."""
        self._after_run = torch.get_rng_state()

    def of_replica(self, seed: int | None) -> contextlib.AbstractContextManager[None]:
        """Inside the block, random numbers are those of the replica."""
        return self._own_stream(seed) if self._apart else _EVERYONES

    @contextlib.contextmanager
    def _own_stream(self, seed: int | None) -> Iterator[None]:
        outside = torch.get_rng_state()
        if seed is None:
            torch.set_rng_state(self._stream)
        else:
            torch.default_generator.manual_seed(seed_of(seed, self._replica))
        try:
            yield
        finally:
            self._stream = torch.get_rng_state()
            torch.set_rng_state(outside)
