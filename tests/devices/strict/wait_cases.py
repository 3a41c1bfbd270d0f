"""For what a step on GPUs makes the host wait, and what it allocates, on strict devices; see `in_a_program`.

Counted in each replica: all waits of a call of `run`, in the main program from its beginning. One wait for each step
is the library's: whether the gradients are finite. One more is the return of the step's result. The steps here have
none of their own.
"""

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.devices.strict import counts

NUM_EARLY = 5  # steps until all is made: optimizer state, buckets, what is known of buffers
NUM_COUNTED = 4
CHECK_EVERY = 3  # steps: among those that are counted is one in which replicas compare their weights
RESULTS = 1  # of a step, each of which the host waits for
NUM_NUMBERS = 8  # that a pass allocates in each replica: two for the weight of the loss, six for a look at all sums
RESULT = "copy to the host"

STRATEGIES: list[sg.MirroredStrategy] = []
_open = contextlib.ExitStack()


def prepare() -> None:
    sg.config.simulate_devices("GPU", 2, strict=True)
    torch.set_num_threads(1)
    STRATEGIES.append(_open.enter_context(sg.MirroredStrategy(["gpu:0", "gpu:1"], check_copies_every=CHECK_EVERY)))


def finish() -> None:
    _open.close()


def begin_counting() -> None:
    stack = contextlib.ExitStack()
    counts.__dict__["open_in_test"] = stack, stack.enter_context(counts.counted())


def end_counting() -> dict[str, int]:
    stack, found = counts.__dict__.pop("open_in_test")  # functions travel without what this module holds
    stack.close()
    return dict(found.waits)


def make_net(depth: int) -> nn.Sequential:
    (strategy,) = STRATEGIES
    with strategy.scope():
        torch.manual_seed(1)
        hidden = [each for _ in range(depth) for each in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(4, 1))


class Metrics(nn.Module):
    """Buffers of each aggregation that is neither a mean nor that of one replica."""

    def __init__(self) -> None:
        super().__init__()
        for name, (how, value) in METRICS.items():
            self.register_buffer(name, value.clone())
            sg.aggregate(self, name, how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.buffers():
            each.add_(len(x))
        self.lowest.copy_(x[:, :1].amin())
        self.highest.copy_(len(x))
        return x


METRICS = {
    "rows": ("sum", torch.tensor(2**40 + 1)),
    "few": ("sum", torch.tensor([100, 127], dtype=torch.int8)),
    "total": ("sum", torch.tensor([0.5, math.inf, math.nan])),
    "phase": ("sum", torch.tensor(1j)),
    "lowest": ("min", torch.full((2,), math.inf)),
    "highest": ("max", torch.tensor([-(2**60)])),
    "least": ("min", torch.tensor([3.0, math.nan], dtype=torch.float64)),
}


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def waits_of_steps(
    model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> list[dict[str, int]]:
    """What each replica waited for in some steps in the steady state."""
    (strategy,) = STRATEGIES
    with strategy.scope():
        optimizer = make_optimizer(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(NUM_EARLY + NUM_COUNTED)]
    strategy.run(int)  # a step that trains nothing is known too
    for number, batch in enumerate(strategy.distribute(batches)):
        if number == NUM_EARLY:
            strategy.run(begin_counting)
        strategy.run(step, args=batch)
    return list(strategy.local_results(strategy.run(end_counting)))


def assert_one_wait(waits: dict[str, int]) -> None:
    assert waits[RESULT] >= NUM_COUNTED * RESULTS, waits
    assert sum(waits.values()) <= NUM_COUNTED * (1 + RESULTS), waits


def case_step_waits_once_with_momentum() -> None:
    for waits in waits_of_steps(make_net(2), make_sgd):
        assert_one_wait(waits)


def case_step_waits_once_with_adam() -> None:
    for waits in waits_of_steps(make_net(2), make_adam):
        assert_one_wait(waits)


def case_waits_do_not_grow_with_the_model() -> None:
    for waits in waits_of_steps(make_net(9), make_sgd):
        assert_one_wait(waits)


def case_counters_and_metrics_add_no_wait() -> None:
    (strategy,) = STRATEGIES
    with strategy.scope():
        model = nn.Sequential(Metrics(), nn.Linear(4, 1))
    for waits in waits_of_steps(model, make_sgd):
        assert_one_wait(waits)


def case_counters_and_metrics_are_those_of_all_rows() -> None:
    """Also where one replica has no rows, or has few; as replicas on the CPU join them."""
    (strategy,) = STRATEGIES
    found = []
    with sg.MirroredStrategy(["cpu:0"], cross_device_ops="to_one") as one:
        for owner in (strategy, one):
            with owner.scope():
                metrics = Metrics()
            for rows in (7, 1, 4):
                parts = iter(owner.distribute([torch.arange(4.0 * rows).view(rows, 4) - 9]))
                owner.run(lambda x, metrics=metrics: metrics(x).sum(), args=(next(parts),))
            found.append({name: each.cpu() for name, each in metrics.named_buffers()})
    ours, theirs = found
    for name, each in theirs.items():
        if name not in ("least", "highest"):
            torch.testing.assert_close(ours[name], each, rtol=0, atol=0, equal_nan=True, msg=name)
    assert ours["highest"].tolist() == [2]  # of the last batch, of which each replica has two rows
    assert ours["least"][0] == 3 + 3 + 1 + 2  # the fewest rows of a replica that has any
    assert ours["least"].isnan().tolist() == [False, True]


def case_weights_that_drift_apart_are_found_on_the_device() -> None:
    (strategy,) = STRATEGIES
    with strategy.scope():
        model = nn.Linear(4, 1)
        optimizer = make_sgd(model)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = float(loss)
        optimizer.step()

    def train() -> None:
        for batch in strategy.distribute([torch.randn(6, 4) for _ in range(2 * CHECK_EVERY)]):
            strategy.run(step, args=(batch,))

    with pytest.raises(sg.errors.DriftError, match="replica 1 and replica 0 differ by"):
        train()
    first, second = strategy.local_results(strategy.run(lambda: model.weight.detach().clone()))
    assert torch.equal(first, second)


def case_sums_take_memory_once() -> None:
    """A pass allocates what one without other replicas does, and some numbers: its weight, and if all is finite."""

    def allocations() -> int:
        with counts.counted() as found:
            loss = model(x.to(device)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.num_allocations

    (strategy,) = STRATEGIES
    x = torch.ones(4, 4)
    extra = []
    for depth in (1, 6):
        with strategy.scope():
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
        device = "gpu"
        several = [strategy.local_results(strategy.run(allocations)) for _ in range(5)]
        together = [min(steps[2:]) for steps in zip(*several, strict=True)]  # in one of them weights are compared
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))).to("gpu:0")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        device = "gpu:0"
        alone = [allocations() for _ in range(4)][-1]
        extra.append([each - alone for each in together])
    assert extra[0] == extra[1], extra  # whatever the number of gradients
    assert max(extra[0]) <= NUM_NUMBERS, extra


def case_buffers_agree_without_a_look_at_them() -> None:
    """Statistics, counters, one that is written without torch's count, one before its first row, one that stays."""
    (strategy,) = STRATEGIES
    with strategy.scope():
        norm = nn.BatchNorm1d(2)
        norm.register_buffer("lowest", torch.full((2,), math.inf))
        norm.register_buffer("mask", torch.tensor([-math.inf, 0.1, math.nan], dtype=torch.float64))
        norm.register_buffer("number", torch.tensor(-(2**40) - 1))
        norm.register_buffer("flag", torch.tensor([True, False]))

    def step(x: torch.Tensor) -> None:
        replica = sg.get_replica_context()
        assert replica is not None
        norm(x)
        norm.number += 1 + replica.replica_id_in_sync_group
        if replica.replica_id_in_sync_group:
            norm.lowest.copy_(x.amin(0))
        else:
            norm.flag.logical_not_()

    def look() -> list[torch.Tensor]:
        return [each.clone() for each in norm.buffers()]

    plain = nn.BatchNorm1d(2)
    batches = [torch.randn(6, 2, generator=torch.Generator().manual_seed(3)) for _ in range(4)]
    for batch in strategy.distribute(batches):
        strategy.run(step, args=(batch,))
    for batch in batches:
        parts = [nn.BatchNorm1d(2) for _ in range(2)]
        for part, rows in zip(parts, batch.split(3), strict=True):
            part.load_state_dict(plain.state_dict())
            part(rows)
        for key in ("running_mean", "running_var"):
            getattr(plain, key).copy_(sum(getattr(part, key) for part in parts) / 2)
    one, other = strategy.local_results(strategy.run(look))
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(norm.running_mean.cpu(), plain.running_mean)
    torch.testing.assert_close(norm.running_var.cpu(), plain.running_var)
    assert norm.num_batches_tracked.item() == 4
    assert norm.number.item() == -(2**40) - 1 + 4
    assert norm.flag.tolist() == [True, False]
    assert norm.mask[:2].tolist() == [-math.inf, 0.1]
    assert torch.isfinite(norm.lowest).all()


def case_statistics_that_begin_late_are_found() -> None:
    (strategy,) = STRATEGIES
    with strategy.scope():
        norm = nn.BatchNorm1d(2)

    def mean() -> torch.Tensor:
        return norm.running_mean.clone()

    batches = list(strategy.distribute([torch.randn(6, 2) for _ in range(8)]))
    norm.eval()
    for batch in batches[:6]:
        strategy.run(lambda x: norm(x).sum(), args=(batch,))
    norm.train()
    for batch in batches[6:]:
        strategy.run(lambda x: norm(x).sum(), args=(batch,))
        one, other = strategy.local_results(strategy.run(mean))
        assert one.any()
        assert torch.equal(one, other)


def case_statistics_that_torch_does_not_count_are_joined_at_once() -> None:
    """Also those that begin late, when all is in its steady state."""
    (strategy,) = STRATEGIES
    with strategy.scope():
        model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True), nn.Conv1d(2, 1, 1))
        optimizer = make_sgd(model)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def statistics() -> torch.Tensor:
        return model[1].running_mean.clone()

    batches = list(strategy.distribute([torch.randn(6, 2, 5) for _ in range(9)]))
    model.eval()
    for batch in batches[:6]:
        strategy.run(step, args=(batch,))
    model.train()
    for batch in batches[6:]:
        strategy.run(step, args=(batch,))
        one, other = strategy.local_results(strategy.run(statistics))
        assert one.any()
        assert torch.equal(one, other)


def case_what_the_program_writes_to_buffers_reaches_all() -> None:
    (strategy,) = STRATEGIES
    with strategy.scope():
        norm = nn.BatchNorm1d(2)

    def mean() -> torch.Tensor:
        return norm.running_mean.clone()

    def everywhere() -> list[list[float]]:
        return [each.tolist() for each in strategy.local_results(strategy.run(mean))]

    def write_through_data() -> None:
        norm.running_mean.data.fill_(7)

    def write_in_place() -> None:
        norm.running_mean.fill_(8)

    def put_other_memory() -> None:
        norm.running_mean.data = torch.full((2,), 9.0, device="gpu:0")

    def load() -> None:
        norm.load_state_dict(norm.state_dict() | {"running_mean": torch.full((2,), 10.0)})

    for number, write in enumerate((write_through_data, write_in_place, put_other_memory, load), start=7):
        write()
        assert everywhere() == [[number] * 2] * 2
    kept = norm.running_mean.data
    for number in (11, 12):
        kept.fill_(number)
        assert everywhere() == [[number] * 2] * 2
    del kept
    before = norm.running_mean.clone()
    norm(torch.randn(4, 2, device="gpu:0"))  # batch normalization writes without torch's count
    assert not torch.equal(before, norm.running_mean)
    assert everywhere() == [norm.running_mean.tolist()] * 2
