"""Threads of one program use strategies one after the other, or are told that they cannot."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem._turns import Turn
from stratagem.engine import lockstep
from stratagem.errors import StrategyError

pytestmark = pytest.mark.usefixtures("four_cpus")


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Makes calls at the same time, each in its thread; what they return."""
    together = threading.Barrier(len(calls))

    def meet(call: Callable[[], Any]) -> Any:
        together.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(meet, call) for call in calls]]


def trained(strategy: sg.Strategy) -> Callable[[], list[float]]:
    with strategy.scope():
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight.fill_(1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def train() -> list[float]:
        x = torch.arange(6.0).reshape(3, 2) / 6
        batches = strategy.distribute([(x,)] * 10)
        return [float(strategy.reduce("mean", strategy.run(step, args=batch))) for batch in batches]

    return train


def test_runs_of_two_threads_come_one_after_the_other() -> None:
    with sg.OneDeviceStrategy("cpu:0") as plain:
        expected = trained(plain)()
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        first, second = trained(strategy), trained(strategy)
        for losses in in_threads(first, second):
            assert losses == pytest.approx(expected)


def test_two_strategies_run_in_two_threads() -> None:
    with sg.OneDeviceStrategy("cpu:0") as plain:
        expected = trained(plain)()
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as one, sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        results = in_threads(*[lambda each=each: trained(each)() for each in (one, other)])  # scopes too
    for losses in results:
        assert losses == pytest.approx(expected)


def test_result_is_fetched_once_by_many_threads() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        large = strategy.run(lambda: torch.ones(100_000))
        found = in_threads(*[lambda: strategy.reduce("sum", large).sum().item()] * 3, lambda: strategy.run(int).values)
    assert found == [200_000.0] * 3 + [(0, 0)]


def test_run_is_given_a_result_that_another_thread_is_about_to_fetch() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, ThreadPoolExecutor(1) as pool:
        large = strategy.run(lambda: torch.ones(100_000))
        with lockstep._turn.taken("the test"):
            reading = pool.submit(lambda: large.values)
            while not lockstep._turn._waiting:
                time.sleep(0)
            sums = strategy.run(lambda values: values.sum(), args=(large,))
        assert strategy.local_results(sums) == (100_000.0, 100_000.0)
        assert [len(each) for each in reading.result()] == [100_000, 100_000]


def test_close_waits_for_the_run_of_another_thread() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.run(int)
    begun, may_end = threading.Event(), threading.Event()

    def step() -> int:
        if sg.get_replica_context().replica_id_in_sync_group == 0:  # type: ignore[union-attr]
            here[0].set()
            here[1].wait(60)
        return 1

    here: Any = Here(begun, may_end)
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(strategy.run, step)
        begun.wait(60)
        closing = pool.submit(strategy.close)
        may_end.set()
        assert run.result().values == (1, 1)
        closing.result()
    with pytest.raises(StrategyError, match="was closed"):
        strategy.run(int)


class Here(tuple):  # type: ignore[type-arg]
    """Events of this process: others have none."""

    def __new__(cls, *events: threading.Event) -> Any:
        return super().__new__(cls, events)

    def __reduce__(self) -> Any:
        return tuple, ()


def test_functions_are_scheduled_from_several_threads() -> None:
    with sg.ParameterServerStrategy(num_workers=2) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)

        def schedule(start: int) -> list[int]:
            values = [coordinator.schedule(lambda x: 2 * x, args=(number,)) for number in range(start, start + 8)]
            coordinator.join()
            return [coordinator.fetch(value) for value in values]

        found = in_threads(*[lambda start=start: schedule(start) for start in (0, 100, 200)])
    assert found == [[2 * number for number in range(start, start + 8)] for start in (0, 100, 200)]


def test_waiting_thread_lets_others_use_the_workers() -> None:
    with sg.ParameterServerStrategy(num_workers=1) as strategy:
        results = in_threads(*[lambda: [strategy.local_results(strategy.run(int))[0] for _ in range(5)]] * 3)
    assert [list(map(int, each)) for each in results] == [[0] * 5] * 3


def test_two_loops_of_one_keras_model_are_refused() -> None:
    keras = pytest.importorskip("keras")
    begun, may_end = threading.Event(), threading.Event()

    class Wait(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_begin(self, logs: Any = None) -> None:
            begun.set()
            may_end.wait(60)

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, ThreadPoolExecutor(1, "trains") as pool:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(loss="mse", optimizer="sgd")
        x, y = torch.ones(4, 2), torch.ones(4, 1)
        fit = pool.submit(model.fit, x, y, callbacks=[Wait()], verbose=0)
        begun.wait(60)
        try:
            with pytest.raises(
                StrategyError, match=r"predict\(\) was called in thread 'MainThread' while thread 'trains"
            ):
                model.predict(x, verbose=0)
        finally:
            may_end.set()
        fit.result()


def test_turn_is_given_in_the_order_of_asking_and_refused_by_name() -> None:
    turn, order, asked = Turn(), [], threading.Event()

    def take(what: str, **options: Any) -> bool:
        asked.set()
        with turn.taken(what, **options) as is_alone:
            order.append(what)
            return is_alone

    with ThreadPoolExecutor(1, "other") as pool, turn.taken("one"), turn.taken("one inside"):
        waiting = pool.submit(take, "two")
        asked.wait(60)
        while not waiting.done():
            turn.give_way()
        assert order == ["two"]
        with pytest.raises(
            StrategyError, match="three was called in thread 'other_0' while thread 'MainThread' is in one"
        ):
            pool.submit(take, "three", refusal="wait").result()
        assert pool.submit(take, "four", timeout_s=0.01).result() is False


def test_interrupted_thread_takes_its_turn_back_and_no_other() -> None:
    turn, may_end, gives_way = Turn(), threading.Event(), []

    class Interrupted(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            if gives_way:
                gives_way.clear()
                super().wait_for(lambda: turn._holder is not None)
                may_end.set()
                raise KeyboardInterrupt  # while another has the turn
            return super().wait_for(predicate, timeout)

    def other() -> bool:
        with turn.taken("other"):
            return may_end.wait(60) and turn._has_it

    turn._condition = Interrupted()
    with ThreadPoolExecutor(1) as pool, turn.taken("outer"):
        running = pool.submit(other)
        while not turn._waiting:
            time.sleep(0)
        gives_way.append(True)
        with pytest.raises(KeyboardInterrupt), turn.taken("inner"):
            turn.give_way()
        assert (turn._has_it, turn._depth) == (True, 1)
        assert running.result()
    assert turn._holder is None
