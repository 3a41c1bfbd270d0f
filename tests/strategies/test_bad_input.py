"""Wrong calls say which rule they broke, what came and what to do; the strategy goes on working."""

import copy
import gc
import io
import itertools
import math
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import stratagem as sg
from stratagem.cluster.launch.agent import Patience
from stratagem.cluster.launch.plan import Machine
from stratagem.cluster.membership.membership import Membership
from stratagem.errors import (
    ClusterSpecError,
    DeviceError,
    EstimatorError,
    LaunchError,
    ReplicaError,
    StratagemError,
    StrategyError,
    UnevenDataError,
)


@pytest.fixture(scope="module")
def servers(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    """Two workers that each have steps of their own."""
    with sg.ParameterServerStrategy(2) as made:
        repr(made.run(int))  # its workers are there before the first test
        yield made


@pytest.fixture(scope="module", params=["mirrored", "one device", "parameter server"])
def each(
    strategy: sg.MirroredStrategy, servers: sg.ParameterServerStrategy, request: pytest.FixtureRequest
) -> Iterator[sg.Strategy]:
    """A strategy of each kind, one after the other."""
    with sg.OneDeviceStrategy() as one:
        yield {"mirrored": strategy, "one device": one, "parameter server": servers}[request.param]


@pytest.fixture(autouse=True)
def still_works(strategy: sg.MirroredStrategy) -> Iterator[None]:
    yield
    assert strategy.run(lambda: 1).values == (1, 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_model_made_outside_the_scope(strategy: sg.MirroredStrategy) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(
        StrategyError, match=r"model Sequential \(4 parameters\) was created outside strategy.scope\(\)"
    ):
        strategy.run(lambda: model(torch.ones(2)))
    with pytest.raises(StrategyError, match=r"parameter of shape \(2, 2\) was created outside"):
        strategy.run(lambda weight=model[0].weight: weight.sum())


def test_optimizer_made_outside_the_scope(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(StrategyError, match="optimizer SGD was created outside"):
        strategy.run(train(model, optimizer), args=(torch.ones(1, 2),))


def test_adopted_model_and_optimizer_with_state(strategy: sg.MirroredStrategy) -> None:
    def course(adopt: Callable[..., None], run: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer)(torch.ones(2, 2))
        adopt(model, optimizer)
        adopt(model, optimizer)
        for _ in range(2):
            run(train(model, optimizer), args=(torch.ones(2, 2),))
        adopt(model, optimizer)  # once more changes nothing
        run(train(model, optimizer), args=(torch.ones(2, 2),))
        return [*model.weight.flatten().tolist(), float(optimizer.state_dict()["state"][0]["step"])]

    ours = course(strategy.adopt, strategy.run)
    assert ours == pytest.approx(course(lambda *_: None, lambda step, args: step(*args)))
    assert ours[-1] == 4


@pytest.mark.parametrize("given", [3, None, "model", torch.ones(2)], ids=repr)
def test_adopting_something_else(strategy: sg.MirroredStrategy, given: object) -> None:
    with pytest.raises(StrategyError, match=f"adopt takes modules, optimizers.* got {type(given).__name__}"):
        strategy.adopt(given)


INSIDE = {
    "MirroredStrategy()": lambda strategy: sg.MirroredStrategy(),
    "OneDeviceStrategy()": lambda strategy: sg.OneDeviceStrategy(),
    "run": lambda strategy: strategy.run(len, args=("a",)),
    "scope": lambda strategy: strategy.scope(),
    "distribute": lambda strategy: strategy.distribute([torch.ones(2)]),
    "distribute_from_function": lambda strategy: strategy.distribute_from_function(lambda _: [torch.ones(2)]),
    "reduce": lambda strategy: strategy.reduce("mean", 1.0),
    "gather": lambda strategy: strategy.gather(torch.ones(1)),
    "local_results": lambda strategy: strategy.local_results(1.0),
    "adopt": lambda strategy: strategy.adopt(nn.Linear(1, 1)),
    "close": lambda strategy: strategy.close(),
    "with": lambda strategy: strategy.__enter__(),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("replica", [0, 1])
def test_what_belongs_to_the_main_program(strategy: sg.MirroredStrategy, name: str, replica: int) -> None:
    call = INSIDE[name]

    def inside() -> None:
        if sg.get_replica_context().replica_id_in_sync_group == replica:  # type: ignore[union-attr]
            call(strategy)

    with pytest.raises(StrategyError, match=rf"inside replica {replica}; (call|use) it in the main program"):
        strategy.run(inside)


@pytest.mark.parametrize("name", INSIDE)
def test_what_belongs_to_the_main_program_of_one_device(name: str) -> None:
    with sg.OneDeviceStrategy() as one, pytest.raises(StrategyError, match="inside replica 0; call it in the main"):
        one.run(lambda: INSIDE[name](one))


def test_replicas_answer_how_many_they_are(each: sg.Strategy) -> None:
    told = each.local_results(each.run(lambda: (each.num_replicas, each.num_replicas_in_sync, each.world_size)))
    assert set(told) == {(each.num_replicas,) * 3}


def test_batch_smaller_than_the_replicas_counts_once(strategy: sg.MirroredStrategy) -> None:
    (batch,) = strategy.distribute([torch.tensor([3.0])])
    assert strategy.reduce("mean", strategy.run(lambda x: x.mean(), args=(batch,))) == 3
    with pytest.raises(UnevenDataError, match="2 replicas"):
        list(strategy.distribute([torch.ones(3)], uneven="error"))
    with pytest.raises(StrategyError, match="uneven"):
        strategy.distribute([torch.ones(3)], uneven="sometimes")


def test_parameter_unused_by_some_replicas_as_an_error(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"], unused="error") as strict:
        with strict.scope():
            model = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)})

        def step() -> None:
            replica = sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
            hidden = model["one"](torch.ones(1, 1))
            (model["two"](hidden) if replica == 0 else hidden).sum().backward()

        with pytest.raises(StrategyError, match=r"'two.weight' got a gradient on replica 0 but not on 1"):
            strict.run(step)
        assert strict.run(lambda: 1).values == (1, 1)


def test_what_cannot_be_reduced(strategy: sg.MirroredStrategy) -> None:
    with pytest.raises(StrategyError, match="no reduction named 'avg'; known: sum, mean, max, min"):
        strategy.reduce("avg", strategy.run(lambda: 1.0))
    with pytest.raises(StrategyError, match="str 'ok'; return tensors or numbers"):
        strategy.reduce("mean", strategy.run(lambda: "ok"))

    def differing() -> dict[str, int]:
        replica = sg.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
        return {"loss": 1} if replica else {"loss": 1, "acc": 2}

    with pytest.raises(StrategyError, match=r"replica 0 returned \{'loss', 'acc'\}, replica 1 returned \{'loss'\}"):
        strategy.run(differing)


@pytest.mark.parametrize(
    "options",
    [
        {"gradients": "avg"},
        {"unused": None},
        {"on_nonfinite": ["skip"]},
    ],
    ids=repr,
)
def test_wrong_options(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(StrategyError, match=name) as caught:
        sg.MirroredStrategy(**options)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("devices", [[], ["cpu:0", "cpu:0"], ["gpx:0"], ["cpu:7"], "cpu:0", [3.5]], ids=repr)
def test_wrong_devices(devices: Any) -> None:
    with pytest.raises(DeviceError):
        sg.MirroredStrategy(devices)


def test_what_cannot_be_sent_is_named_before_anything_runs(strategy: sg.MirroredStrategy) -> None:
    lines, ran = (each for each in "ab"), []

    def step() -> None:
        ran.append(1)
        next(lines)

    with pytest.raises(StrategyError, match=r"a generator cannot be sent .*\(captured as 'lines' by step\)"):
        strategy.run(step)
    with pytest.raises(StrategyError, match="a generator cannot be sent to the replicas"):
        strategy.run(lambda x: ran.append(1), args=((i for i in range(3)),))
    assert not ran


def test_result_that_cannot_be_sent_is_named(strategy: sg.MirroredStrategy) -> None:
    with pytest.raises(RuntimeError, match="what the function returned cannot be sent to the main program"):
        strategy.run(lambda: (each for each in "ab"))


def test_calls_that_are_not_calls(strategy: sg.MirroredStrategy) -> None:
    with pytest.raises(StrategyError, match="got int 3"):
        strategy.run(3)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=r"args is a tuple .* got Tensor"):
        strategy.run(len, args=torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=r"got Tensor; .* in one tuple: write .*args=\(x, y\)"):
        strategy.run(len, torch.ones(2), torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="kwargs is a dict"):
        strategy.run(len, kwargs=[1])  # type: ignore[arg-type]


PAIRS = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
SINGLE: Any = DataLoader(torch.ones(8, 2), batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loader", "wrong"),
    [
        *itertools.product(
            (PAIRS, SINGLE),
            ("data", "(data,)", "loader", "iter(loader)", "(iter(loader),)", "iterator", "(iterator,)"),
        ),
        (PAIRS, "loader.dataset"),
        (PAIRS, "{'x': torch.ones(4, 2)}"),
        (SINGLE, "next(iter(loader))"),
        (SINGLE, "next(iter(data))"),
    ],
)
def test_what_an_error_says_to_write_can_be_run(strategy: sg.MirroredStrategy, loader: Any, wrong: str) -> None:
    def of_pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum()

    def of_single(x: Any) -> int:
        return len(x)

    data = strategy.distribute(loader)
    names = {"strategy": strategy, "loader": loader, "data": data, "torch": torch}
    names["step"] = of_pairs if loader is PAIRS and "{" not in wrong else of_single
    given = eval(wrong, names, {"iterator": iter(data)})  # noqa: S307
    if wrong.startswith(("next", "{")):
        names["batch"] = given
    with pytest.raises(StrategyError) as raised:
        strategy.run(names["step"], args=given)
    hints = re.findall("`([^`]+)`", str(raised.value))
    assert hints
    for hint in hints:
        exec(hint, names, {"iterator": iter(data)})  # noqa: S102


def test_arguments_that_the_function_does_not_take(each: sg.Strategy) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    data = each.distribute((torch.ones(4), torch.ones(4)), global_batch_size=4)
    match = (
        r"run calls step\(x, y\) with 1 argument.*missing a required argument: 'y'.*: write args=iterator for its parts"
    )
    with pytest.raises(StrategyError, match=match):
        each.run(step, args=(iter(data),), num_steps=2)
    with pytest.raises(StrategyError, match=r"1 argument.*write run\(step, args=\(x, y\)\)"):
        each.run(step, args=(torch.ones(2),), num_steps=2)
    assert len(each.run(step, args=iter(data), num_steps=2)) == 1


@pytest.mark.parametrize("make", [lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]), sg.OneDeviceStrategy])
def test_batch_given_as_one_argument_says_what_to_write(make: Callable[[], sg.Strategy], four_cpus: None) -> None:
    with make() as strategy:
        for batch in strategy.distribute((torch.ones(4), torch.ones(4)), global_batch_size=4):
            with pytest.raises(TypeError) as raised:
                strategy.run(lambda x, y: x + y, args=(batch,))
        assert "write args=batch for its parts" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (
            {"batch_size": 4},
            "write global_batch_size=4: the number of rows that all replicas together take in one step",
        ),
        ({"num_workers": 2}, r"give it to a DataLoader: strategy\.distribute\(DataLoader\(data, num_workers=2"),
        ({"shufle": True}, "did you mean 'shuffle'"),
        ({"xyz": 1}, "it has global_batch_size, shuffle, uneven, auto_shard, batch_dim, prefetch"),
    ],
)
def test_options_that_distribute_does_not_have(each: sg.Strategy, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(StrategyError, match=f"distribute has no option .*; {hint}"):
        each.distribute(torch.ones(4), **options)


def test_training_outside_run(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.run(train(model, optimizer), args=(torch.ones(1, 2),))
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(StrategyError, match=r"backward\(\) reached 2 distributed parameter"):
        model(torch.ones(1, 2)).sum().backward()
    assert all(map(torch.equal, before, [parameter.grad for parameter in model.parameters()]))
    with pytest.raises(StrategyError, match=r"optimizer.step\(\) was called outside strategy.run"):
        optimizer.step()
    other = torch.ones(2, requires_grad=True)
    other.sum().backward()
    assert other.grad.tolist() == [1, 1]


def test_training_before_the_first_run(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
    with pytest.raises(StrategyError, match=r"backward\(\) reached 2 distributed parameter"):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is None


def test_sparse_gradients(strategy: sg.MirroredStrategy) -> None:
    with strategy.scope():
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(StrategyError, match=r"Adam takes no sparse gradients, got one of shape .*; use SparseAdam"):
        strategy.run(step)


def test_lazy_modules(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        with other.scope():
            model = nn.LazyLinear(2)
        with pytest.raises(StrategyError, match="a lazy module has no shape yet"):
            other.run(lambda: model(torch.ones(1, 3)))
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as other:
        with other.scope():
            model = nn.LazyLinear(2)
            model(torch.ones(1, 3))
        assert other.run(lambda: model(torch.ones(1, 3))).values[1].shape == (1, 2)


TIMES: list[tuple[Callable[..., object], str, type[StratagemError]]] = [
    *((kind, "stall_timeout_s", StrategyError) for kind in (sg.MirroredStrategy, sg.CentralStorageStrategy)),
    *((sg.MultiWorkerMirroredStrategy, name, StrategyError) for name in ("stall_timeout_s", "join_timeout_s")),
    *((sg.LocalSGDStrategy, name, StrategyError) for name in ("stall_timeout_s", "worker_timeout_s")),
    (lambda **time: sg.ParameterServerStrategy(2, **time), "stall_timeout_s", StrategyError),
    (lambda **time: sg.ParameterServerStrategy(2, **time), "restart_window_s", StrategyError),
    (sg.estimator.RunConfig, "save_checkpoints_secs", EstimatorError),
    (sg.estimator.CheckpointSaverHook, "save_secs", EstimatorError),
    (lambda **time: sg.estimator.EvalSpec(list, **time), "throttle_secs", EstimatorError),
    (lambda **time: sg.RayCluster(1, **time), "placement_timeout_s", ClusterSpecError),
    (lambda **time: Membership({"worker": ["127.0.0.1:1"]}, "worker", 0, **time), "join_timeout_s", ClusterSpecError),
    (Patience, "grace_s", LaunchError),
    (Machine, "join_timeout_s", LaunchError),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 10**10, True, "1"], ids=repr)
def test_times_that_are_none(value: Any) -> None:
    for make, name, error in TIMES:
        with pytest.raises(error, match=r"is a number of seconds .*, got") as caught:
            make(**{name: value})
        assert repr(value) in str(caught.value)
    with sg.Server.create_local_server() as server, pytest.raises(ClusterSpecError, match="timeout_s is a number of"):
        server.join(value)


@pytest.mark.parametrize("size", [10**30, 0, -1, True, 2.5, "64", np.int64(4)], ids=repr)
def test_batch_sizes_that_are_none(each: sg.Strategy, size: Any) -> None:
    for call in (
        lambda: each.distribute(torch.ones(4), global_batch_size=size),
        lambda: each.global_batch_size(size),
        lambda: sg.InputContext().get_per_replica_batch_size(size),
    ):
        with pytest.raises(StrategyError, match=r"batch_size is a positive int, got \w+"):
            call()


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "64", torch.tensor(2.0)], ids=repr)
def test_global_batches_of_losses_that_are_none(size: Any) -> None:
    with pytest.raises(StrategyError, match=r"batch_size is a positive int, got \w+"):
        sg.compute_average_loss(torch.ones(2), global_batch_size=size)


def test_what_is_neither_copied_nor_saved(each: sg.Strategy, servers: sg.ParameterServerStrategy) -> None:
    coordinator = sg.ClusterCoordinator(servers)
    with sg.Graph() as graph:
        node = sg.constant(1.0)
    streams = each.distribute([torch.ones(4)]), each.distribute(torch.ones(4), global_batch_size=2)
    with sg.Session(graph) as session, sg.Server.create_local_server() as server:
        for kept in (
            *(each, sg.get_strategy(), graph, session, server, coordinator, coordinator.schedule(int)),
            *(*streams, *map(iter, streams)),
        ):
            for way in (copy.deepcopy, copy.copy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
                with pytest.raises(StrategyError, match=f"a {type(kept).__name__} is of use only as it is"):
                    way(kept)
        with pytest.raises(StratagemError, match="'Const' stands for a value of a graph"):
            pickle.dumps(node)


def test_values_of_all_replicas_can_be_copied_and_saved(strategy: sg.MirroredStrategy) -> None:
    large = strategy.run(lambda: torch.ones(100_000))
    for copied in (copy.deepcopy(large), pickle.loads(pickle.dumps(large))):  # noqa: S301  # made in this line
        assert [each.sum() for each in copied.values] == [100_000] * 2


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class DemandingError(Exception):
    def __init__(self, what: str, *, needed: int) -> None:
        super().__init__(f"{what} {needed}")


class IrreducibleError(Exception):
    def __reduce__(self) -> Any:
        raise UnspeakableError


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (UnspeakableError, "UnspeakableError: <exception str"),
        (LockedError, "LockedError: locked"),
        (lambda: DemandingError("a", needed=2), "DemandingError: a 2"),
        (IrreducibleError, "IrreducibleError"),
    ],
)
def test_errors_that_cannot_travel(
    strategy: sg.MirroredStrategy, servers: sg.ParameterServerStrategy, make: Callable[[], Exception], line: str
) -> None:
    def step(replica: int) -> None:
        if sg.get_replica_context().replica_id_in_sync_group == replica:  # type: ignore[union-attr]
            raise make()

    with pytest.raises(type(make())):
        strategy.run(step, args=(0,))
    with pytest.raises(ReplicaError, match=f"replica 1 raised .*{line}") as caught:
        strategy.run(step, args=(1,))
    assert "raise make()" in caught.value.__notes__[0]
    with pytest.raises(ReplicaError, match=f"worker 0 raised .*{line}"):
        repr(servers.run(step, args=(0,)))
    with pytest.raises(type(make())), sg.MirroredStrategy(["cpu:2", "cpu:3"]):
        raise make()


@pytest.mark.parametrize(
    "value",
    ["a", b"a", None, object(), {1, 2}, {"x": None}, [1, "b"], np.array(["a"]), float],
    ids=lambda value: f"{value!r:.10}",
)
def test_exchanges_of_what_is_no_tensor(each: sg.Strategy, value: object) -> None:
    def exchange(way: str) -> object:
        replica = sg.get_replica_context()
        if way == "all_reduce":
            return replica.all_reduce("sum", value)  # type: ignore[union-attr]
        if way == "all_gather":
            return replica.all_gather(value)  # type: ignore[union-attr]
        return replica.merge_call(lambda *_: 1, args=(value,))  # type: ignore[union-attr]

    for way in ("all_reduce", "all_gather", "merge_call"):
        with pytest.raises(StrategyError, match=f"{way} exchanges tensors, arrays and numbers, .* got"):
            repr(each.run(exchange, args=(way,)))


@pytest.mark.parametrize("op", ["avg", "SUMS", None, 3, ["sum"]], ids=repr)
def test_reductions_that_there_are_not(each: sg.Strategy, op: Any) -> None:
    one = torch.ones(1)
    with pytest.raises(StrategyError, match=r"no reduction named .*; known: sum, mean, max, min"):
        repr(each.run(lambda: sg.get_replica_context().all_reduce(op, one)))  # type: ignore[union-attr]
    with pytest.raises(StrategyError, match=r"no reduction named .*; known: sum, mean, max, min"):
        each.reduce(op, each.run(lambda: one))


@pytest.mark.parametrize("axis", [1, -2, "x", None, 0.0, True], ids=repr)
def test_axes_that_there_are_not(each: sg.Strategy, axis: Any) -> None:
    result = each.run(lambda: torch.ones(1))
    for call in (
        lambda: each.gather(result, axis=axis),
        lambda: each.run(lambda: sg.get_replica_context().all_gather(torch.ones(1), axis=axis)),  # type: ignore[union-attr]
    ):
        with pytest.raises(StrategyError, match=r"axis is a whole number from -1 to 0 for shape \(1,\), got"):
            repr(call())


def test_numbers_are_gathered_as_a_vector(each: sg.Strategy) -> None:
    gathered = each.run(lambda: sg.get_replica_context().all_gather(2.0))  # type: ignore[union-attr]
    assert each.local_results(gathered)[0].tolist() == [2.0] * each.num_replicas_in_sync


def test_gathering_what_does_not_fit_together(strategy: sg.MirroredStrategy) -> None:
    grown = strategy.run(lambda: torch.ones(1, 1 + sg.get_replica_context().replica_id_in_sync_group))  # type: ignore[union-attr]
    with pytest.raises(StrategyError, match=r"replicas returned \(1, 1\), \(1, 2\); gather\(value, pad=0\)"):
        strategy.gather(grown)


def nested(depth: int = 10_000) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def turning() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize("make", [nested, turning])
def test_nestings_without_end(each: sg.Strategy, make: Callable[[], list[Any]]) -> None:
    value = make()
    for call in (
        lambda: each.run(len, args=(value,)),
        lambda: each.run(len, kwargs={"x": value}),
        lambda: each.run(lambda: sg.get_replica_context().all_gather(make())),  # type: ignore[union-attr]
        lambda: each.reduce("sum", value),
        lambda: each.gather(value),
        lambda: each.local_results(value),
        lambda: list(each.distribute([value])),
    ):
        with pytest.raises(StrategyError, match="a nesting of values is at most 200 deep"):
            repr(call())


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is collected where the stack ends has no room for its finalizers."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_results_and_closures_without_end(strategy: sg.MirroredStrategy) -> None:
    deep = nested()
    with pytest.raises(StrategyError, match="a nesting of values is at most 200 deep"):
        strategy.run(nested)
    with pytest.raises(StrategyError, match="cannot be sent to the replicas"):
        strategy.run(lambda: len(deep))
    assert strategy.run(lambda: nested(100)) is not None


def test_a_folder_that_is_gone(tmp_path: Path, four_cpus: None) -> None:
    before, gone = os.getcwd(), tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    try:
        gone.rmdir()
        for make in (sg.MirroredStrategy, lambda: sg.ParameterServerStrategy(2)):
            with pytest.raises(StrategyError, match="the folder that this program runs in does not exist any more"):
                make()
        with pytest.raises(EstimatorError, match="the folder that this program runs in"):
            sg.estimator.Estimator(lambda features: None, "models")
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "make",
    [lambda: sg.MirroredStrategy(["cpu:2", "cpu:3"]), sg.OneDeviceStrategy, lambda: sg.ParameterServerStrategy(2)],
)
def test_what_is_closed(make: Callable[[], sg.Strategy], four_cpus: None) -> None:
    closed = make()
    scope, data = closed.scope(), closed.distribute([torch.ones(4)] * 2)
    loader = closed.distribute(torch.ones(8), global_batch_size=4)
    passes = iter(data), iter(loader)
    for each in passes:
        next(each)
    closed.close()
    for call in (
        lambda: closed.run(int),
        closed.scope,
        scope.__enter__,
        closed.__enter__,
        lambda: closed.distribute([torch.ones(4)]),
        lambda: closed.distribute_from_function(lambda _: [torch.ones(4)]),
        lambda: next(passes[0]),
        lambda: next(passes[1]),
        lambda: iter(data),
        lambda: iter(loader),
        lambda: closed.adopt(nn.Linear(1, 1)),
    ):
        with pytest.raises(StrategyError, match=r"was closed at .*test_bad_input.py:\d+; make a new one"):
            call()
    if isinstance(closed, sg.ParameterServerStrategy):
        with pytest.raises(StrategyError, match="was closed at"):
            sg.ClusterCoordinator(closed)


def test_what_a_coordinator_does_not_take(servers: sg.ParameterServerStrategy) -> None:
    coordinator = sg.ClusterCoordinator(servers)
    for value in (None, 3, "x", {"loss": 1.0}, servers):
        with pytest.raises(StrategyError, match="fetch takes what schedule returned, also in a nesting, got"):
            coordinator.fetch(value)
    assert coordinator.fetch([1, coordinator.schedule(int), ()]) == [1, 0, ()]
    with sg.ParameterServerStrategy(1) as others:
        foreign = sg.ClusterCoordinator(others).schedule(int)
        with pytest.raises(StrategyError, match="a value of another strategy; ask the coordinator that scheduled it"):
            coordinator.fetch(foreign)
        others.close()
    with pytest.raises(StrategyError, match="got NoneType None"):
        coordinator.schedule(None)  # type: ignore[arg-type]
    for returned in (None, 3):
        with pytest.raises(StrategyError, match=r"create_per_worker_dataset returned \w+ (None|3); it must return an"):
            coordinator.create_per_worker_dataset(lambda returned=returned: returned)


def test_data_that_is_none(each: sg.Strategy) -> None:
    with pytest.raises(StrategyError, match="distribute_from_function returned NoneType None"):
        each.distribute_from_function(lambda _: None)
    with pytest.raises(StrategyError, match="given to distribute returned NoneType None"):
        iter(each.distribute(lambda: None))


def test_samplers_that_divide_the_data_themselves(each: sg.Strategy) -> None:
    dataset = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(dataset, num_replicas=4, rank=0)
    for loader in (
        DataLoader(dataset, batch_size=4, sampler=sampler),
        DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False)),
    ):
        with pytest.raises(StrategyError, match=r"leaves 3 of 4 examples to others.*; remove the sampler"):
            each.distribute(loader)
    whole = DistributedSampler(dataset, num_replicas=1, rank=0)
    assert len(list(each.distribute(DataLoader(dataset, batch_size=4, sampler=whole)))) == 2


@pytest.mark.parametrize("value", [1.0, torch.ones(2), {"a": 1.0}], ids=repr)
def test_plain_values_have_no_sum_over_replicas(strategy: sg.MirroredStrategy, value: object) -> None:
    with pytest.raises(StrategyError, match=r"reduce\('sum'\) takes what run returned, one value from each of 2"):
        strategy.reduce("sum", value)
    with pytest.raises(StrategyError, match="gather takes what run returned"):
        strategy.gather(value)
    assert torch.equal(strategy.reduce("mean", 3.0), torch.tensor(3.0))
    with sg.OneDeviceStrategy() as one:
        assert one.reduce("sum", 3.0) == 3


def test_values_of_all_replicas_are_compared_with_nothing(strategy: sg.MirroredStrategy) -> None:
    value, other = strategy.run(lambda: torch.tensor(1.0)), strategy.run(int)
    for call in (
        lambda: value == 1.0,
        lambda: value != 1.0,
        lambda: value == other,
        lambda: bool(value),
        lambda: not value,
        lambda: 1.0 in value,
        lambda: divmod(value, 2),
        lambda: math.floor(value),
        lambda: value << 1,
    ):
        with pytest.raises(StrategyError, match=r"was asked of a PerReplica, .* strategy.reduce\('mean', value\)"):
            call()
    assert value in [value]
    assert value in {value, other}
    assert {value: 1, other: 2}[other] == 2


def test_batches_of_another_strategy(strategy: sg.MirroredStrategy, servers: sg.ParameterServerStrategy) -> None:
    (of_two,) = strategy.distribute([torch.arange(6.0)])
    with sg.OneDeviceStrategy() as one:
        (of_one,) = one.distribute([torch.arange(6.0)])
        for runner, batch, text in (
            (one, of_two, "OneDeviceStrategy has 1 .* of a strategy with 2"),
            (sg.get_strategy(), of_two, "DefaultStrategy has 1 .* of a strategy with 2"),
            (servers, of_two, "ParameterServerStrategy has 1 .* of a strategy with 2"),
            (strategy, of_one, "MirroredStrategy has 2 .* of a strategy with 1"),
        ):
            with pytest.raises(StrategyError, match=f"{text}, so that rows would be lost"):
                runner.run(torch.sum, args=(batch,))
            with pytest.raises(StrategyError, match=f"{text}, so that rows would be lost"):
                runner.run(torch.sum, kwargs={"input": {"deep": batch}})
    with pytest.raises(StrategyError, match="of a strategy with 2"):
        sg.ClusterCoordinator(servers).schedule(torch.sum, args=(of_two,))


def test_the_default_strategy_stays_open() -> None:
    with sg.get_strategy() as default:
        pass
    default.close()
    assert sg.get_strategy().run(lambda: 3) == 3


def test_a_scope_is_entered_again(each: sg.Strategy) -> None:
    scope = each.scope()
    with scope as first, scope as second:
        assert sg.get_strategy() is each is first is second
    with scope:
        assert sg.has_strategy()
    assert not sg.has_strategy()

    @each.scope()
    def build() -> bool:
        return sg.has_strategy()

    assert build()


@pytest.mark.parametrize("module", [None, "net", 3, nn.Linear, [nn.BatchNorm1d(2)]], ids=repr)
def test_modules_that_are_none(module: Any) -> None:
    with pytest.raises(StrategyError, match=f"takes a torch module and changes it, got {type(module).__name__}"):
        sg.convert_sync_batchnorm(module)


def yielding() -> Iterator[int]:
    yield 1


async def later() -> int:
    return 1


def test_functions_that_have_not_done_their_work(each: sg.Strategy) -> None:
    for function in (yielding, later):
        with pytest.raises(StrategyError, match=f"got {function.__name__} with yield or async; return the values"):
            each.run(function)
    with pytest.raises(StrategyError, match=r"kwargs has the names of arguments as its keys, got \[1\]"):
        each.run(dict, kwargs={1: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("number", [None, "2", [1, 2], torch.ones(3), -1, math.nan, math.inf], ids=repr)
def test_weights_that_are_none(each: sg.Strategy, number: Any) -> None:
    with pytest.raises(StrategyError, match="a weight is a number of rows or tokens, 0 or more, got"):
        repr(each.run(lambda: sg.get_replica_context().weight(number)))  # type: ignore[union-attr]


def test_calls_of_the_replica_that_are_not_calls(each: sg.Strategy) -> None:
    with pytest.raises(StrategyError, match="update calls a function that changes variables, got NoneType"):
        repr(each.run(lambda: sg.get_replica_context().update(None)))  # type: ignore[union-attr,arg-type]
    for function, args in ((None, ()), (len, 3)):
        with pytest.raises(StrategyError, match="merge_call takes a function whose first argument is the strategy"):
            repr(each.run(lambda: sg.get_replica_context().merge_call(function, args)))  # type: ignore[union-attr,arg-type]  # noqa: B023


def test_runs_that_are_given_an_iterator(each: sg.Strategy) -> None:
    iterator = iter(each.distribute([torch.ones(4)]))
    for run in (
        lambda: each.run(next, args=(iterator,)),
        lambda: each.run(next, args=iterator),
        lambda: each.run(next, kwargs={"it": [iterator]}),
    ):
        with pytest.raises(StrategyError, match=r"num_steps=16\)`, or give it one batch: .* args=next\(iterator\)"):
            run()


def test_runs_that_are_given_distributed_data_instead_of_an_iterator(each: sg.Strategy) -> None:
    for data in (each.distribute([torch.ones(4)]), each.distribute(torch.ones(4), global_batch_size=2)):
        for num_steps in (None, 2):
            with pytest.raises(StrategyError, match=r"got distributed data.*`iterator = iter\(data\)`"):
                each.run(len, args=(data,), num_steps=num_steps)


@pytest.mark.parametrize("num_steps", [0, -1, True, 2.5, "2", torch.tensor(2)])
def test_runs_of_no_number_of_steps(each: sg.Strategy, num_steps: Any) -> None:
    with pytest.raises(StrategyError, match="num_steps is a positive int, got "):
        each.run(int, num_steps=num_steps)


def test_runs_that_are_given_an_iterator_of_another_strategy(each: sg.Strategy) -> None:
    iterator = iter(sg.get_strategy().distribute([torch.ones(4)]))
    with pytest.raises(StrategyError, match="an iterator over data that another DefaultStrategy has distributed"):
        each.run(len, args=(iterator,), num_steps=2)


def test_runs_whose_arguments_are_an_iterator_over_single_tensors(each: sg.Strategy) -> None:
    with pytest.raises(StrategyError, match=r"args=iterator is for batches that are tuples .*args=\(iterator,\)"):
        repr(each.run(len, args=iter(each.distribute([torch.ones(4)])), num_steps=2))


def test_data_that_is_asked_for_wrongly(each: sg.Strategy) -> None:
    with pytest.raises(StrategyError, match=r"a function of one argument, its InputContext, got turning\("):
        each.distribute_from_function(turning)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="shuffle is True or False, got 'no'"):
        each.distribute(torch.ones(4), global_batch_size=2, shuffle="no")  # type: ignore[arg-type]


def test_results_that_have_no_sum(strategy: sg.MirroredStrategy) -> None:
    for make in (lambda: np.array(["a"]), lambda: np.array([None])):
        with pytest.raises(StrategyError, match=r"cannot reduce\('sum'\) ndarray .*; return tensors or numbers"):
            strategy.reduce("sum", strategy.run(make))
    with pytest.raises(StrategyError, match=r"complex numbers have no max, replicas returned torch\.complex64"):
        strategy.reduce("max", strategy.run(lambda: 1j))

    def of_other_rank() -> torch.Tensor:
        replica = sg.get_replica_context()
        return replica.all_gather(torch.ones([1] * (1 + replica.replica_id_in_sync_group)))  # type: ignore[union-attr,no-any-return]

    with pytest.raises(StrategyError, match=r"all_gather joins .* replicas have \(1,\), \(1, 1\); pad them"):
        strategy.run(of_other_rank)


def test_sparse_results_come_back(strategy: sg.MirroredStrategy) -> None:
    result = strategy.run(lambda: torch.eye(2).to_sparse())
    assert strategy.reduce("sum", result).to_dense().tolist() == [[2, 0], [0, 2]]
    assert strategy.gather(result).to_dense().shape == (4, 2)


@pytest.mark.parametrize("value", [None, 3, "loss", torch.tensor(1.0)], ids=repr)
def test_losses_and_towers_that_are_none(value: Any) -> None:
    with pytest.raises(StrategyError, match="per_example_loss is a tensor with a loss for each example, got"):
        sg.compute_average_loss(value)
    with pytest.raises(StrategyError, match=r"average_gradients takes a list of towers|a tower has pairs"):
        sg.average_gradients(value)
