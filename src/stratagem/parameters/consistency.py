"""How far workers may be apart: the one dial of a parameter server.

The public values, and the waits that they mean for a worker on one machine.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import final

from stratagem.errors import ParameterError
from stratagem.parameters.local.board import Board
from stratagem.parameters.local.locks import Locks

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1e-4, 2e-3

RateOf = Callable[[int], float]


@final
@dataclasses.dataclass(frozen=True)
class Async:
    """Nobody waits: a push is applied when it comes.

    Args:
        rate_of: The factor of the learning rate of a push, by its staleness; for example
            `lambda staleness: 1 / (1 + staleness)`. By default 1. Between machines what it gives for 127 holds for all
            beyond.
    Example:
        >>> Async(rate_of=lambda staleness: 1 / (1 + staleness)).rate_of(3)
        0.25
    """

    rate_of: RateOf | None = None

    def __post_init__(self) -> None:
        _require_rule(self.rate_of)


@final
@dataclasses.dataclass(frozen=True)
class BoundedStaleness:
    """No push is applied that has missed more than so many others: workers that are ahead wait.

    At most `max_staleness + 1` workers compute at a time. Between machines each worker counts its own pushes, and one
    that is more than `max_staleness` of them ahead of the slowest waits.

    Args:
        max_staleness: How many pushes of others may be applied between a worker's pull and its push.
        rate_of: The factor of the learning rate of a push, by its staleness. By default 1.
    Example:
        >>> BoundedStaleness(4).max_staleness
        4
    """

    max_staleness: int
    rate_of: RateOf | None = None

    def __post_init__(self) -> None:
        _require_count("max_staleness", self.max_staleness)
        _require_rule(self.rate_of)


@final
@dataclasses.dataclass(frozen=True)
class Synchronous:
    """Workers share each global batch, and one update is made of all their gradients.

    Without backup workers that equals one device. With some, the first gradients of a step count and the
    slowest are dropped: nobody waits for a straggler.

    Args:
        backup_workers: How many gradients of a step may be missing.
    Example:
        >>> Synchronous(backup_workers=1)
        Synchronous(backup_workers=1)
    """

    backup_workers: int = 0

    def __post_init__(self) -> None:
        _require_count("backup_workers", self.backup_workers)


Consistency = Async | BoundedStaleness | Synchronous


@final
class Gate:
    """The waits of one worker, so that no push is staler than allowed.

    Workers in a step are on the board with the version that they pulled. One may begin, or push, only if all
    that are in a step could still push in time, the oldest first: so the oldest never waits for anybody.

    Args:
        max_staleness: The bound.
        worker: Which worker.
        board: Where all see who is in a step.
        locks: Those of the machine.
        number: Which of them is the gate's.
    """

    def __init__(self, max_staleness: int, worker: int, board: Board, locks: Locks, number: int) -> None:
        self._max_staleness = max_staleness
        self._worker = worker
        self._board = board
        self._locks = locks
        self._number = number

    def enter(self) -> None:
        """Waits until a step may begin, and puts it on the board."""
        self.passed(lambda: len(self._others()) <= self._max_staleness, self._note)

    def push(self, push: Callable[[], None]) -> None:
        """Waits until a push may be made, and makes it."""
        self.passed(self._may_push, push)

    def passed(self, may: Callable[[], bool], then: Callable[[], None]) -> None:
        """Waits until something is allowed and does it, with nobody else between the two."""
        wait_s = _FIRST_WAIT_S
        while True:
            with self._locks.held(self._number):
                if may():
                    then()
                    return
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _note(self) -> None:
        self._board.in_flight[self._worker] = self._board.version + 1

    def _others(self) -> list[int]:
        """The versions that others in a step have pulled, the oldest first."""
        found = self._board.in_flight.copy()
        found[self._worker] = 0
        return sorted((found[found > 0] - 1).tolist())

    def _may_push(self) -> bool:
        then = self._board.version + 1
        return all(then + place - version <= self._max_staleness for place, version in enumerate(self._others()))


def _require_rule(rate_of: RateOf | None) -> None:
    if rate_of is not None and not callable(rate_of):
        raise ParameterError(f"rate_of is a function of the staleness, such as lambda s: 1 / (1 + s), got {rate_of!r}")


def _require_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ParameterError(f"{name} is a whole number from 0 up, got {count!r}")
