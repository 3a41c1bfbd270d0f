"""TensorFlow's guide to parameter servers, written again as its users would: local workers, and a cluster on loopback.

Steps of several workers come in no fixed order, so that weights are compared where the order does not matter (a loss
that is linear in the weights) or where there is one worker.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import stratagem as sg
from stratagem import _env
from stratagem.cluster import token as tokens
from stratagem.cluster.resolvers.simple import SimpleResolver
from stratagem.errors import StratagemError, StrategyError
from tests.cluster import nursery
from tests.cluster.tasks import free_ports

X = torch.arange(24, dtype=torch.float32).reshape(12, 2) / 10
Y = X.sum(1, keepdim=True)


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(num_workers=2) as made:
        made.run(int)
        yield made


@pytest.fixture(scope="module")
def coordinator(strategy: sg.ParameterServerStrategy) -> sg.ClusterCoordinator:
    return sg.ClusterCoordinator(strategy)


def model_in(strategy: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        torch.manual_seed(4)
        model = nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)


def linear_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """A step whose gradient is the same at all weights: any order of steps leads to the same."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) * y).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained_alone(num_epochs: int, batch_size: int = 4) -> dict[str, torch.Tensor]:
    model, optimizer = model_in(sg.OneDeviceStrategy())
    step = linear_step(model, optimizer)
    for _ in range(num_epochs):
        for x, y in zip(X.split(batch_size), Y.split(batch_size), strict=True):
            step(x, y)
    return model.state_dict()


def test_custom_training_loop_of_the_guide(
    strategy: sg.ParameterServerStrategy, coordinator: sg.ClusterCoordinator
) -> None:
    model, optimizer = model_in(strategy)
    train = linear_step(model, optimizer)

    def dataset_fn(input_context: sg.InputContext) -> list[Any]:
        batch_size = input_context.get_per_replica_batch_size(4)
        return list(zip(X.split(batch_size), Y.split(batch_size), strict=True)) * 100

    def per_worker_dataset_fn() -> Any:
        return strategy.distribute_from_function(dataset_fn)

    def step_fn(iterator: Iterator[Any]) -> Any:
        def replica_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert sg.get_replica_context().num_replicas_in_sync == 1
            return train(x, y)

        losses = strategy.run(replica_fn, args=next(iterator))
        return strategy.reduce("sum", losses)

    per_worker_iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
    total = 0.0
    for _ in range(2):
        losses = [coordinator.schedule(step_fn, args=(per_worker_iterator,)) for _ in range(5)]
        coordinator.join()
        total += sum(coordinator.fetch(losses))
    assert total != 0.0
    assert sum(count for each in strategy.staleness().values() for count in each.values()) >= 10


def test_step_of_the_guide_equals_one_process_whoever_does_it(
    strategy: sg.ParameterServerStrategy, coordinator: sg.ClusterCoordinator
) -> None:
    model, optimizer = model_in(strategy)
    train = linear_step(model, optimizer)

    def step_fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = strategy.distribute([(x, y)])
        (loss,) = [strategy.reduce("mean", strategy.run(train, args=batch)) for batch in rows]
        assert strategy.gather(strategy.run(lambda: x)).shape == x.shape
        assert len(strategy.local_results(strategy.run(train, kwargs={"x": x, "y": 0 * y}))) == 1
        return loss

    def schedule() -> None:
        for x, y in zip(X.split(4), Y.split(4), strict=True):
            sg.ClusterCoordinator(strategy).schedule(step_fn, args=(x, y))

    threads = [threading.Thread(target=schedule) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join()
    for name, value in trained_alone(num_epochs=3).items():
        torch.testing.assert_close(model.state_dict()[name], value)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise AssertionError("read behind the end")
        return {"x": X[2 * index : 2 * index + 2]}


GIVEN: dict[str, Callable[[Any], Any]] = {
    "list": lambda strategy: list(X.split(2)),
    "loader": lambda strategy: DataLoader(TensorDataset(X), batch_size=2),
    "dataset": lambda strategy: Rows(),
    "distributed loader": lambda strategy: strategy.distribute(DataLoader(TensorDataset(X), batch_size=2)),
    "distributed arrays": lambda strategy: strategy.distribute(X, global_batch_size=2),
    "distributed list": lambda strategy: strategy.distribute(list(X.split(2))),
    "distributed function": lambda strategy: strategy.distribute(lambda: iter(X.split(2))),
    "from function": lambda strategy: strategy.distribute_from_function(lambda _: (each for each in X.split(2))),
}


@pytest.mark.parametrize("where", ["main program", "worker"])
def test_data_of_every_kind_is_each_workers_own(
    strategy: sg.ParameterServerStrategy, coordinator: sg.ClusterCoordinator, where: str
) -> None:
    def first_and_last(iterator: Iterator[Any]) -> tuple[int, float, float]:
        values = [
            each if isinstance(each, torch.Tensor) else each["x" if isinstance(each, dict) else 0] for each in iterator
        ]
        return len(values), float(values[0].sum()), float(values[-1].sum())

    expected = (6, float(X[:2].sum()), float(X[-2:].sum()))
    for name, make in GIVEN.items():
        given = make(strategy) if where == "main program" else lambda make=make: make(strategy)
        for _ in range(2):
            iterator = iter(coordinator.create_per_worker_dataset(given))
            assert coordinator.schedule(first_and_last, args=(iterator,)).fetch() == expected, name


def test_data_that_no_worker_can_have_is_refused(coordinator: sg.ClusterCoordinator) -> None:
    with pytest.raises(StrategyError, match=r"takes a function that makes data, or the data.*got int 3"):
        coordinator.create_per_worker_dataset(3)
    with pytest.raises(StrategyError, match="cannot be sent"):
        coordinator.create_per_worker_dataset(each for each in X)


def test_strategy_has_one_coordinator(strategy: sg.ParameterServerStrategy, coordinator: sg.ClusterCoordinator) -> None:
    assert sg.ClusterCoordinator(strategy) is coordinator
    with sg.ParameterServerStrategy(num_workers=1) as other:
        value = sg.ClusterCoordinator(other).schedule(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # the program has dropped the one that scheduled it
            sg.ClusterCoordinator(other).join()
        assert repr(value) == "RemoteValue(failed)"
        assert sg.ClusterCoordinator(other) is not coordinator


def test_worker_that_comes_later_makes_data_with_the_strategy(four_cpus: None) -> None:
    with sg.ParameterServerStrategy(num_workers=1) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(lambda: strategy.distribute(X, global_batch_size=2))
        strategy.resize(2)
        values = [coordinator.schedule(next, args=(iter(data),)) for _ in range(8)]
        assert all(torch.equal(each, X[:2]) for each in coordinator.fetch(values))


def test_main_programs_calls_are_refused_in_a_function(coordinator: sg.ClusterCoordinator) -> None:
    strategy = coordinator.strategy
    for name in ("scope", "close", "resize", "staleness"):
        with pytest.raises(StrategyError, match=f"strategy.{name} was used inside replica 0"):
            coordinator.schedule(lambda name=name: getattr(strategy, name)()).fetch()
        with pytest.raises(StrategyError, match=f"strategy.{name}"):
            coordinator.join()
    with pytest.raises(StrategyError, match="args is a tuple of arguments"):
        coordinator.schedule(lambda: strategy.run(int, args=3)).fetch()  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="args is a tuple"):
        coordinator.join()


def test_each_worker_has_a_device(fork_server: None, inventory: Any) -> None:
    def where(folder: str) -> str:
        (Path(folder) / strategy.devices[0].name.replace("/", "_")).touch()
        deadline = time.monotonic() + 20
        while len(list(Path(folder).iterdir())) < strategy_size and time.monotonic() < deadline:
            time.sleep(0.005)
        return str(strategy.devices[0].name)

    sg.config.simulate_devices("GPU", 3)
    for given, expected in (
        ({"num_workers": 2}, ["/device:GPU:0", "/device:GPU:1"]),
        ({"devices": ["gpu:2", "gpu:0"]}, ["/device:GPU:0", "/device:GPU:2"]),
        ({"devices": ["cpu:0"]}, ["/device:CPU:0"]),
    ):
        with sg.ParameterServerStrategy(**given) as strategy, tempfile.TemporaryDirectory() as folder:
            strategy_size = strategy.num_workers
            coordinator = sg.ClusterCoordinator(strategy)
            values = [coordinator.schedule(where, args=(folder,)) for _ in range(2 * strategy_size)]
            assert sorted(set(coordinator.fetch(values))) == expected
            with strategy.scope():
                model = nn.Linear(2, 1)
            assert model.weight.device.type == "cpu"
    for given, message in (
        ({"num_workers": 4}, "each worker has a GPU of its own, and there are 3 for 4 workers"),
        ({"num_workers": 2, "devices": ["gpu:0"]}, "got num_workers=2 and 1 devices: /device:GPU:0"),
        ({"devices": []}, "must not be empty"),
        ({"devices": ["gpu:0", "gpu:0"]}, "listed twice"),
        ({"devices": ["gpu:7"]}, "does not exist"),
        ({"num_workers": 0}, "num_workers is a whole number from 1"),
        ({"num_workers": True}, "num_workers is a whole number from 1"),
        ({}, "needs num_workers= or devices="),
    ):
        with pytest.raises(StratagemError, match=message):
            sg.ParameterServerStrategy(**given)
    with sg.ParameterServerStrategy(devices=["gpu:0", "gpu:1"]) as strategy:
        with pytest.raises(StrategyError, match="got num_workers=3 and 2 devices"):
            strategy.resize(3)
        strategy.resize(1)
        assert strategy.num_workers == 1
    sg.config.set_visible_devices([], "GPU")
    with sg.ParameterServerStrategy(num_workers=4) as strategy:  # as many shares of the cores as there are workers
        assert strategy.devices[0].device_type == "CPU"


def test_what_a_cluster_cannot_have_is_refused(inventory: Any) -> None:
    def resolver(**jobs: list[str]) -> SimpleResolver:
        return SimpleResolver(jobs, task_type="worker", task_id=0)

    with_ps = resolver(worker=["127.0.0.1:1"], ps=["127.0.0.1:2"])
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((resolver(worker=["127.0.0.1:1"]),), {}, "with the job ps, and this cluster has the jobs worker"),
        ((), {"cluster_resolver": "TF_CONFIG"}, "one of sg.cluster's resolvers, got 'TF_CONFIG'"),
        ((2,), {"cluster_resolver": with_ps}, "give one of them, got 2 and"),
        ((with_ps, "rows"), {}, "variable_partitioner is a MinSizePartitioner, .* got 'rows'"),
        ((with_ps,), {"num_ps": 2}, "num_ps works with num_workers="),
        (
            (2,),
            {"variable_partitioner": sg.FixedShardsPartitioner(2)},
            "variable_partitioner is for tasks of a cluster",
        ),
    ]
    for args, options, message in cases:
        with pytest.raises(StrategyError, match=message):
            sg.ParameterServerStrategy(*args, **options)


IN_EACH_TASK = """
import json
import warnings
import torch
import stratagem as sg
from tests.foreign.test_tensorflow_servers import X, Y, linear_step, model_in

sg.config.simulate_devices("GPU", 2)
partitioner = sg.MinSizePartitioner(min_shard_bytes=4, max_shards=2)
with sg.ParameterServerStrategy(sg.cluster.TFConfigResolver(), variable_partitioner=partitioner) as strategy:
    model, optimizer = model_in(strategy)
    with strategy.scope():
        rows, others = sg.metrics.Sum(), sg.metrics.Sum()
    train = linear_step(model, optimizer)

    def step(x, y):
        rows.update_state(len(x))
        return train(x, y)

    assert strategy.num_replicas_in_sync == 4
    assert float(rows.result()) == 0.0
    for _ in range(1 + 4 * strategy.input_pipeline[1]):  # the chief is done long before the other
        for batch in strategy.distribute((X, Y), global_batch_size=4):
            losses = strategy.run(step, args=batch)
            assert len(strategy.local_results(losses)) == 2
    strategy.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert float(rows.result()) == 6.0 * (1 + 4 * strategy.input_pipeline[1])
        others.result()
    (told,) = said  # once
    expected = f"Sum has what steps of {strategy.task} have updated, which is one of 2 tasks that train"
    assert issubclass(told.category, sg.errors.StratagemWarning)
    assert expected in str(told.message), told.message
    if strategy.is_chief:
        values = {name: value.tolist() for name, value in model.state_dict().items()}
        print(json.dumps({"version": strategy.state_dict()["version"], "values": values}))
"""


def test_chief_of_a_cluster_saves_what_all_have_pushed(
    tmp_path: Path, forked_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens.create(tmp_path / "secrets" / "token")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": nursery.ROOT}
    with contextlib.ExitStack() as stack:
        started = []
        for job, index in (("ps", 0), ("ps", 1), ("chief", 0), ("worker", 0)):
            place = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            own = {_env.TF_CONFIG: place, _env.TOKEN_FILE: str(tmp_path / "secrets" / "token")}
            program = nursery.Program(["-c", IN_EACH_TASK], env={**os.environ, **own}, **pipes)
            started.append(stack.enter_context(program))
            stack.callback(program.kill)
        said = [program.communicate(timeout=100) for program in started]
    assert [(program.returncode, err) for program, (_, err) in zip(started, said, strict=True)] == [(0, "")] * 4
    found = json.loads(said[2][0])
    assert found["version"] == 3 * (1 + 5)
    model, optimizer = model_in(sg.OneDeviceStrategy())
    step = linear_step(model, optimizer)
    for place, num_epochs in ((0, 1), (1, 5)):
        for _ in range(num_epochs):
            for x, y in zip(X.split(4), Y.split(4), strict=True):
                step(x.chunk(2)[place], y.chunk(2)[place])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(found["values"][name]), value)


@pytest.mark.soak
def test_custom_training_loop_of_the_guide_with_keras(four_cpus: None) -> None:
    keras = pytest.importorskip("keras")
    with sg.ParameterServerStrategy(num_workers=2) as strategy:
        coordinator = sg.ClusterCoordinator(strategy)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.RMSprop(learning_rate=0.1)
            optimizer.build(model.trainable_variables)  # workers share what it keeps

        def step_fn(iterator: Iterator[Any]) -> Any:
            def replica_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                model.zero_grad()
                loss = (model(x, training=True) - y).square().mean()
                loss.backward()
                optimizer.apply([each.value.grad for each in model.trainable_variables], model.trainable_variables)
                return loss.detach()

            return strategy.reduce("mean", strategy.run(replica_fn, args=next(iterator)))

        data = coordinator.create_per_worker_dataset(lambda: strategy.distribute_from_function(lambda _: [(X, Y)] * 40))
        iterator = iter(data)
        losses = coordinator.fetch([coordinator.schedule(step_fn, args=(iterator,)) for _ in range(20)])
        coordinator.join()
        assert float(losses[-1]) < float(losses[0])
        assert int(optimizer.iterations) == 20
