"""A shard applies a push whole or not at all, and at most once."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from stratagem.errors import ParameterError
from stratagem.parameters.partitioning import FixedShardsPartitioner, make_plan
from stratagem.parameters.protocol import OptimizerSpec, Push, Rows, ShardPlan, Variable, Verdict, describe_optimizer
from stratagem.parameters.shard import Shard

WEIGHT, TABLE = Variable("weight", (4, 3), torch.float32), Variable("table", (10, 2), torch.float32, sparse=True)
SGD = OptimizerSpec("SGD", ((("weight", "table"), {"lr": 0.5, "momentum": 0.0}),))


def plan_of(num_shards: int = 1) -> ShardPlan:
    return make_plan([WEIGHT, TABLE], num_shards, FixedShardsPartitioner(num_shards))


def new_shard(**options: object) -> Shard:
    values = {"weight": torch.zeros(4, 3), "table": torch.zeros(10, 2)}
    return Shard(plan_of(), 0, [SGD], values, **options)  # type: ignore[arg-type]


def push_of(shard: Shard, incarnation: int, number: int = 1, **fields: object) -> Push:
    given = {"gradients": {"weight": torch.ones(4, 3)}, "version": shard.version, **fields}
    return Push(0, incarnation, number, **given)  # type: ignore[arg-type]


def test_push_is_applied_once_however_often_it_comes() -> None:
    shard = new_shard()
    push = push_of(shard, shard.admit(0))
    assert shard.push(push).is_applied
    assert shard.push(push).verdict is Verdict.DUPLICATE
    pulled = shard.pull()
    assert pulled.version == 1
    assert torch.equal(pulled.values["weight"], torch.full((4, 3), -0.5))


def test_old_incarnation_is_fenced() -> None:
    shard = new_shard()
    old = shard.admit(0)
    new = shard.admit(0)
    assert shard.push(push_of(shard, old)).verdict is Verdict.FENCED
    assert shard.push(push_of(shard, new)).is_applied
    shard.fence(0)
    assert shard.push(push_of(shard, new, 2)).verdict is Verdict.FENCED


def test_rows_change_only_those_rows() -> None:
    shard = new_shard()
    rows = Rows(torch.tensor([1, 7]), torch.ones(2, 2))
    assert shard.push(push_of(shard, shard.admit(0), gradients={"table": rows})).is_applied
    pulled = shard.pull(names=[], rows={"table": torch.tensor([7, 0])}).values["table"]
    assert isinstance(pulled, Rows)
    assert pulled.values.tolist() == [[-0.5, -0.5], [0.0, 0.0]]
    assert shard.pull(["table"]).values["table"].count_nonzero() == 4


def test_staleness_counts_pushes_between_and_may_scale_the_rate() -> None:
    shard = new_shard(rate_of=lambda staleness: 1 / (1 + staleness))
    life = shard.admit(0)
    assert [shard.push(push_of(shard, life, number, version=0)).staleness for number in (1, 2)] == [0, 1]
    assert torch.equal(shard.pull().values["weight"], torch.full((4, 3), -0.75))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gradients": {"weight": torch.ones(3, 4)}}, "(4, 3)"),
        ({"gradients": {"weight": torch.ones(4, 3, dtype=torch.float64)}}, "float64"),
        ({"gradients": {"weight": torch.full((4, 3), torch.nan)}}, "not finite"),
        ({"gradients": {"other": torch.ones(1)}}, "no variable 'other'"),
        ({"gradients": {"table": Rows(torch.tensor([3, 10]), torch.ones(2, 2))}}, "rows 0 to 9"),
        ({"gradients": {"table": Rows(torch.tensor([3, 3]), torch.ones(2, 2))}}, "each only once"),
        ({"gradients": {"table": Rows(torch.tensor([3]), torch.ones(2, 2))}}, "(1, 2)"),
        ({"version": 1}, "version 1"),
        ({"version": -1}, "version -1"),
        ({"number": 2}, "1 is next, got 2"),
        ({"optimizer": 1}, "no optimizer 1"),
        ({"options": ({"lr": float("inf")},)}, "lr=inf"),
        ({"options": ({"params": None},)}, "no option 'params'"),
        ({"assigned": {"weight": torch.ones(4, 3)}}, "is trained"),
    ],
)
def test_push_that_breaks_a_rule_changes_nothing(fields: dict[str, object], reason: str) -> None:
    shard = new_shard()
    push = dataclasses.replace(push_of(shard, shard.admit(0)), **fields)
    outcome = shard.push(push)
    assert outcome.verdict is Verdict.REFUSED
    assert reason in outcome.reason
    assert shard.version == 0
    assert not any(value.count_nonzero() for value in shard.state_dict()["values"].values())


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adam,
        functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.5),
        torch.optim.Rprop,
        torch.optim.RMSprop,
    ],
)
def test_two_shards_with_parts_of_a_variable_do_what_one_optimizer_does(kind: Any) -> None:
    torch.manual_seed(0)
    values = {"weight": torch.randn(4, 3), "table": torch.randn(10, 2)}
    plain = [torch.nn.Parameter(value.clone()) for value in values.values()]
    adam = kind(plain, lr=0.1)
    spec = describe_optimizer(adam, dict(zip(map(id, plain), values, strict=True)))
    plan = plan_of(2)
    shards = [
        Shard(plan, number, [spec], {piece.name: piece.of(values[piece.name]) for piece in pieces})
        for number, pieces in enumerate(plan.shards)
    ]
    lives = [shard.admit(0) for shard in shards]
    for step in range(1, 4):
        for parameter in plain:
            parameter.grad = torch.randn_like(parameter)
        adam.param_groups[0]["lr"] *= 0.5
        adam.step()
        whole = dict(zip(values, [each.grad for each in plain], strict=True))
        for shard, life in zip(shards, lives, strict=True):
            own = {name: piece.of(whole[name]) for name, piece in shard.pieces.items()}
            push = Push(0, life, step, shard.version, own, options=({"lr": adam.param_groups[0]["lr"]},))
            assert shard.push(push).is_applied
    for name, parameter in zip(values, plain, strict=True):
        parts = [shards[number].pull([name]).values[name] for number, _ in plan.places(name)]
        assert torch.allclose(torch.cat(parts), parameter)


def test_state_goes_on_where_it_was_and_needs_new_lives() -> None:
    momentum = OptimizerSpec("SGD", ((("weight",), {"lr": 0.5, "momentum": 0.9}),))
    plan = make_plan([WEIGHT], 1)
    first = Shard(plan, 0, [momentum], {"weight": torch.zeros(4, 3)})
    life = first.admit(0)
    first.push(push_of(first, life))
    second = Shard(plan, 0, [momentum], {"weight": torch.ones(4, 3)})
    second.load_state_dict(first.state_dict())
    first.push(push_of(first, life, 2))
    assert second.push(push_of(second, 1)).verdict is Verdict.FENCED
    assert second.push(push_of(second, second.admit(0))).is_applied
    assert torch.equal(first.pull().values["weight"], second.pull().values["weight"])
    with pytest.raises(ParameterError, match="same shard"):
        second.load_state_dict({"version": 0, "values": {}, "optimizers": []})


def test_options_count_in_a_shard_that_gets_no_gradient() -> None:
    shard = new_shard()
    life = shard.admit(0)
    assert shard.push(push_of(shard, life, gradients={}, options=({"lr": 0.25},))).is_applied
    assert shard.push(push_of(shard, life, 2)).is_applied
    assert torch.equal(shard.pull(["weight"]).values["weight"], torch.full((4, 3), -0.25))


def test_optimizer_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(ParameterError, match="'LBFGS'; it knows SGD"):
        Shard(make_plan([], 1), 0, [OptimizerSpec("LBFGS", ())], {})
