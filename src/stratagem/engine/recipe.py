"""What a strategy chooses, and what each replica must know of one call.

A `Recipe` says where variables lie, when replicas agree, how tensors travel and who updates. A `Call`
is what `run` sends; it has one `Step` for each pass over a batch.
"""

import dataclasses
import enum
import functools
from typing import Any, Final, TypeAlias

import torch

from stratagem.collectives.exchange_dtype import travels_as
from stratagem.engine.sync import SumGradients, SyncPlan
from stratagem.errors import StrategyError
from stratagem.objects import state_diff
from stratagem.objects.surroundings import Surroundings, surroundings
from stratagem.processes.packing import plain_bytes, plain_values
from stratagem.variables.copies import Written

_OPTIONS = {
    "unused": ("zero", "error"),
    "on_nonfinite": ("skip", "raise", "apply"),
}


_EVERY_STEP = SumGradients()
CHECK_COPIES_EVERY: Final = 100  # steps


class Exchange(enum.Enum):
    """Where variables lie and how tensors travel between the replicas of one machine."""

    SHARED_MEMORY = "shared_memory"  # variables lie once, in pages that all share
    TORCH = "torch"  # each replica has its own; torch.distributed sums while the backward pass runs
    TO_ONE = "to_one"  # each has its own; replica 0 sums
    COLLECTIVE = "collective"  # each has its own; shared memory carries what they exchange


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What all replicas of a strategy on one machine have in common.

    Args:
        size: How many they are.
        exchange: Where their variables lie and how tensors travel.
        sync: When they agree.
        unused: What a gradient that only some replicas have means: `zero` in the others, or an `error`.
        on_nonfinite: What a gradient that is not finite does to its step: `skip`, `raise` or `apply`.
        check_copies_every: After how many steps replicas compare their copies of the parameters; 0 for never.
        exchange_dtype: The type as which gradients travel; `None` for their own.
        kept_on: The torch device on which variables are kept and updated once; empty if each replica updates.
        by_servers: Whether parameter servers update: replica 0 gives them the gradients, and gets new values.
        sizes: How many replicas each machine has; empty if there is one machine.
        machine: The number of this one.
    """

    size: int
    exchange: Exchange = Exchange.SHARED_MEMORY
    sync: SyncPlan = _EVERY_STEP
    unused: str = "zero"
    on_nonfinite: str = "skip"
    check_copies_every: int = CHECK_COPIES_EVERY
    exchange_dtype: torch.dtype | None = None
    kept_on: str = ""
    by_servers: bool = False
    sizes: tuple[int, ...] = ()
    machine: int = 0

    @functools.cached_property
    def num_machines(self) -> int:
        return len(self.sizes) or 1

    @functools.cached_property
    def total(self) -> int:
        """How many replicas there are on all machines."""
        return sum(self.sizes) or self.size

    @functools.cached_property
    def first(self) -> int:
        """The number of this machine's first replica among all."""
        return sum(self.sizes[: self.machine])

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The type as which gradients of a type travel; where there is one replica none do."""
        return travels_as(dtype, self.exchange_dtype) if self.total > 1 else dtype

    def counts_alone(self, counts_here: tuple[int, ...]) -> tuple[int, ...]:
        """How many examples replicas of all machines have, where others are not asked: about as many as these."""
        like_here = max(1, round(sum(counts_here) / len(counts_here)))
        last = self.total - self.first - len(counts_here)
        return (*[like_here] * self.first, *counts_here, *[like_here] * last)

    def __post_init__(self) -> None:
        for name, allowed in _OPTIONS.items():
            if getattr(self, name) not in allowed:
                raise StrategyError(f"{name} is one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        every: Any = self.check_copies_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise StrategyError(
                f"check_copies_every is a whole number of steps, or 0 for no comparison of copies, got {every!r}"
            )


@dataclasses.dataclass(frozen=True)
class Step:
    """One pass over one batch.

    Args:
        number: Which step, from 1.
        counts: How many examples each replica has, on all machines; `None` if they are not on a distributed batch.
        sums: Whether its backward passes sum gradients over the replicas.
    """

    number: int
    counts: tuple[int, ...] | None
    sums: bool = True


@dataclasses.dataclass(frozen=True)
class Call:
    """What a replica must know of one call of `strategy.run`, besides the function.

    Args:
        steps: Its steps, one after the other.
        num_alone: How many steps replicas that train alone have taken since they last agreed.
        num_skipped: How many updates in a row were skipped before it.
        seed: The seed of the controller's random numbers, if it has changed.
        changes: What the controller changed in distributed objects, besides tensors.
        written: The tensors that it wrote to, where they travel by value.
        surroundings: What torch and the process are set to around the call.
    """

    steps: tuple[Step, ...]
    num_alone: int
    num_skipped: int
    seed: int | None
    changes: state_diff.Snapshot
    written: Written
    surroundings: Surroundings = dataclasses.field(default_factory=surroundings)

    @property
    def number(self) -> int:
        """That of its first step."""
        return self.steps[0].number

    def told(self) -> "Told":
        """What a child is told of it: in every run, and most often nothing was changed or written."""
        steps = [(each.number, each.counts, each.sums) for each in self.steps]
        plain = steps, self.num_alone, self.num_skipped, self.seed, tuple(self.surroundings)
        return plain_bytes(plain), self.changes or None, None if self.written == _NOTHING_WRITTEN else self.written

    @classmethod
    def of(cls, told: "Told") -> "Call":
        """The call, in a child."""
        steps, num_alone, num_skipped, seed, surrounding = plain_values(told[0])
        made = tuple([Step(*each) for each in steps])
        written = told[2] or _NOTHING_WRITTEN
        return cls(made, num_alone, num_skipped, seed, told[1] or {}, written, Surroundings(*surrounding))


Told: TypeAlias = tuple[bytes, state_diff.Snapshot | None, Written | None]
"""A call on its way: what is plain of it as bytes, and what was changed and written, if anything was."""

_NOTHING_WRITTEN = Written()
