"""Gradients that travel as bf16: strategies equal one device within bf16, and replicas each other exactly."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import StratagemWarning, StrategyError
from tests.contracts.strategies_under_test import (
    CHECKED,
    GPUS,
    STRICT,
    MakeStrategy,
    alone,
    opened_row,
    strict,
    workers,
)
from tests.contracts.test_strategies import UNEVEN, assert_equal_to_one_device, make_batches, make_net
from tests.steps import plain_step

BF16 = {"exchange_dtype": "bf16"}
_several_workers = functools.partial(sg.MultiWorkerMirroredStrategy, **BF16)
TWO, THREE = ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2"]
ROWS: dict[str, MakeStrategy] = {
    "bf16: mirrored 3": alone(lambda: sg.MirroredStrategy(THREE, **BF16)),
    "bf16: mirrored 2 torch": alone(lambda: sg.MirroredStrategy(TWO, cross_device_ops="torch", **CHECKED, **BF16)),
    "bf16: mirrored 2 to one": alone(lambda: sg.MirroredStrategy(TWO, cross_device_ops="to_one", **CHECKED, **BF16)),
    "bf16: central storage 2": alone(lambda: sg.CentralStorageStrategy(TWO, exchange_dtype=torch.bfloat16)),
    "bf16: 2 workers of 1": workers(1, _several_workers),
    "bf16: 2 workers of 2": workers(2, _several_workers),
}
STRICT_ROWS: dict[str, MakeStrategy] = {
    "strict bf16: mirrored 2": strict(alone(lambda: sg.MirroredStrategy(GPUS, **CHECKED, **BF16))),
    "strict bf16: 2 workers of 1": strict(workers(1, _several_workers, kind="gpu")),
}
if STRICT in os.environ:
    ROWS = {name: make for name, make in STRICT_ROWS.items() if name == os.environ[STRICT]}
# Sums are rounded as well, and not the parts alone.
ROUNDED = tuple(name for name in (*ROWS, *STRICT_ROWS) if name not in ("bf16: mirrored 3", "bf16: central storage 2"))
CLOSE = 2**-7


@pytest.fixture(scope="module", params=list(ROWS))
def strategy(
    request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sg.Strategy]:
    with opened_row(ROWS[request.param], request, tmp_path_factory.mktemp("workers")) as made:
        yield made


def test_training_with_clipping_equals_one_device_within_bf16(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build, UNEVEN, tolerance=CLOSE / 4)


class Sizes(nn.Module):
    """Parameters that travel in all ways: small, cut into windows, of another type, sparse."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.lengths = (5, 40_001, 1_200_000, 7)
        self.weights = nn.ParameterList(torch.randn(each, generator=generator) for each in self.lengths)
        self.wide = nn.Parameter(torch.randn(50_000, generator=generator, dtype=torch.float64))
        self.table = nn.Embedding(20, 3, sparse=STRICT not in os.environ)  # strict devices have no sparse tensors

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Gradients are rows of random numbers: the mean of the vectors of the examples."""
        device = self.wide.device
        vectors = [torch.stack([values(int(row), each) for row in rows]).mean(0) for each in self.lengths]
        dense = sum((each * vector.to(device)).sum() for each, vector in zip(self.weights, vectors, strict=True))
        wide = torch.stack([values(int(row), len(self.wide)).double() for row in rows]).mean(0)
        sparse = (self.table(rows + 3) * values(1, 3).to(device)).sum(1).mean()
        return dense + (self.wide * wide.to(device)).sum() + sparse


def values(seed: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def test_gradients_are_sums_of_rounded_parts_and_the_same_in_every_replica(
    strategy: sg.Strategy, request: pytest.FixtureRequest
) -> None:
    batch = torch.arange(strategy.num_replicas_in_sync * 2 - 1)  # uneven: the last replica has one row less
    with strategy.scope():
        model = Sizes()

    def step(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model.zero_grad()
        model.loss(rows).backward()
        gradients = [each.grad.to_dense() for each in model.parameters()]
        return *(each.unsqueeze(0).cpu() for each in gradients), torch.tensor([sg.get_replica_context().share])

    results = strategy.run(step, args=next(iter(strategy.distribute([(batch,)]))))
    *gradients, _ = strategy.gather(results)
    plain = Sizes()
    plain.loss(batch).backward()
    expected = [each.grad.to_dense() for each in plain.parameters()]
    for ours, theirs in zip(gradients, expected, strict=True):
        assert all(torch.equal(each, ours[0]) for each in ours)  # bit for bit, in every replica
        if theirs.dtype == torch.float64:
            torch.testing.assert_close(ours[0], theirs, rtol=1e-9, atol=1e-9)
            continue
        torch.testing.assert_close(ours[0], theirs, rtol=CLOSE, atol=CLOSE * float(theirs.abs().max()))
        assert not torch.allclose(ours[0], theirs, rtol=1e-6, atol=1e-6)  # they were rounded
        if request.node.callspec.params["strategy"] in ROUNDED and theirs.dim() == 1:
            assert torch.equal(ours[0], ours[0].bfloat16().float())


def test_several_steps_in_one_call_equal_single_ones(strategy: sg.Strategy) -> None:
    def train(num_steps: int | None) -> list[torch.Tensor]:
        with strategy.scope():
            model = make_net()
            step = plain_step(model, torch.optim.Adam(model.parameters(), lr=0.01))
        batches = iter(strategy.distribute(make_batches([7, 8, 1, 3])))
        for _ in range(4 // (num_steps or 1)):
            if num_steps:
                strategy.run(step, args=batches, num_steps=num_steps)
            else:
                strategy.run(step, args=next(batches))
        return [each.detach().cpu().clone() for each in model.parameters()]

    assert all(map(torch.equal, train(None), train(2)))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 3.4e38], ids=["not a number", "infinite", "too large for bf16"]
)
def test_gradients_that_are_not_finite_or_get_so_skip_the_update(strategy: sg.Strategy, value: float) -> None:
    with strategy.scope():
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(scale: float) -> None:
        optimizer.zero_grad()
        replica = sg.get_replica_context()
        factor = 0.0 if replica.replica_id_in_sync_group else 1 / replica.share  # it is all of replica 0
        ((weight * scale).sum() * factor).backward()
        optimizer.step()

    with pytest.warns(StratagemWarning, match="non-finite gradient in"):
        strategy.run(step, args=(value,))
    assert weight.tolist() == [1.0] * 3
    strategy.run(step, args=(1.0,))
    torch.testing.assert_close(weight.detach().cpu(), torch.full((3,), 0.9), rtol=CLOSE, atol=0)


@pytest.mark.parametrize("way", ["shared_memory", "torch"])
def test_gradients_that_all_replicas_set_alike_are_taken_as_they_are_where_losses_are_added_up(
    way: str, four_cpus: None
) -> None:
    with sg.MirroredStrategy(TWO, gradients="sum", cross_device_ops=way, **BF16) as strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(50_000))
            optimizer = torch.optim.SGD([weight], lr=1.0)

        def step() -> None:
            weight.grad = values(3, 50_000)
            optimizer.step()

        strategy.run(step)
        torch.testing.assert_close(-weight.detach(), values(3, 50_000), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("make", [sg.MirroredStrategy, sg.CentralStorageStrategy, sg.MultiWorkerMirroredStrategy])
def test_one_replica_changes_nothing(make: Any, four_cpus: None) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(300, 300)
    inputs = torch.randn(4, 300)
    plain(inputs).square().mean().backward()
    with make(["cpu:0"], **BF16) as strategy:
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Linear(300, 300)
        strategy.run(lambda: model(inputs).square().mean().backward())
        assert torch.equal(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("make", [sg.MirroredStrategy, sg.CentralStorageStrategy, sg.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp8", r"exchange_dtype is 'bf16' \(torch.bfloat16\), or None if .* own type, got 'fp8'"),
        (torch.float32, "got torch.float32"),
        (16, "got 16"),
        (True, "got True"),
        ("fp16", "in float16 gradients below 6e-8 become zero and those above 65504 infinite; use 'bf16'"),
        (torch.float16, "got torch.float16: in float16"),
    ],
)
def test_other_types_are_refused(make: Any, value: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make(["cpu:0"], exchange_dtype=value)
