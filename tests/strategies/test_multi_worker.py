"""MultiWorkerMirroredStrategy beside its training: who takes part, what is refused, what each worker sees."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.cluster import token
from stratagem.cluster.membership import membership
from stratagem.cluster.resolvers.simple import SimpleResolver
from stratagem.engine import machines as workers_module
from stratagem.errors import ClusterJoinError, StratagemWarning, StrategyError
from stratagem.variables import agreement
from tests.cluster.conftest import token_file
from tests.cluster.tasks import TaskProcess, free_ports, workers
from tests.faults import worker_program
from tests.travelling import TRAVELLING

__all__ = ["token_file"]

pytestmark = pytest.mark.usefixtures("token_file")


def tf_config(monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any], job: str, index: int) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))


def test_without_a_cluster_it_is_the_only_worker(four_cpus: None) -> None:
    with sg.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        resolver = strategy.cluster_resolver
        assert (resolver.task_type, resolver.task_id, resolver.cluster_spec().jobs) == (None, None, [])
        assert strategy.num_replicas_in_sync == 2
        assert strategy.is_chief
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        assert strategy.gather(strategy.run(lambda: model.weight.sum().reshape(1))).shape == (2,)


def test_a_cluster_of_one_worker_needs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    tf_config(monkeypatch, {"worker": [f"127.0.0.1:{port}"], "ps": ["127.0.0.1:1"]}, "worker", 0)
    with sg.MultiWorkerMirroredStrategy(["cpu:0"]) as strategy:
        assert strategy.num_replicas_in_sync == 1
        assert strategy.cluster_resolver.task_type == "worker"


def test_other_jobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tf_config(monkeypatch, {**workers(2), "ps": ["127.0.0.1:1"]}, "ps", 0)
    with pytest.raises(StrategyError, match="for tasks of the jobs chief and worker, and this is ps"):
        sg.MultiWorkerMirroredStrategy(["cpu:0"])


def test_a_worker_that_never_comes_is_named() -> None:
    cluster = workers(2)
    with pytest.raises(ClusterJoinError) as caught:
        sg.MultiWorkerMirroredStrategy(
            ["cpu:0"], cluster_resolver=SimpleResolver(cluster, task_type="worker", task_id=0), join_timeout_s=0.5
        )
    assert f"worker/1 ({cluster['worker'][1]}) has not come after 0.5 s" in str(caught.value)
    assert "join_timeout_s" in str(caught.value)


def test_who_is_waited_for_is_told_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_SILENT_S", 0.1)
    resolver = SimpleResolver(workers(2), task_type="worker", task_id=1)
    with (
        pytest.warns(StratagemWarning, match=r"worker/1 waits for worker/0 \(127\.0\.0\.1:\d+\), 1 s at most"),
        pytest.raises(ClusterJoinError),
    ):
        sg.MultiWorkerMirroredStrategy(["cpu:0"], cluster_resolver=resolver, join_timeout_s=1.0)


@pytest.mark.parametrize("strategy", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_strategies_of_one_machine_warn_of_other_workers(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tf_config(monkeypatch, workers(2), "worker", 1)
    with pytest.warns(StratagemWarning, match="this is worker/1 of 2 workers: each of them trains its own model"):
        strategy(["cpu:0"]).close()
    tf_config(monkeypatch, workers(1), "worker", 0)
    strategy(["cpu:0"]).close()  # warnings are errors here


@pytest.mark.parametrize("name", ["stall_timeout_s", "join_timeout_s", "heartbeat_timeout_s", "worker_timeout_s"])
def test_times_are_checked(name: str) -> None:
    with pytest.raises(StrategyError, match=f"{name} is a number of seconds above 0, got -1"):
        sg.MultiWorkerMirroredStrategy(["cpu:0"], **{name: -1})


def test_a_resolver_is_checked() -> None:
    with pytest.raises(StrategyError, match=r"one of sg\.cluster's resolvers, got 'TF_CONFIG'"):
        sg.MultiWorkerMirroredStrategy(["cpu:0"], cluster_resolver="TF_CONFIG")


def test_options_of_an_optimizer_are_compared_by_what_they_say_in_any_process() -> None:
    def optimizer() -> torch.optim.Optimizer:
        def decay(step: int) -> float:
            return 1 / step

        made = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        made.param_groups[0].update(decay=decay, names={f"name {number}" for number in range(9)}, rate=torch.ones(2))
        return made

    said = agreement.settings_of(optimizer())
    assert said == agreement.settings_of(optimizer())  # though its function is another, at another place
    assert "decay" in said
    assert "'rate': [1.0, 1.0]" in said
    other = optimizer()
    other.param_groups[0]["names"].add("another")
    assert agreement.settings_of(other) != said


def test_tensors_that_travel_together_are_of_one_type_and_not_too_many() -> None:
    small, wide = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    large = torch.zeros(2**20)
    packets = list(workers_module._packed([small, small, wide, large, small, large, small]))
    assert [[each.numel() for each in packet] for packet in packets] == [[2, 2], [2], [2**20], [2], [2**20], [2]]
    assert list(workers_module._packed([])) == []


@pytest.fixture(scope="module")
def two(forked_tasks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TaskProcess]]:
    """Two workers, the first with two replicas and the second with one."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        path = tmp_path_factory.mktemp("cluster") / "token"
        token.create(path)
        patch.setenv("STRATAGEM_TOKEN_FILE", str(path))
        program, cluster = "tests.faults.worker_program", workers(2)
        tasks = [stack.enter_context(contextlib.closing(TaskProcess(program=program))) for _ in range(2)]
        for index, task in enumerate(tasks):
            task.send(f"begin({cluster!r}, {index}, num_replicas={2 - index})")
        for task in tasks:
            assert task.value() == "begun"
        yield tasks


def ask_both(tasks: list[TaskProcess], expression: str) -> list[Any]:
    for task in tasks:
        task.send(expression)
    return [task.value() for task in tasks]


def test_each_worker_knows_its_place(two: list[TaskProcess]) -> None:
    assert ask_both(two, "worker.strategy.num_replicas_in_sync") == [3, 3]
    assert ask_both(two, "list(worker.strategy.replicas_here)") == [[0, 1], [2]]
    assert ask_both(two, "worker.strategy.is_chief") == [True, False]
    assert ask_both(two, "worker.strategy.global_rank") == [0, 2]
    assert ask_both(two, "worker.strategy.cluster_resolver.task_id") == [0, 1]


def test_a_second_strategy_in_one_program_is_refused(two: list[TaskProcess]) -> None:
    two[1].send("sg.MultiWorkerMirroredStrategy(cluster_resolver=worker.strategy.cluster_resolver)")
    kind, message = two[1].error()
    assert kind == "StrategyError"
    assert "by the MultiWorkerMirroredStrategy of " in message
    assert "worker_program.py:" in message
    assert "close() it first" in message


def test_workers_of_different_size_train_as_one(two: list[TaskProcess]) -> None:
    first, second = ask_both(two, "train(3)")
    assert first == second
    assert ask_both(two, "weights()")[0] == ask_both(two, "weights()")[1]


def test_parameters_of_two_types_and_weights_written_in_a_step(two: list[TaskProcess]) -> None:
    first, second = ask_both(two, "train_other(4)")
    assert first == second
    model = worker_program.make_other_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(4):
        worker_program.clamping_step(model, optimizer, *worker_program.batch(number))
    for ours, theirs in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach().flatten().float(), rtol=1e-4, atol=1e-5)


def test_large_gradients_are_summed_alike_with_and_without_replicas_beside(two: list[TaskProcess]) -> None:
    first, second = ask_both(two, "train_large(3)")
    assert first == second
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 200_000), torch.nn.Tanh(), torch.nn.Linear(200_000, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        worker_program.large_step(model, optimizer, *worker_program.batch(number))
    torch.testing.assert_close(first, worker_program.sums_over(model), rtol=1e-4, atol=1e-3)


def test_results_of_all_replicas_come_to_every_worker(two: list[TaskProcess]) -> None:
    run = "worker.strategy.run(lambda: torch.ones(2) * sg.get_replica_context().replica_id_in_sync_group)"
    assert ask_both(two, f"worker.strategy.gather({run}).tolist()") == [[0, 0, 1, 1, 2, 2]] * 2
    assert ask_both(two, f"worker.strategy.reduce('sum', {run}).tolist()") == [[3, 3]] * 2
    assert ask_both(two, f"len(worker.strategy.local_results({run}))") == [2, 1]
    large = run.replace("torch.ones(2)", "torch.ones(1000)")
    assert ask_both(two, f"worker.strategy.reduce('max', {large}).sum().item()") == [2000.0] * 2


def test_results_of_every_type_come_to_every_worker(two: list[TaskProcess]) -> None:
    types = "__import__('tests.travelling', fromlist=['tests']).TRAVELLING"
    gathered = "worker.strategy.gather(worker.strategy.run(lambda: torch.arange(2).to(dtype)))"
    found = ask_both(two, f"[[str(dtype), {gathered}.to(torch.complex64).real.tolist()] for dtype in {types}]")
    assert found == [[[str(dtype), [0.0, 1.0] * 3] for dtype in TRAVELLING]] * 2


def test_replicas_exchange_tensors_across_workers(two: list[TaskProcess]) -> None:
    context = "sg.get_replica_context()"
    own = f"torch.tensor([{context}.replica_id_in_sync_group + 1.0])"
    run = f"worker.strategy.run(lambda: {context}.all_reduce('sum', {own}))"
    assert ask_both(two, f"worker.strategy.gather({run}).tolist()") == [[6.0] * 3] * 2
    run = f"worker.strategy.run(lambda: {context}.all_gather({own}))"
    assert ask_both(two, f"worker.strategy.gather({run}).tolist()") == [[1.0, 2.0, 3.0] * 3] * 2
