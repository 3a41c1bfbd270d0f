"""How buffers are chosen to be joined, and what cannot be."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import StrategyError
from stratagem.variables.aggregation import Aggregation, chosen_in
from stratagem.variables.buffers import held_by


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor(0))
        self.register_buffer("phase", torch.tensor(1j))
        self.register_buffer("mean", torch.zeros(2))


def chosen(module: nn.Module) -> dict[str, Aggregation]:
    held = held_by([module])
    found = chosen_in(held)
    return {key: found[id(buffer)] for _, key, buffer in held if id(buffer) in found}


def test_what_is_chosen_last_counts_and_travels_with_the_module() -> None:
    module = Counting()
    sg.aggregate(module, "rows", "sum")
    sg.aggregate(module, "mean", "max")
    sg.aggregate(module, "rows", "first")
    expected = {"rows": Aggregation.FIRST, "mean": Aggregation.MAX}
    assert chosen(module) == chosen(copy.deepcopy(module)) == expected


@pytest.mark.parametrize("way", ["shared_memory", "torch"])
def test_first_is_the_first_replica_with_rows(way: str, four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=way) as strategy:
        with strategy.scope():
            module = Counting()

        def step(x: torch.Tensor) -> None:
            module.rows.fill_(10 + sg.get_replica_context().replica_id_in_sync_group)

        parts, found = [torch.ones(0, 1), torch.ones(3, 1)], []
        for own in (parts, parts[::-1]):
            (batch,) = strategy.distribute_from_function(lambda _, own=own: own)
            strategy.run(step, args=(batch,))
            found.append(int(module.rows))
        assert found == [11, 10]


def counting(rows: nn.Module) -> Any:
    weight = nn.Parameter(torch.zeros(1))

    def step(x: torch.Tensor) -> None:
        rows.rows += len(x)
        (weight * x).mean().backward()

    return step


def test_counters_of_replicas_that_train_alone(four_cpus: None) -> None:
    """Rows that stand in do not count; what was counted before a sum is chosen does not count again."""
    with sg.LocalSGDStrategy(sync_every=2, devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            summed, late = Counting(), Counting()
            steps = counting(summed), counting(late)
        sg.aggregate(summed, "rows", "sum")

        def run(number: int, num_rows: int) -> None:
            strategy.run(steps[number], args=next(iter(strategy.distribute([(torch.ones(num_rows, 1),)]))))

        for num_rows in (1, 2):
            run(0, num_rows)
        assert summed.rows == 3
        for _ in range(4):
            run(1, 4)
        before = int(late.rows)
        sg.aggregate(late, "rows", "sum")
        for _ in range(2):
            run(1, 4)
        assert late.rows == before + 8


@pytest.mark.parametrize(
    ("name", "how", "match"),
    [
        ("cols", "sum", r"Counting has no buffer 'cols' to aggregate; its buffers: rows, phase, mean"),
        ("inner.rows", "sum", "has no buffer 'inner.rows'"),
        ("rows", "average", "no aggregation named 'average' for 'rows'; known: sum, mean, min, max, first"),
        ("rows", "own", "no aggregation named 'own'"),
        ("rows", "mean", "'rows' is torch.int64, which has no mean; use 'sum' or 'first'"),
        ("phase", "min", "'phase' is torch.complex64, which has no min"),
    ],
)
def test_what_cannot_be_aggregated_is_refused_at_once(name: str, how: Any, match: str) -> None:
    with pytest.raises(StrategyError, match=match):
        sg.aggregate(Counting(), name, how)
