"""Copies of parameters that drift apart are found and named, wherever replicas have copies of their own."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import DriftError, StrategyError
from stratagem.variables import drift
from tests.cluster.conftest import token_file
from tests.cluster.tasks import TaskProcess, workers

__all__ = ["token_file"]

pytestmark = pytest.mark.usefixtures("four_cpus")

CPUS = ["cpu:0", "cpu:1", "cpu:2"]
EVERY = 4


def rank() -> int:
    replica = sg.get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(CPUS, cross_device_ops="to_one", check_copies_every=EVERY) as made:
        made.run(int)  # its replicas are there before the first test
        yield made


def train(strategy: sg.Strategy, change: Callable[[nn.Module, Any, torch.Tensor], None], **options: Any) -> nn.Module:
    """Trains for one check, with something of one's own in each step."""
    with strategy.scope():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        change(model, optimizer, loss.detach())
        optimizer.step()

    batch = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    for _ in range(EVERY):
        strategy.run(step, args=(next(iter(strategy.distribute([batch]))),), **options)
    return model


def rate_from_the_local_loss(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * float(loss)


@torch.no_grad()
def noise(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    if rank():
        model[1].weight.add_(torch.randn(1, 4), alpha=0.1 * rank())


def nothing(model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
    pass


def run_until_a_check(strategy: sg.Strategy, step: Callable[[], Any]) -> None:
    for _ in range(EVERY):
        strategy.run(step)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def assert_copies_are_equal(strategy: sg.Strategy, model: nn.Module) -> None:
    first, *others = strategy.local_results(strategy.run(weights, args=(model,)))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["torch", "to_one"])
def test_rate_from_the_local_loss_is_found(way: str) -> None:
    with (
        sg.MirroredStrategy(CPUS, cross_device_ops=way, check_copies_every=EVERY) as strategy,
        pytest.raises(DriftError) as caught,
    ):
        train(strategy, rate_from_the_local_loss)
    assert "have drifted apart by step" in str(caught.value)
    assert "replicas 1, 2 and replica 0 differ by" in str(caught.value)
    assert "of the largest value, and so have 3 more parameters" in str(caught.value)
    assert "check_copies_every=0" in str(caught.value)


def test_noise_names_the_parameter_and_the_next_run_goes_on_from_replica_0(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(3, 1)

    @torch.no_grad()
    def step() -> None:
        if rank() == 2:
            model.weight.add_(1.0)

    before = model.weight.detach().clone()
    said = r"those of 'weight' .*: replica 2 and replica 0 differ by \d\.\de[+-]0\d of"
    with pytest.raises(DriftError, match=said):
        run_until_a_check(strategy, step)
    assert torch.equal(model.weight, before)
    assert_copies_are_equal(strategy, model)


def test_steps_of_one_call_are_counted(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(3, 1)

    @torch.no_grad()
    def step(x: torch.Tensor) -> None:
        model.weight.add_(float(rank()))

    data = iter(strategy.distribute([torch.ones(3, 3)] * EVERY))
    with pytest.raises(DriftError, match="'weight'"):
        strategy.run(step, args=(data,), num_steps=EVERY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_put_right(strategy: sg.MirroredStrategy, dtype: torch.dtype) -> None:
    with strategy.scope():
        model = nn.Linear(3, 1, dtype=dtype)
        nn.init.constant_(model.weight, 1.0)

    @torch.no_grad()
    def step() -> None:
        model.weight.fill_(1.0 + rank() * torch.finfo(dtype).eps / 2)

    run_until_a_check(strategy, step)
    run_until_a_check(strategy, int)
    assert_copies_are_equal(strategy, model)


def test_training_alike_is_no_drift(strategy: sg.MirroredStrategy) -> None:
    for _ in range(2):
        assert_copies_are_equal(strategy, train(strategy, nothing))


def test_zero_ends_the_comparisons() -> None:
    with sg.MirroredStrategy(CPUS[:2], cross_device_ops="to_one", check_copies_every=0) as strategy:
        train(strategy, noise)


def test_one_replica_has_nobody_to_drift_from() -> None:
    with sg.MirroredStrategy(CPUS[:1], cross_device_ops="to_one", check_copies_every=1) as strategy:
        train(strategy, rate_from_the_local_loss)


def test_outer_optimizer_that_differs_is_found() -> None:
    def outer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0 + rank())

    with (
        sg.LocalSGDStrategy(3, outer, CPUS[:2], check_copies_every=1) as strategy,
        pytest.raises(DriftError, match="replica 1 and replica 0 differ by"),
    ):
        train(strategy, nothing)


def test_replicas_that_train_alone_may_differ_in_between() -> None:
    with sg.LocalSGDStrategy(3, devices=CPUS[:2], check_copies_every=2) as strategy:
        train(strategy, noise)


@pytest.mark.parametrize("every", [-1, 2.5, True, "often", None])
def test_number_of_steps_is_checked(every: Any) -> None:
    for make in (sg.MirroredStrategy, sg.CentralStorageStrategy, sg.MultiWorkerMirroredStrategy):
        with pytest.raises(StrategyError, match=f"check_copies_every is a whole number of steps, .*, got {every!r}"):
            make(CPUS[:2], check_copies_every=every)
    with pytest.raises(StrategyError, match="check_copies_every is a whole number"):
        sg.LocalSGDStrategy(3, devices=CPUS[:2], check_copies_every=every)


def test_workers_that_drift_apart_are_named(token_file: Any, forked_tasks: None) -> None:
    program, cluster = "tests.faults.worker_program", workers(2)
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(contextlib.closing(TaskProcess(program=program))) for _ in range(2)]
        for index, task in enumerate(tasks):
            task.send(f"begin({cluster!r}, {index}, num_replicas={2 - index}, check_copies_every=3)")
        for task in tasks:
            assert task.value() == "begun"
        for task in tasks:
            task.send("train(3)")
        assert tasks[0].value() == tasks[1].value()
        for task in tasks:
            task.send("train_at_a_rate_of_ones_own()")
        for task in tasks:
            kind, message = task.error()
            assert kind == "DriftError", message
            assert "worker 1 and worker 0 differ by" in message


# The parts


def test_checksum_changes_with_any_element_and_their_order() -> None:
    tensors = [torch.zeros(3), torch.randn(5, 4).t(), torch.ones(2, dtype=torch.bfloat16), torch.tensor(2 + 1j)]
    tensors += [torch.tensor([True]), torch.empty(0), torch.arange(3), torch.randn(drift._PIECE + 5)]
    cpu = torch.device("cpu")
    expected = int(drift.checksum(tensors, cpu))
    assert expected == int(drift.checksum([each.clone() for each in tensors], cpu))
    for number, tensor in enumerate(tensors):
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} - {-1} if tensor.numel() else ():
            other = tensor.clone().contiguous()
            flat = other.view(-1)
            flat[place] = ~flat[place] if other.dtype is torch.bool else flat[place] + 1
            changed = [*tensors[:number], other, *tensors[number + 1 :]]
            assert int(drift.checksum(changed, cpu)) != expected
    swapped = tensors[1].clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert int(drift.checksum([tensors[0], swapped, *tensors[2:]], cpu)) != expected


@pytest.mark.parametrize("numbers", [[5, 5, 5], [2**63 - 1, 2**63 - 1], [-1, -1]])
def test_rows_carry_checksums_as_they_are(numbers: list[int]) -> None:
    def differ(numbers: list[int]) -> bool:
        rows = [drift.row_for_all(torch.tensor(each), place, len(numbers)) for place, each in enumerate(numbers)]
        return bool(drift.differ_in(torch.stack(rows).sum(0)))

    assert not differ(numbers)
    for bit in (0, 15, 16, 31, 32, 62):
        assert differ([*numbers[:-1], numbers[-1] ^ (1 << bit)])


def test_difference_is_a_part_of_the_largest_value() -> None:
    one = torch.tensor([1.0, -4.0, float("nan"), float("inf")])
    assert drift.difference(one, one) == 0
    assert drift.difference(one + torch.tensor([0.5, 0.0, 0.0, 0.0]), one) == 0.125
    assert drift.difference(torch.zeros(2), torch.tensor([0.0, float("nan")])) == float("inf")
    assert drift.difference(torch.ones(1), torch.zeros(1)) == float("inf")
    assert drift.difference(torch.tensor([3, 4]), torch.tensor([4, 4])) == 0.25
    assert drift.difference(torch.tensor([1j]), torch.tensor([2j])) == 0.5
