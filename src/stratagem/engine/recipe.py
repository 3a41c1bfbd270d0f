"""What all replicas of a strategy have in common, and what each must know of one run."""

import dataclasses
from typing import Any

from stratagem.errors import StrategyError
from stratagem.objects import state_diff
from stratagem.variables.copies import Written

_OPTIONS = {
    "gradients": ("mean", "sum"),
    "unused": ("zero", "error"),
    "on_nonfinite": ("skip", "raise", "apply"),
    "cross_device_ops": ("shared_memory", "torch", "to_one"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all replicas of a strategy on one machine have in common.

    Args:
        size: How many they are.
        gradients, unused, on_nonfinite, cross_device_ops: As the strategy was told.
        sizes: How many replicas each machine has; empty if there is one machine.
        machine: The number of this one.
        kept_on: Where variables are kept once, for a torch device's name; empty if each replica has its own.
    """

    size: int
    gradients: str = "mean"
    unused: str = "zero"
    on_nonfinite: str = "skip"
    cross_device_ops: str = "shared_memory"
    sizes: tuple[int, ...] = ()
    machine: int = 0
    kept_on: str = ""

    @property
    def num_machines(self) -> int:
        return len(self.sizes) or 1

    @property
    def total(self) -> int:
        """How many replicas there are on all machines."""
        return sum(self.sizes) or self.size

    @property
    def first(self) -> int:
        """The number of this machine's first replica among all."""
        return sum(self.sizes[: self.machine])

    def __post_init__(self) -> None:
        for name, allowed in _OPTIONS.items():
            if getattr(self, name) not in allowed:
                raise StrategyError(f"{name} is one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a replica must know of one call of `strategy.run`, besides the function.

    Args:
        number: Which run, from 1.
        counts: How many examples each replica has, on all machines; `None` if the run is not on a distributed batch.
        seed: The seed of the controller's random numbers, if it has changed.
        changes: What the controller changed in distributed objects, besides tensors.
        written: The tensors that it wrote to, where they travel by value.
        surroundings: What torch and the process are set to around the run.
    """

    number: int
    counts: tuple[int, ...] | None
    seed: int | None
    changes: state_diff.Snapshot
    written: Written
    surroundings: state_diff.Surroundings = dataclasses.field(default_factory=state_diff.surroundings)

    def __reduce__(self) -> tuple[Any, ...]:
        # It travels in every run: most often nothing was written, and plain values cost least.
        written = None if self.written == _NOTHING_WRITTEN else self.written
        plain = (self.number, self.counts, self.seed, self.changes, written)
        return _rebuilt, (*plain, state_diff.flattened(self.surroundings))


_NOTHING_WRITTEN = Written()


def _rebuilt(number: int, counts: Any, seed: int | None, changes: state_diff.Snapshot, written: Any, plain: Any) -> Run:
    return Run(number, counts, seed, changes, written or _NOTHING_WRITTEN, state_diff.restored(plain))
