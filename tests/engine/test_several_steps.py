"""Several steps in one call: what is sent, what comes back, and what a failure leaves."""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import stratagem as sg
from stratagem.engine import child_calls
from stratagem.errors import NonFiniteGradientError, ReplicaDiedError
from stratagem.inputs import drawing
from stratagem.processes.group import ChildGroup
from tests.steps import plain_step


@pytest.fixture
def num_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each call that is sent to the children, how many of them get it."""
    sent: list[int] = []
    original = ChildGroup.call

    def call(self: Any, function: Any, parts: Any, *others: Any, **options: Any) -> Any:
        if function is child_calls.run:
            sent.append(len(parts))
        return original(self, function, parts, *others, **options)

    monkeypatch.setattr(ChildGroup, "call", call)
    return sent


def rank() -> int:
    return sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]


def batches_of(strategy: sg.Strategy, *sizes: int) -> Any:
    return iter(strategy.distribute([torch.arange(size) for size in sizes]))


# What is sent


def test_steps_of_a_call_are_one_message_to_each_child(strategy: sg.MirroredStrategy, num_sent: list[int]) -> None:
    batches = batches_of(strategy, *[4] * 20)
    assert len(strategy.run(len, args=(batches,), num_steps=16)) == 16
    assert len(strategy.run(len, args=(batches,), num_steps=16)) == 4
    assert strategy.run(len, args=(batches,), num_steps=16) == []
    assert num_sent == [1, 1]


def test_shuffled_data_that_replicas_load_is_one_message_too(
    strategy: sg.MirroredStrategy, num_sent: list[int]
) -> None:
    data = strategy.distribute(DataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True))
    results = strategy.run(lambda x: x.clone(), args=iter(data), num_steps=5)
    seen = [number for each in results for number in strategy.gather(each).tolist()]
    assert len(results) == 3
    assert sorted(seen) == list(range(12))
    assert num_sent == [1]


def test_steps_for_which_there_is_no_memory_are_sent_later(
    strategy: sg.MirroredStrategy, num_sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_MOST_BYTES", 100)
    results = strategy.run(len, args=(batches_of(strategy, *[8] * 5),), num_steps=5)
    assert [strategy.local_results(each) for each in results] == [(4, 4)] * 5
    assert num_sent == [1, 1, 1]


def test_many_steps_without_data_come_in_several_calls(strategy: sg.MirroredStrategy, num_sent: list[int]) -> None:
    assert len(strategy.run(int, num_steps=300)) == 300
    assert num_sent == [1, 1]


# What steps are given


def test_iterators_stand_wherever_batches_may(strategy: sg.MirroredStrategy) -> None:
    first, second, third = (batches_of(strategy, size, size) for size in (2, 4, 6))

    def step(x: Any, nested: Any, factor: int, *, other: Any) -> tuple[int, ...]:
        return len(x), len(nested["deep"][0]), len(other), factor

    results = strategy.run(step, args=(first, {"deep": [second]}, 7), kwargs={"other": third}, num_steps=2)
    assert [strategy.local_results(each)[1] for each in results] == [(1, 2, 3, 7)] * 2


def test_the_shortest_of_several_iterators_ends_the_steps(strategy: sg.MirroredStrategy) -> None:
    short, long = batches_of(strategy, 2, 2), batches_of(strategy, 4, 4, 4, 4)
    results = strategy.run(lambda x, y: (len(x), len(y)), args=(short, long), num_steps=9)
    assert [strategy.local_results(each)[0] for each in results] == [(1, 2)] * 2
    assert strategy.run(lambda x, y: (len(x), len(y)), args=(short, long), num_steps=9) == []


def test_infinite_data_gives_as_many_steps_as_are_asked_for(strategy: sg.MirroredStrategy) -> None:
    def numbers() -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2)

    batches = iter(strategy.distribute(numbers()))
    assert [len(strategy.run(len, args=(batches,), num_steps=number)) for number in (1, 7, 3)] == [1, 7, 3]


def test_batch_that_is_given_as_it_is_is_the_same_in_all_steps(strategy: sg.MirroredStrategy) -> None:
    batch = next(batches_of(strategy, 5))
    results = strategy.run(lambda x: x.sum(), args=(batch,), num_steps=2)
    assert [strategy.reduce("sum", each).item() for each in results] == [10, 10]


def test_batch_that_cannot_be_read_is_an_error_after_the_steps_before_it(strategy: sg.MirroredStrategy) -> None:
    seen: list[int] = []

    def read() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        yield torch.ones(4)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught:
        strategy.run(lambda x: seen.append(len(x)), args=(iter(strategy.distribute(read())),), num_steps=5)
    assert "while reading the batch of step 3 of the 5" in caught.value.__notes__
    assert seen == [1, 2]


class Augmented(Dataset[Any]):
    """Draws random numbers for each example, of each kind that there is."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(3) + np.random.rand()


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_data_that_draws_random_numbers_equals_single_steps(strategy: sg.MirroredStrategy, num_workers: int) -> None:
    def drawn(num_steps: int | None) -> Any:
        torch.manual_seed(3)
        np.random.seed(3)
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=num_workers)
        data = strategy.distribute(loader)

        def step(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x)

        if num_steps is None:
            results = [strategy.run(step, args=(batch,)) for batch in data]
        else:
            batches = iter(data)
            results = strategy.run(step, args=(batches,), num_steps=num_steps)
            assert strategy.run(step, args=(batches,), num_steps=num_steps) == []
        gathered = [strategy.gather(each).tolist() for each in results]
        data.close()
        return gathered

    assert drawn(6) == drawn(None)


# What comes back


def test_results_are_those_of_their_step(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(200, 200, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        nn.init.zeros_(model.weight)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        (-model.weight.sum()).backward()
        optimizer.step()
        return model.weight, model.weight[0, :2]  # the first stays in its replica until it is read

    results = strategy.run(step, args=(batches_of(strategy, 2, 2, 2),), num_steps=3)
    for number, (large, small) in enumerate(results, start=1):
        assert [each.unique().tolist() for each in large.values] == [[number]] * 2
        assert [each.tolist() for each in small.values] == [[number] * 2] * 2


def test_mean_of_a_step_counts_by_the_rows_of_that_step(strategy: sg.MirroredStrategy) -> None:
    results = strategy.run(lambda x: float(rank()), args=(batches_of(strategy, 3, 1, 2),), num_steps=3)
    assert [strategy.reduce("mean", each).item() for each in results] == pytest.approx([1 / 3, 0.0, 0.5])


def test_gradients_are_added_up_over_the_steps_of_a_call(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)

    def add(x: torch.Tensor) -> None:
        (-weight * x.double().mean()).sum().backward()

    with strategy.no_sync():
        strategy.run(add, args=(batches_of(strategy, 2, 4),), num_steps=2)
    strategy.run(add, args=(next(batches_of(strategy, 6)),))
    strategy.run(lambda: optimizer.step())  # noqa: PLW0108  # a function of the test
    assert weight.item() == pytest.approx(0.5 + 1.5 + 2.5)


def test_what_the_main_program_changes_is_seen_by_the_next_call(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
    stats = {"factor": 1.0}

    def step() -> float:
        stats["steps"] = stats.get("steps", 0) + 1
        return stats["factor"] * model.weight.item() + model.training + stats["steps"]

    nn.init.ones_(model.weight)
    first = strategy.run(step, num_steps=2)
    nn.init.zeros_(model.weight)
    model.eval()
    stats["factor"] = 10.0
    second = strategy.run(step, num_steps=2)
    assert [strategy.local_results(each) for each in (*first, *second)] == [
        (3.0,) * 2,
        (4.0,) * 2,
        (3.0,) * 2,
        (4.0,) * 2,
    ]


# Failures


@contextlib.contextmanager
def opened(kind: str, **options: Any) -> Iterator[sg.Strategy]:
    devices = ["cpu:0", "cpu:1"]
    made: sg.Strategy = (
        sg.LocalSGDStrategy(3, devices=devices, **options)
        if kind == "local sgd"
        else sg.MirroredStrategy(devices, cross_device_ops=kind, **options)
    )
    with made:
        yield made


KINDS = ("shared_memory", "torch", "local sgd")


def classifier(strategy: sg.Strategy) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    with strategy.scope():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, plain_step(model, optimizer)


def rows(number: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 4, generator=generator), torch.randint(2, (size,), generator=generator)


def run_all(strategy: sg.Strategy, step: Callable[..., Any], batches: Any, num_steps: int | None) -> None:
    """Runs a step on all batches, one by one or so many at a time."""
    if num_steps is None:
        for batch in batches:
            strategy.run(step, args=batch)
    else:
        strategy.run(step, args=batches, num_steps=num_steps)


# A replica 0 that trains alone may have done the step in which replica 1 fails, as with single runs.
@pytest.mark.parametrize(
    ("kind", "failing"),
    [(kind, failing) for kind in KINDS for failing in (0, 1) if (kind, failing) != ("local sgd", 1)],
)
def test_error_in_one_replica_leaves_the_state_that_single_steps_leave(
    four_cpus: None, kind: str, failing: int
) -> None:
    states, notes = [], []
    for num_steps in (None, 6):
        with opened(kind) as strategy:
            model, train = classifier(strategy)
            done: list[int] = []

            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                if len(done) == 4 and rank() == failing:  # noqa: B023
                    raise ValueError("boom")
                done.append(len(x))  # noqa: B023
                return train(x, y)  # noqa: B023

            torch.manual_seed(2)
            batches = iter(strategy.distribute([rows(number) for number in range(6)]))
            with pytest.raises(ValueError, match="boom") as caught:
                run_all(strategy, step, batches, num_steps)
            notes.append(getattr(caught.value, "__notes__", []))
            states.append({name: each.tolist() for name, each in model.state_dict().items()})
            everyones = strategy.run(lambda: {name: each.tolist() for name, each in model.state_dict().items()})  # noqa: B023
            assert [each == states[-1] for each in strategy.local_results(everyones)] == [True, True]
            strategy.run(train, args=next(iter(strategy.distribute([rows(9)]))))
    assert states[0] == states[1]
    assert any(each.startswith("in step 5 of the 6 of this run") for each in notes[1])
    assert not any("of this run" in each for each in notes[0])


def test_replica_that_dies_is_told_with_its_step(four_cpus: None) -> None:
    with opened("shared_memory") as strategy:
        counted: list[int] = []

        def step() -> None:
            counted.append(1)
            if rank() == 1 and len(counted) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            sg.get_replica_context().all_reduce("sum", torch.ones(1))  # type: ignore[union-attr]

        with pytest.raises(ReplicaDiedError) as caught:
            strategy.run(step, num_steps=5)
        assert any(each.startswith("in step 3 of the 5") for each in caught.value.__notes__)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="Ctrl-C is for the main thread")
def test_ctrl_c_leaves_the_state_of_a_whole_step(four_cpus: None) -> None:
    with opened("shared_memory") as strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([weight], lr=1.0)

        def step() -> None:
            if rank() == 0 and weight.item() == 3.0:
                os.kill(os.getpid(), signal.SIGINT)
            optimizer.zero_grad()
            (-weight.sum()).backward()
            optimizer.step()

        with pytest.raises(KeyboardInterrupt) as caught:
            strategy.run(step, num_steps=8)
        assert any(each.startswith("in step 4 of the 8") for each in caught.value.__notes__)
        assert weight.item() == 3.0
        assert strategy.local_results(strategy.run(weight.item)) == (3.0, 3.0)


@pytest.mark.parametrize("kind", KINDS)
def test_replica_that_leaves_a_step_early_is_told_apart_from_the_others(four_cpus: None, kind: str) -> None:
    with opened(kind) as strategy:

        def step() -> None:
            if rank() == 0:
                sg.get_replica_context().all_reduce("sum", torch.ones(1))  # type: ignore[union-attr]

        with pytest.raises(sg.errors.CollectiveError, match="replica 1 is at the end of its step"):
            strategy.run(step, num_steps=3)


# Updates that are skipped


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_that_is_not_finite_ends_the_steps_where_it_is_an_error(four_cpus: None, kind: str) -> None:
    with opened(kind, on_nonfinite="raise") as strategy:
        model, step = classifier(strategy)
        batches = [rows(number) for number in range(5)]
        batches[2][0][-1] = float("nan")  # of replica 1
        seen: list[int] = []

        def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return step(x, y)

        with pytest.raises(NonFiniteGradientError, match="run 3; update skipped") as caught:
            strategy.run(counted, args=iter(strategy.distribute(batches)), num_steps=5)
        assert any(each.startswith("in step 3 of the 5") for each in caught.value.__notes__)
        assert len(seen) == 3
        assert all(each.isfinite().all() for each in model.state_dict().values())


def test_skipped_updates_are_counted_over_calls(strategy: sg.MirroredStrategy) -> None:
    _, step = classifier(strategy)
    bad = rows(0)
    bad[0][:] = float("nan")
    batches = iter(strategy.distribute([rows(1), *[bad] * 6, rows(2), *[bad] * 20]))
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        assert len(strategy.run(step, args=batches, num_steps=8)) == 8
        assert len(strategy.run(step, args=batches, num_steps=4)) == 4
        with pytest.raises(NonFiniteGradientError, match="number 10 in a row") as caught:
            strategy.run(step, args=batches, num_steps=16)
    told = [str(each.message) for each in caught_warnings]
    numbers = [int(text.partition("skipped (")[2].partition(" of 10 allowed")[0]) for text in told]
    assert numbers == [1, 2, 3, 4, 5, 6, *range(1, 10)]
    assert any(each.startswith("in step 6 of the 16") for each in caught.value.__notes__)


# Strategies that are not in step


def test_replicas_that_train_alone_agree_after_as_many_steps_as_single_runs(four_cpus: None) -> None:
    def train(num_steps: int | None) -> Any:
        with opened("local sgd") as strategy:
            model, step = classifier(strategy)
            data = [rows(number, size) for number, size in enumerate((4, 3, 1, 4, 2, 4, 4, 3))]

            def sometimes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                own = step(x, y) if (x[0, 0] > -0.5) or len(x) < 4 else model(x).sum().detach()
                return torch.stack([own.detach(), model[0].weight.detach().sum()])

            torch.manual_seed(2)
            batches = iter(strategy.distribute(data))
            if num_steps is None:
                results = [strategy.run(sometimes, args=batch) for batch in batches]
            else:
                results = [
                    each for _ in range(2) for each in strategy.run(sometimes, args=batches, num_steps=num_steps)
                ]
            own = [[part.tolist() for part in strategy.local_results(each)] for each in results]
            strategy.synchronize()
            return own, {name: each.tolist() for name, each in model.state_dict().items()}

    expected = train(None)
    assert len(expected[0]) == 8
    assert train(5) == expected


def test_workers_of_a_parameter_server_are_given_all_steps(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(2) as strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([weight], lr=1.0)

        def step(x: torch.Tensor) -> int:
            optimizer.zero_grad()
            (-weight.sum()).backward()
            optimizer.step()
            return len(x)

        batches = batches_of(strategy, 1, 2, 3, 4, 5)
        results = strategy.run(step, args=(batches,), num_steps=3)
        assert [strategy.local_results(each)[0] for each in results] == [1, 2, 3]
        assert len(strategy.run(step, args=(batches,), num_steps=3)) == 2
        strategy.barrier()
        assert weight.item() == 5.0


def test_scheduled_functions_run_several_steps_too(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(1) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)

        def scheduled() -> Any:
            inside = sg.get_strategy()
            batches = iter(inside.distribute([torch.ones(2), torch.ones(3)]))
            return inside.run(len, args=(batches,), num_steps=5), inside.run(len, args=(batches,), num_steps=5)

        assert coordinator.schedule(scheduled).fetch() == ([2, 3], [])
