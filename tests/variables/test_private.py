"""What only replicas with variables of their own do; what all do is in tests/contracts."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem import _torch
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.engine.recipe import Exchange
from stratagem.errors import CollectiveError, StrategyError
from stratagem.variables import buckets

pytestmark = pytest.mark.usefixtures("four_cpus")


WAYS = ("torch", "to_one")


@pytest.fixture(scope="module", params=WAYS)
def strategy(request: pytest.FixtureRequest, four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], cross_device_ops=request.param) as made:
        made.run(int)  # its replicas are there before the first test
        yield made


@pytest.fixture(params=WAYS)
def breakable(request: pytest.FixtureRequest) -> Iterator[sg.MirroredStrategy]:
    """For tests in which a run fails, which connects the replicas anew."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], cross_device_ops=request.param) as made:
        yield made


def rank() -> int:
    replica = sg.get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def use_small_buckets(num_bytes: int = 64) -> None:
    buckets.BUCKET_BYTES = num_bytes


@pytest.fixture
def small_buckets(strategy: sg.MirroredStrategy) -> Iterator[None]:
    usual = buckets.BUCKET_BYTES
    strategy.run(use_small_buckets)
    yield
    strategy.run(use_small_buckets, args=(usual,))


def make_net(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[each for _ in range(depth) for each in (nn.Linear(5, 5), nn.Tanh())])


BATCH = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))


def everywhere(strategy: sg.Strategy, look: Callable[[], Any]) -> tuple[Any, ...]:
    return strategy.local_results(strategy.run(look))


def assert_alike(strategy: sg.Strategy, model: nn.Module) -> None:
    """All replicas have the same parameters, buffers and gradients, to the last bit."""

    def look() -> list[torch.Tensor | None]:
        gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        return [each.detach().clone() for each in (*model.parameters(), *model.buffers())] + gradients

    first, *others = everywhere(strategy, look)
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert (one is None and another is None) or torch.equal(one, another)


def plain_gradients(model: nn.Module, *losses: torch.Tensor) -> list[torch.Tensor | None]:
    for loss in losses:
        loss.backward()
    return [each.grad for each in model.parameters()]


def assert_gradients(model: nn.Module, expected: list[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.usefixtures("small_buckets")
def test_many_buckets_give_the_gradients_of_one_device(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = make_net()
    expected = plain_gradients(plain := make_net(), plain(BATCH).square().mean())
    (batch,) = strategy.distribute([BATCH])
    strategy.run(lambda inputs: model(inputs).square().mean().backward(), args=(batch,))
    assert_gradients(model, expected)
    assert_alike(strategy, model)


@pytest.mark.usefixtures("small_buckets")
def test_sums_begin_while_the_backward_pass_goes_on(strategy: sg.MirroredStrategy) -> None:
    if strategy._replicas._recipe.exchange is not Exchange.TORCH:
        pytest.skip("only torch.distributed sums beside the computation")
    with strategy.scope():
        model = make_net()

    def step() -> list[int]:
        begun: list[int] = []
        start = TorchDistributed.start_all_reduce
        seen: list[int] = []

        def counting(self: TorchDistributed, tensor: torch.Tensor) -> Any:
            begun.append(tensor.numel())
            return start(self, tensor)

        TorchDistributed.start_all_reduce = counting  # type: ignore[method-assign]
        try:
            hidden = model[0](torch.ones(2, 5))
            hidden.register_hook(lambda _: seen.append(len(begun)))
            model[1:](hidden).sum().backward()
        finally:
            TorchDistributed.start_all_reduce = start  # type: ignore[method-assign]
        return [*seen, len(begun)]

    for before_the_last, in_all in everywhere(strategy, step):
        assert (before_the_last, in_all) == (3, 4)


@pytest.mark.usefixtures("small_buckets")
def test_gradient_that_comes_twice_in_one_pass_equals_one_device(strategy: sg.MirroredStrategy) -> None:
    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        # Each segment is a pass within the pass, and all of them use the same parameters.
        hidden = inputs.clone().requires_grad_()
        for _ in range(3):
            hidden = checkpoint(model, hidden, use_reentrant=True)
        return hidden.square().mean()

    with strategy.scope():
        model = make_net()
    expected = plain_gradients(plain := make_net(), loss(plain, BATCH))
    (batch,) = strategy.distribute([BATCH])
    strategy.run(lambda inputs: loss(model, inputs).backward(), args=(batch,))
    assert_gradients(model, expected)
    assert_alike(strategy, model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_without_sync_before_and_after_one_with_sync_equal_one_device(
    strategy: sg.MirroredStrategy, set_to_none: bool
) -> None:
    def step(model: nn.Module, inputs: torch.Tensor, no_sync: Callable[[], Any]) -> None:
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            with no_sync():
                model(inputs).mean().backward()
            model(inputs * 2).square().mean().backward()
            with no_sync():
                model[-2:](inputs).mean().backward()  # type: ignore[index]
            model(inputs * 3).mean().backward()

    plain = make_net()
    step(plain, BATCH, contextlib.nullcontext)
    with strategy.scope():
        model = make_net()
    (batch,) = strategy.distribute([BATCH])
    strategy.run(lambda inputs: step(model, inputs, sg.get_strategy().no_sync), args=(batch,))
    assert_gradients(model, [each.grad for each in plain.parameters()])
    assert_alike(strategy, model)


def test_summed_gradient_is_left_alone_by_a_pass_without_sync_that_does_not_reach_it(
    strategy: sg.MirroredStrategy,
) -> None:
    with strategy.scope():
        one, other = make_net(), make_net()

    def step() -> torch.Tensor:
        one(BATCH).mean().backward()
        before = one[0].weight.grad
        with sg.get_strategy().no_sync():
            other(BATCH).mean().backward()
        assert one[0].weight.grad is before
        return before.clone()

    first, *others = everywhere(strategy, step)
    assert first.abs().sum() > 0
    assert all(torch.equal(first, each) for each in others)


def test_local_gradients_count_when_the_replica_has_no_examples_later(strategy: sg.MirroredStrategy) -> None:
    plain = make_net(1)
    whole, rest = BATCH[:3], BATCH[3:4]
    (plain(whole).sum() / 3).backward()
    plain(rest).mean().backward()
    with strategy.scope():
        model = make_net(1)

    def local(inputs: torch.Tensor) -> None:
        with sg.get_strategy().no_sync():
            model(inputs).sum(dim=1).mean().backward()

    first, second = strategy.distribute([whole, rest])
    strategy.run(local, args=(first,))
    # The mean of nothing is NaN in the two replicas without examples, and counts for nothing.
    strategy.run(lambda inputs: model(inputs).mean().backward(), args=(second,))
    assert_gradients(model, [each.grad for each in plain.parameters()])
    assert_alike(strategy, model)


def test_two_models_each_with_a_pass_of_its_own(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        one, other = make_net(), make_net()

    def step() -> list[bool]:
        other(BATCH).mean().backward()
        alone = [each.grad is None for each in one.parameters()]
        one(BATCH).mean().backward()
        return alone

    assert all(all(each) for each in everywhere(strategy, step))
    assert_alike(strategy, one)
    assert_alike(strategy, other)


def test_what_the_controller_does_to_gradients_reaches_the_replicas(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = make_net()

    def step() -> None:
        model(BATCH).square().mean().backward()

    strategy.run(step)
    expected = [each.grad.clone() for each in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    strategy.run(step)
    assert_gradients(model, expected)
    assert_alike(strategy, model)
    model[0].weight.grad.zero_()
    strategy.run(step)
    assert_gradients(model[0], [expected[0], 2 * expected[1]])
    assert_alike(strategy, model)


def test_what_is_written_through_data_that_was_kept_reaches_the_replicas(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        given, taken = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    strategy.run(lambda: (given.sum(), taken.sum()))
    memory = torch.ones(2)
    given.data, kept = memory, taken.data
    for number in (2.0, 3.0, 4.0):
        memory.fill_(number)
        kept.fill_(number)
        seen = everywhere(strategy, lambda: torch.cat([given, taken]).detach().clone())
        assert [each.tolist() for each in seen] == [[number] * 4] * 3
    del memory, kept
    strategy.run(lambda: given.sum() + taken.sum())
    assert not {id(given), id(taken)} & _torch.storages.data_reads._by_id.keys()
    foreign = nn.Parameter(torch.ones(2))
    foreign.data.mul_(2)
    del foreign
    assert all(reference() is not None for reference, _ in _torch.storages.data_reads._by_id.values())


def test_optimizer_that_runs_whole_shows_and_takes_its_state(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        optimizer.step()

    strategy.run(step)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    strategy.run(step)
    expected = copy.deepcopy(model.state_dict())
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    strategy.run(step)
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    assert_alike(strategy, model)


def test_buffers_agree_and_those_that_nobody_changed_keep_their_bits(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        norm = nn.BatchNorm1d(5)
        norm.register_buffer("mask", torch.tensor([float("-inf"), 0.1, float("nan")]))
        norm.register_buffer("number", torch.zeros((), dtype=torch.int32))

    def step(inputs: torch.Tensor) -> None:
        norm(inputs)
        norm.number += 1 + rank()

    (batch,) = strategy.distribute([BATCH[:8]])
    strategy.run(step, args=(batch,))
    means = [part.mean(0) * len(part) for part in BATCH[:8].split([3, 3, 2])]
    torch.testing.assert_close(norm.running_mean, 0.1 * sum(means) / 8)
    assert norm.number == 1
    assert norm.mask[0] == float("-inf")
    assert norm.mask[2].isnan()
    norm.mask = norm.mask.nan_to_num(1.0)
    with torch.no_grad():
        norm.running_mean.data.fill_(7)
    seen = everywhere(strategy, lambda: norm.running_mean * 1)
    assert all(torch.equal(each, torch.full((5,), 7.0)) for each in seen)


def test_copies_are_alike_again_after_a_run_that_failed_in_one_replica(breakable: sg.MirroredStrategy) -> None:
    with breakable.scope():
        model = nn.Sequential(make_net(), nn.BatchNorm1d(5))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(failing: int | None = None) -> float:
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        if rank() == failing:
            raise ValueError("between backward and step")
        optimizer.step()
        scheduler.step()
        return scheduler.get_last_lr()[0]

    breakable.run(step)
    for failing in (1, 0):
        with pytest.raises(ValueError, match="between backward and step"):
            breakable.run(step, args=(failing,))
        assert len(set(everywhere(breakable, step))) == 1
        assert_alike(breakable, model)


def test_what_copies_cannot_agree_on_is_refused(breakable: sg.MirroredStrategy) -> None:
    """Parameters that are frozen in one replica, a model of another type than before."""
    with breakable.scope():
        model, frozen = make_net(), make_net()

    def step() -> None:
        frozen[0].weight.requires_grad_(rank() != 1)
        frozen(BATCH).sum().backward()

    with pytest.raises(StrategyError, match=r"requires_grad of '0.weight' is True on replica 0 and False on replica 1"):
        breakable.run(step)
    breakable.run(lambda: model(BATCH).sum().item())
    model.double()
    with pytest.raises(StrategyError, match=r"'0.weight' was float32 of shape \(5, 5\).*is now float64"):
        breakable.run(lambda: None)
    model.float()
    breakable.run(lambda: None)


def test_backward_error_that_the_program_hides_is_not_forgotten() -> None:
    def hide() -> None:
        def fail(_: torch.Tensor) -> None:
            raise ValueError("in the middle")

        use_small_buckets()
        hidden = model[0](BATCH)
        hidden.register_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            model[1:](hidden).sum().backward()
        use_small_buckets(25 * 2**20)

    with sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="torch") as strategy:
        with strategy.scope():
            model = make_net()
        strategy.run(hide)
        with pytest.raises(CollectiveError, match="an earlier backward pass failed halfway"):
            strategy.run(lambda: model(BATCH).sum().backward())
        strategy.run(lambda: model(BATCH).sum().backward())
        assert_alike(strategy, model)


def test_parameter_used_by_one_replica_only_is_an_error_when_asked_for() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="torch", unused="error") as strategy:
        with strategy.scope():
            model = make_net()
        strategy.run(lambda: model(BATCH).sum().backward())
        with pytest.raises(StrategyError, match=r"'0.weight' got a gradient on replica 0 but not on 1"):
            strategy.run(lambda: model[2 * rank() :](BATCH).sum().backward())


def test_unknown_way_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="one of 'auto', 'shared_memory', 'torch', 'to_one', got 'nccl'"):
        sg.MirroredStrategy(cross_device_ops="nccl")


@pytest.mark.parametrize("way", ["torch", "to_one"])
def test_one_replica_needs_no_others(way: str) -> None:
    with sg.MirroredStrategy(["cpu:0"], cross_device_ops=way) as strategy:
        with strategy.scope():
            model = make_net()
        expected = plain_gradients(plain := make_net(), plain(BATCH).mean())
        strategy.run(lambda: model(BATCH).mean().backward())
        assert_gradients(model, expected)


def test_closed_strategy_leaves_a_plain_model() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="torch") as strategy:
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.Adam(model.parameters())
        strategy.run(lambda: model(BATCH).mean().backward())
    model.zero_grad()
    model(BATCH).mean().backward()
    optimizer.step()
    assert not model[0].weight._post_accumulate_grad_hooks
