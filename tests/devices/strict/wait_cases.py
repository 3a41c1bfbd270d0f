"""For what a step on GPUs makes the host wait, and what it allocates, on strict devices; see `in_a_program`.

Counted in each replica: all waits of a call of `run`, in the main program from its beginning. One wait for each step
is the library's: whether the gradients are finite. One more is the return of the step's result. The steps here have
none of their own.
"""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import nn

import stratagem as sg
from stratagem.devices.strict import counts

NUM_EARLY = 5  # steps until all is made: optimizer state, buckets, what is known of buffers
NUM_COUNTED = 4
RESULTS = 1  # of a step, each of which the host waits for
NUM_NUMBERS = 7  # that a pass allocates in each replica: one for the weight of the loss, six for a look at all sums
RESULT = "copy to the host"

STRATEGIES: list[sg.MirroredStrategy] = []
_open = contextlib.ExitStack()


def prepare() -> None:
    sg.config.simulate_devices("GPU", 2, strict=True)
    torch.set_num_threads(1)
    STRATEGIES.append(_open.enter_context(sg.MirroredStrategy(["gpu:0", "gpu:1"])))


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
    torch.manual_seed(1)
    hidden = [each for _ in range(depth) for each in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(4, 1))


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def waits_of_steps(depth: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> list[dict[str, int]]:
    """What each replica waited for in some steps in the steady state."""
    (strategy,) = STRATEGIES
    with strategy.scope():
        model = make_net(depth)
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
    assert waits.pop(RESULT) == NUM_COUNTED * RESULTS, waits
    assert sum(waits.values()) <= NUM_COUNTED, waits


def case_step_waits_once_with_momentum() -> None:
    for waits in waits_of_steps(2, make_sgd):
        assert_one_wait(waits)


def case_step_waits_once_with_adam() -> None:
    for waits in waits_of_steps(2, make_adam):
        assert_one_wait(waits)


def case_waits_do_not_grow_with_the_model() -> None:
    for waits in waits_of_steps(9, make_sgd):
        assert_one_wait(waits)


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
        together = [strategy.local_results(strategy.run(allocations)) for _ in range(4)][-1]
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
