"""Who is called the slowest, and how often; which programs are told that their replicas compute the same."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import stratagem as sg
from stratagem.engine.notices import Stragglers
from stratagem.errors import StratagemWarning
from tests.steps import plain_step


def num_warnings(stragglers: Stragglers, runs: Sequence[Sequence[float]], counts: Sequence[int] | None = None) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for busy_s in runs:
            stragglers.note(busy_s, counts)
    return len(caught)


def test_one_that_is_always_far_slower_is_named_once() -> None:
    assert num_warnings(Stragglers(), [(1.0, 3.0, 1.1)] * 30) == 1


def test_it_is_named_again_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stragglers, now = Stragglers(), time.monotonic()
    assert num_warnings(stragglers, [(1.0, 3.0)] * 20) == 1
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert num_warnings(stragglers, [(1.0, 3.0)]) == 1


@pytest.mark.parametrize(
    "runs",
    [
        [(1.0, 3.0)] * 19 + [(1.0, 1.0)] + [(1.0, 3.0)] * 19,
        [(1.0, 3.0), (3.0, 1.0)] * 30,
        [(1.0, 1.9)] * 30,
        [(0.001, 0.004)] * 30,
        [(1.0,)] * 30,
    ],
    ids=["now and then", "in turns", "a little", "for a moment", "one replica"],
)
def test_others_are_not(runs: Sequence[Sequence[float]]) -> None:
    assert num_warnings(Stragglers(), runs) == 0


def test_replicas_without_examples_are_not_compared() -> None:
    assert num_warnings(Stragglers(), [(3.0, 0.1)] * 30, (2, 0)) == 0
    assert num_warnings(Stragglers(), [(3.0, 0.1, 1.0)] * 30, (2, 0, 2)) == 1


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        made.run(int)  # its replicas are there before the first test
        yield made


LOADER = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=8
)


def training_step(strategy: sg.Strategy) -> Callable[..., torch.Tensor]:
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plain_step(model, optimizer)


def test_a_forgotten_distribute_is_warned_of_once(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        step = training_step(strategy)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", StratagemWarning)
            for batch in LOADER:
                strategy.run(step, args=batch)
    assert [(each.category, each.filename) for each in told] == [(StratagemWarning, __file__)]
    assert "every replica was given all 8 rows" in str(told[0].message)
    assert "for batch in strategy.distribute(loader)" in str(told[0].message)


def of_distribute(strategy: sg.Strategy, step: Callable[..., torch.Tensor]) -> None:
    for batch in strategy.distribute(LOADER):
        strategy.run(step, args=batch)


def of_one_tensor(strategy: sg.Strategy, step: Callable[..., torch.Tensor]) -> None:
    batch = next(iter(LOADER))
    for _ in range(6):
        strategy.run(step, args=batch)


def of_equal_tensors(strategy: sg.Strategy, step: Callable[..., torch.Tensor]) -> None:
    for _ in range(6):
        strategy.run(step, args=(torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)))


def that_divides_rows_itself(strategy: sg.Strategy, step: Callable[..., torch.Tensor]) -> None:
    def own_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rank, size = strategy.global_rank, strategy.world_size
        return step(x[rank::size], y[rank::size])

    for batch in LOADER:
        strategy.run(own_rows, args=batch)


def that_returns_the_loss_of_all(strategy: sg.Strategy, step: Callable[..., torch.Tensor]) -> None:
    def own_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rank, size = strategy.global_rank, strategy.world_size
        return sg.get_replica_context().all_reduce("mean", step(x[rank::size], y[rank::size]).detach())

    for batch in LOADER:
        strategy.run(own_rows, args=batch)


def that_only_looks(strategy: sg.Strategy, _: Callable[..., torch.Tensor]) -> None:
    for x, _ in LOADER:
        strategy.run(torch.mean, args=(x,))


def of_distribute_with_a_plain_tensor(strategy: sg.Strategy, step: Callable[..., torch.Tensor]) -> None:
    for batch in strategy.distribute(LOADER):
        strategy.run(lambda x, y, weights: step(x * weights[0], y), args=(*batch, torch.ones(4)))


def of_its_own_data(strategy: sg.Strategy, step: Callable[..., torch.Tensor]) -> None:
    for rate in torch.linspace(0.1, 0.2, 6):
        strategy.run(lambda rate: step(torch.randn(4, 6) * rate, torch.randint(3, (4,))), args=(rate,))


@pytest.mark.parametrize(
    "program",
    [
        of_distribute,
        of_one_tensor,
        of_equal_tensors,
        that_divides_rows_itself,
        that_returns_the_loss_of_all,
        that_only_looks,
        of_distribute_with_a_plain_tensor,
        of_its_own_data,
    ],
)
def test_other_programs_are_not_warned(strategy: sg.MirroredStrategy, program: Callable[..., None]) -> None:
    step = training_step(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StratagemWarning)
        program(strategy, step)


def test_one_device_is_given_whole_batches_without_a_word() -> None:
    with sg.OneDeviceStrategy() as strategy, warnings.catch_warnings():
        warnings.simplefilter("error", StratagemWarning)
        step = training_step(strategy)
        for batch in LOADER:
            strategy.run(step, args=batch)
