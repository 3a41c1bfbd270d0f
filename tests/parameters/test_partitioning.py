"""Where variables come to lie."""

import pytest
import torch

from stratagem.errors import ParameterError
from stratagem.parameters.partitioning import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    make_plan,
)
from stratagem.parameters.protocol import Variable


def variable(name: str, *shape: int) -> Variable:
    return Variable(name, shape, torch.float32)


def test_variables_are_spread_by_size() -> None:
    plan = make_plan([variable("a", 10), variable("b", 60), variable("c", 30), variable("d", 25)], 2)
    assert [[piece.name for piece in shard] for shard in plan.shards] == [["b"], ["a", "c", "d"]]
    assert all(piece.is_whole for shard in plan.shards for piece in shard)


@pytest.mark.parametrize(
    ("partitioner", "num_parts"),
    [
        (None, 1),
        (MinSizePartitioner(min_shard_bytes=1000), 4),
        (MinSizePartitioner(min_shard_bytes=2000), 2),
        (MinSizePartitioner(min_shard_bytes=1, max_shards=3), 3),
        (MaxSizePartitioner(max_shard_bytes=1500), 3),
        (MaxSizePartitioner(max_shard_bytes=10), 4),
        (FixedShardsPartitioner(2), 2),
    ],
)
def test_partitioners_cut_into_whole_rows(partitioner: Partitioner | None, num_parts: int) -> None:
    plan = make_plan([variable("table", 101, 10), variable("number")], 4, partitioner)
    places = plan.places("table")
    assert len(places) == num_parts
    assert len({shard for shard, _ in places}) == num_parts  # no shard has two parts of one variable
    whole = torch.arange(1010.0).view(101, 10)
    assert torch.equal(torch.cat([piece.of(whole) for _, piece in places]), whole)
    assert len(plan.places("number")) == 1


def test_names_differ() -> None:
    with pytest.raises(ParameterError, match="'a' came twice"):
        make_plan([variable("a", 1), variable("a", 2)], 1)
