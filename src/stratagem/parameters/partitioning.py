"""Decides which variable, or which of its rows, lies in which shard.

Variables go to the shard that has the least so far, the largest first. A partitioner cuts large ones
into parts of whole rows before that; only optimizers that treat every element by itself can follow.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol, final

from stratagem.errors import ParameterError
from stratagem.parameters.protocol import Piece, ShardPlan, Variable


class Partitioner(Protocol):
    """Says into how many parts a variable is cut."""

    def num_parts(self, variable: Variable, num_shards: int) -> int:
        """From 1 up; at most the number of rows and of shards count."""


@final
@dataclasses.dataclass(frozen=True)
class MinSizePartitioner:
    """Cuts a variable into as many parts as there are shards, but no part is smaller than a size.

    Args:
        min_shard_bytes: The least number of bytes of a part.
        max_shards: The largest number of parts; by default the number of shards.
    Example:
        >>> MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)
        MinSizePartitioner(min_shard_bytes=262144, max_shards=2)
    """

    min_shard_bytes: int = 256 * 1024
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _require_counts(min_shard_bytes=self.min_shard_bytes, max_shards=self.max_shards)

    def num_parts(self, variable: Variable, num_shards: int) -> int:
        return min(max(1, variable.num_bytes // self.min_shard_bytes), self.max_shards or num_shards)


@final
@dataclasses.dataclass(frozen=True)
class MaxSizePartitioner:
    """Cuts a variable into so many parts that none is larger than a size, but not more than there are shards.

    Args:
        max_shard_bytes: The largest number of bytes of a part.
        max_shards: The largest number of parts; by default the number of shards.
    Example:
        >>> MaxSizePartitioner(max_shard_bytes=64 << 20)
        MaxSizePartitioner(max_shard_bytes=67108864, max_shards=None)
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _require_counts(max_shard_bytes=self.max_shard_bytes, max_shards=self.max_shards)

    def num_parts(self, variable: Variable, num_shards: int) -> int:
        return min(-(-variable.num_bytes // self.max_shard_bytes) or 1, self.max_shards or num_shards)


@final
@dataclasses.dataclass(frozen=True)
class FixedShardsPartitioner:
    """Cuts every variable that has enough rows into the same number of parts.

    Args:
        num_shards: The number of parts.
    Example:
        >>> FixedShardsPartitioner(2)
        FixedShardsPartitioner(num_shards=2)
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_counts(num_shards=self.num_shards)

    def num_parts(self, variable: Variable, num_shards: int) -> int:
        return self.num_shards


def make_plan(variables: Sequence[Variable], num_shards: int, partitioner: Partitioner | None = None) -> ShardPlan:
    """Spreads variables over shards by size; the same variables always give the same plan.

    Args:
        variables: All of them; names must differ.
        num_shards: From 1 up.
        partitioner: Cuts large ones; by default none is cut.
    Raises:
        ParameterError: A name comes twice, or there is no shard.
    """
    _require_counts(num_shards=num_shards)
    names = [variable.name for variable in variables]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ParameterError(f"each variable has a name of its own, {twice!r} came twice; name modules differently")
    order = {name: place for place, name in enumerate(names)}
    # The largest first, to the shard with the least: of one variable no two parts come to the same shard.
    loads = [(0, number) for number in range(num_shards)]
    shards: list[list[Piece]] = [[] for _ in range(num_shards)]
    for variable in sorted(variables, key=lambda each: (-each.num_bytes, order[each.name])):
        parts = _cut(variable, num_shards, partitioner)
        chosen = [heapq.heappop(loads) for _ in parts]
        for piece, (load, number) in zip(parts, chosen, strict=True):
            shards[number].append(piece)
            heapq.heappush(
                loads, (load + (piece.last - piece.first) * variable.num_bytes // max(1, variable.num_rows), number)
            )
    return ShardPlan(
        tuple(variables), tuple(tuple(sorted(each, key=lambda piece: order[piece.name])) for each in shards)
    )


def _cut(variable: Variable, num_shards: int, partitioner: Partitioner | None) -> list[Piece]:
    wanted = partitioner.num_parts(variable, num_shards) if partitioner is not None else 1
    rows, count = variable.num_rows, max(1, min(wanted, num_shards, variable.num_rows))
    bounds = [rows * place // count for place in range(count + 1)]
    return [Piece(variable, first, last) for first, last in itertools.pairwise(bounds)]


def _require_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ParameterError(f"{name} is a whole number from 1 up, got {count!r}")
