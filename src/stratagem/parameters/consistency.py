"""How far workers may be apart: the one dial of a parameter server.

A consistency only decides; it neither waits nor counts. Who asks it on one machine is `local.gate` and
`engine.queued`, between machines `network.server.pacing`: a new one that decides by counts is a class here, and both
obey it.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from stratagem.errors import ParameterError, StrategyError

RateOf = Callable[[int], float]


@final
@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a worker stands among those that train.

    Args:
        version: How many pushes have been applied.
        pulled: The versions that others compute from who are in a step, the oldest first. Empty between machines, where
            nobody sees the steps of others.
        num_ahead: How many more pushes than the slowest it has made. 0 on one machine, where workers are given steps
            and none can fall behind.
    """

    version: int = 0
    pulled: Sequence[int] = ()
    num_ahead: int = 0


class Consistency(abc.ABC):
    """What a consistency decides. Its fields are whole numbers, and `rate_of` if it has one."""

    rate_of: RateOf | None = None
    can_wait: bool
    """Whether `may_begin` or `may_push` can be false: where it is not, nobody asks."""

    @abc.abstractmethod
    def may_begin(self, at: Progress) -> bool:
        """Whether a worker may begin its next step."""

    @abc.abstractmethod
    def may_push(self, at: Progress) -> bool:
        """Whether a worker's push may be applied. Between machines it is when it comes; its worker waits after it."""

    @abc.abstractmethod
    def num_gradients(self, num_workers: int) -> int | None:
        """How many gradients make one update where so many workers share a step; `None` if each makes its own."""

    @property
    def shares_steps(self) -> bool:
        """Whether workers share each global batch, and one update is made of it."""
        return self.num_gradients(1) is not None

    def needs_all(self, num_workers: int) -> bool:
        """Whether each step is one update of the gradients of all workers."""
        return self.num_gradients(num_workers) == num_workers

    def num_needed(self, num_workers: int) -> int:
        """How many gradients complete a step that so many workers share: at least one."""
        return max(1, self.num_gradients(num_workers) or 1)

    def numbers(self) -> dict[str, int]:
        """Its fields without `rate_of`."""
        return {name: value for name, value in vars(self).items() if name != "rate_of"}

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.numbers().items())})"


@final
@dataclasses.dataclass(frozen=True)
class Async(Consistency):
    """No worker waits: each push is applied when it arrives.

    Args:
        rate_of: A function of the staleness of a push that returns a factor for its learning rate; for example
            `lambda staleness: 1 / (1 + staleness)`. By default the factor is 1. Between machines a staleness above 127
            counts as 127.
    Example:
        >>> Async(rate_of=lambda staleness: 1 / (1 + staleness)).rate_of(3)
        0.25
    """

    rate_of: RateOf | None = None
    can_wait = False

    def __post_init__(self) -> None:
        _require_rule(self.rate_of)

    def may_begin(self, at: Progress) -> bool:
        return True

    def may_push(self, at: Progress) -> bool:
        return True

    def num_gradients(self, num_workers: int) -> int | None:
        return None


@final
@dataclasses.dataclass(frozen=True)
class BoundedStaleness(Consistency):
    """Limits staleness: a push may have missed at most `max_staleness` other pushes, and workers that are ahead wait.

    At most `max_staleness + 1` workers compute at a time. Between machines each worker counts its own pushes, and a
    worker waits while it is more than `max_staleness` pushes ahead of the slowest.

    Args:
        max_staleness: The largest number of other pushes between a worker's pull and its push.
        rate_of: A function of the staleness of a push that returns a factor for its learning rate. By default 1.
    Example:
        >>> BoundedStaleness(4).max_staleness
        4
    """

    max_staleness: int
    rate_of: RateOf | None = None
    can_wait = True

    def __post_init__(self) -> None:
        _require_count("max_staleness", self.max_staleness)
        _require_rule(self.rate_of)

    def may_begin(self, at: Progress) -> bool:
        return max(len(at.pulled), at.num_ahead) <= self.max_staleness

    def may_push(self, at: Progress) -> bool:
        """Only if all that are in a step could still push in time, the oldest first: so the oldest never waits."""
        following = enumerate(at.pulled, at.version + 1)
        return all(version - pulled <= self.max_staleness for version, pulled in following)

    def num_gradients(self, num_workers: int) -> int | None:
        return None


@final
@dataclasses.dataclass(frozen=True)
class Synchronous(Consistency):
    """Workers share each global batch, and their gradients make one update.

    Without backup workers the result equals that of one device. With backup workers, a step uses the gradients that
    arrive first and drops the slowest: no worker waits for a straggler.

    Args:
        backup_workers: The number of gradients that a step may leave out.
    Example:
        >>> Synchronous(backup_workers=1)
        Synchronous(backup_workers=1)
    """

    backup_workers: int = 0
    can_wait = False

    def __post_init__(self) -> None:
        _require_count("backup_workers", self.backup_workers)

    def may_begin(self, at: Progress) -> bool:
        return True

    def may_push(self, at: Progress) -> bool:
        return True

    def num_gradients(self, num_workers: int) -> int | None:
        return num_workers - self.backup_workers


KINDS: Final[dict[str, type[Consistency]]] = {each.__name__: each for each in (Async, BoundedStaleness, Synchronous)}
"""What another machine may ask for, by name."""


def chosen(consistency: Any, num_workers: int | None = None) -> Consistency:
    """What a program has asked for; `Async()` if nothing.

    Args:
        consistency: What it gave.
        num_workers: How many there are, if that is known.
    Raises:
        StrategyError: It is no consistency, or leaves no worker whose gradients count.
    """
    if consistency is None:
        return Async()
    if not isinstance(consistency, Consistency):
        raise StrategyError(
            f"consistency is Async(), BoundedStaleness(k) or Synchronous(backup_workers=b), got {consistency!r}"
        )
    needed = None if num_workers is None else consistency.num_gradients(num_workers)
    if needed is not None and needed < 1:
        raise StrategyError(
            f"{consistency} leaves none of {num_workers} workers whose gradients count; have more workers"
        )
    return consistency


def _require_rule(rate_of: RateOf | None) -> None:
    if rate_of is not None and not callable(rate_of):
        raise ParameterError(f"rate_of is a function of the staleness, such as lambda s: 1 / (1 + s), got {rate_of!r}")


def _require_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ParameterError(f"{name} is a whole number from 0 up, got {count!r}")
