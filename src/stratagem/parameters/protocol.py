"""What workers and shards say to each other, on one machine or between several.

Only values: a shard applies them (`shard`, or shared memory on one machine), a transport carries
them. A variable has a name that is unique in its model. Large ones are cut along their first
dimension; everywhere here "rows" are the elements of that dimension, and a number (shape `()`) has
one row.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any, final

import torch

from stratagem.errors import ParameterError

Plain = bool | int | float | str | None | tuple[float, ...]
"""What an option of an optimizer may be: it travels without any code."""


@final
@dataclasses.dataclass(frozen=True)
class Variable:
    """A tensor that workers share.

    Args:
        name: Unique among all variables of a training, as `model.state_dict()` has it.
        shape: Of the whole variable.
        dtype: Of its elements; gradients have the same.
        sparse: Whether its gradients come as rows (`torch.nn.Embedding(sparse=True)`).
        trained: Whether it gets gradients; others (buffers) are only read and written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool = False
    trained: bool = True

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@final
@dataclasses.dataclass(frozen=True)
class Piece:
    """The rows of one variable that lie in one shard: `first` to `last`, without `last`."""

    variable: Variable
    first: int
    last: int

    @property
    def name(self) -> str:
        return self.variable.name

    @property
    def is_whole(self) -> bool:
        return self.first == 0 and self.last == self.variable.num_rows

    @property
    def shape(self) -> tuple[int, ...]:
        """What its tensor looks like in the shard."""
        return (self.last - self.first, *self.variable.shape[1:]) if self.variable.shape else ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These rows of a tensor of the whole variable, as a view."""
        return whole[self.first : self.last] if self.variable.shape else whole


@final
@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Which rows of which variable lie in which shard; the same in all tasks.

    Args:
        variables: All, in the order in which they were made.
        shards: For each shard its pieces, at most one of each variable.
    """

    variables: tuple[Variable, ...]
    shards: tuple[tuple[Piece, ...], ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Variable]:
        """All variables."""
        return {each.name: each for each in self.variables}

    def places(self, name: str) -> list[tuple[int, Piece]]:
        """The shards that have a part of a variable, in the order of its rows."""
        found = [(number, piece) for number, pieces in enumerate(self.shards) for piece in pieces if piece.name == name]
        return sorted(found, key=lambda each: each[1].first)


@final
@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a piece.

    Args:
        indices: Which, counted from the first row of the piece: int64, rising, none twice.
        values: Of these rows, in their order.
    """

    indices: torch.Tensor
    values: torch.Tensor


@final
@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer without code: a class of `torch.optim` and its options.

    Args:
        kind: The name of the class, one of `shard.OPTIMIZERS`.
        groups: For each group the names of its variables and its options (`lr`, `momentum`, ...).
    """

    kind: str
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Plain]], ...]


@final
@dataclasses.dataclass(frozen=True)
class Push:
    """One update that a worker asks a shard for.

    Args:
        worker: Which worker.
        incarnation: Which life of it, as `Shard.admit` gave it.
        number: Its pushes to this shard are numbered from 1; each is applied at most once.
        version: Of the shard, when it was pulled for the computation of these gradients.
        gradients: By name of variable, for this shard's pieces: a whole tensor or some rows. Variables
            without a gradient are left out; the optimizer then leaves them as they are.
        optimizer: Which optimizer of the shard applies them.
        options: What the worker's optimizer has in its groups now (a scheduler changes `lr`), or nothing new.
        assigned: Values that replace what the shard has, by name: of variables that are not trained.
    """

    worker: int
    incarnation: int
    number: int
    version: int
    gradients: Mapping[str, "torch.Tensor | Rows"]
    optimizer: int = 0
    options: tuple[Mapping[str, Plain], ...] | None = None
    assigned: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@final
@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a shard gives: all values belong to one version.

    Args:
        version: How many pushes have been applied.
        values: By name: the piece's tensor, or those of its rows that were asked for. Copies.
    """

    version: int
    values: Mapping[str, "torch.Tensor | Rows"]


@final
class Verdict(enum.Enum):
    """What became of a push."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # a push of this number was judged before; nothing is done again
    FENCED = "fenced"  # its worker has a newer incarnation, or was never admitted
    STALE = "stale"  # computed from a version that is older than the shard allows
    REFUSED = "refused"  # it breaks a rule, which `reason` tells


@final
@dataclasses.dataclass(frozen=True)
class PushOutcome:
    """What applying a push tells. Unless it was applied, the shard is as before, bit for bit.

    Args:
        verdict: What became of it.
        version: The shard's, afterwards.
        staleness: How many pushes were applied between the pull that it was computed from and itself.
        reason: Why it was not applied.
    """

    verdict: Verdict
    version: int
    staleness: int = 0
    reason: str = ""

    @property
    def is_applied(self) -> bool:
        return self.verdict is Verdict.APPLIED


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerSpec:
    """An optimizer as values.

    Args:
        optimizer: One of torch's.
        names: The names of its parameters' variables, by `id`.
    Raises:
        ParameterError: An option is more than a plain value.
    """
    return OptimizerSpec(
        type(optimizer).__name__,
        tuple(
            (tuple(names[id(each)] for each in group["params"]), options)
            for group, options in zip(optimizer.param_groups, plain_options(optimizer), strict=True)
        ),
    )


def plain_options(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Plain], ...]:
    """The options in the groups of an optimizer, as plain values."""
    return tuple(
        {key: _plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    )


def _plain(key: str, value: Any) -> Plain:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple) and all(isinstance(each, bool | int | float) for each in value):
        return tuple(map(_builtin, value))
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return _builtin(value)
    raise ParameterError(
        f"an option of an optimizer on parameter servers is a number, a text or a tuple of numbers, "
        f"got {key}={value!r}; leave it at its default"
    )


def _builtin(number: bool | int | float) -> bool | int | float:
    """A number as one of Python's own: NumPy's look alike."""
    return next(kind(number) for kind in (bool, int, float) if isinstance(number, kind))
