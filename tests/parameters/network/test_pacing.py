"""Workers that keep pace with each other: who waits for whom, which gradients count, and who is not waited for."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ParameterError
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.server.client_requests import ClientRequest, number_of
from stratagem.parameters.network.server.pacing import Pace, Pacing, RateTable
from stratagem.parameters.partitioning import make_plan
from stratagem.parameters.protocol import OptimizerSpec, Push, Rows, Variable, Verdict
from stratagem.parameters.rounds import mean_of
from stratagem.parameters.shard import Shard
from tests.parameters.network.cluster import PATIENCE_S, Cluster, Trainer, same
from tests.parameters.network.test_strategy import build, task, training_step

NewCluster = Callable[..., Cluster]
FAST = {"heartbeat_s": 0.2, "num_missed": 15}


@contextlib.contextmanager
def beside() -> Iterator[Callable[..., "Future[Any]"]]:
    """Calls something in a thread of its own."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def together(num_workers: int, num_gradients: int | None = None) -> Pacing:
    """Steps of workers 0 to n - 1 together, each with all of their gradients or some."""
    members = tuple(number_of(f"worker/{index}") for index in range(num_workers))
    return Pacing(sg.Synchronous(num_workers - (num_gradients or num_workers)), members)


def paced(cluster: Cluster, index: int, pacing: Pacing, **options: Any) -> Trainer:
    trainer = Trainer(cluster.worker(index, **options), len(cluster.servers))
    trainer.define(has_values=index == 0, pacing=pacing)
    return trainer


def test_worker_that_is_ahead_waits_for_the_slowest(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    fast, slow = (paced(cluster, index, Pacing(sg.BoundedStaleness(1))) for index in range(2))
    with beside() as call:
        assert {each.version for each in fast.step(1)} == {1}
        second = call(fast.step, 2)
        slow.pull()  # is answered, and so is whatever came before it
        assert not second.done()
        slow.step(3)
        outcomes = second.result(PATIENCE_S)
        assert {each.verdict for each in outcomes} == {Verdict.APPLIED}
        assert {each.version for each in outcomes} == {3}  # what it goes on with is of now
        third = call(fast.step, 4)
        slow.pull()
        assert not third.done()
        slow.client.close(is_done=True)  # who has left is not waited for
        assert {each.version for each in third.result(PATIENCE_S)} == {4}


def test_wait_for_a_worker_that_does_nothing_ends_with_its_name(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    fast, _ = (paced(cluster, index, Pacing(sg.BoundedStaleness(0), stall_s=0.2)) for index in range(2))
    with pytest.raises(ParameterError, match=r"waited 0\.2 s for worker/1, which has not pushed"):
        fast.step(1)
    fast.pull()  # the connection is as before


def test_synchronous_step_is_one_update_of_all_and_ends_with_a_lost_worker(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    one, other = (paced(cluster, index, together(2)) for index in range(2))
    with beside() as call:
        pushes = [call(one.step, 1, weight=3), call(other.step, 2, weight=1)]
        assert {each.version for push in pushes for each in push.result(PATIENCE_S)} == {1}
        assert same(one.copies(), other.copies())
        waiting = call(one.step, 3)
        other.client.close()
        with pytest.raises(ParameterError, match=r"worker/1 is lost, and each step needs the gradients of 2 workers"):
            waiting.result(PATIENCE_S)


def test_worker_that_left_before_the_first_step_is_not_waited_for(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2, num_workers=4)
    cluster.worker(3).close(is_done=True)  # before there are variables
    trainers = [paced(cluster, index, together(4)) for index in range(2)]
    gone = cluster.worker(2)
    with beside() as call:
        pushes = [call(each.step, 1) for each in trainers]
        gone.close(is_done=True)  # and before it has defined them
        assert {each.version for push in pushes for each in push.result(PATIENCE_S)} == {1}


def test_worker_that_was_lost_before_the_first_step_is_named(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cluster.worker(1).close()
    trainer = paced(cluster, 0, together(2))
    with pytest.raises(ParameterError, match=r"worker/1 is lost, and each step needs the gradients of 2 workers"):
        trainer.step(1)


def test_worker_that_comes_while_a_push_is_on_its_way_is_as_far_in_all_servers() -> None:
    plan = make_plan([Variable("a", (1,), torch.float32)], 1)
    answered: list[list[int]] = [[], []]
    paces = []
    for said in answered:
        shard = Shard(plan, 0, [OptimizerSpec("SGD", ((("a",), {"lr": 1.0}),))], {"a": torch.zeros(1)})
        for worker in range(2):
            shard.admit(worker)
        tell = functools.partial(lambda said, request, _: said.append(request.worker), said)
        paces.append(Pace(Pacing(sg.BoundedStaleness(0)), shard, tell, lambda *_: pytest.fail("a push failed"), print))

    def push(server: int, worker: int, number: int, clock: int) -> None:
        request = ClientRequest(worker, FrameKind.PUSH, {"clock": clock}, (), lambda *_: None)
        paces[server].push(request, Push(worker, 1, number, 0, {"a": torch.ones(1)}))

    first, new = 0, 1
    for pace in paces:
        pace.enter(first)
    push(0, first, 1, clock=1)
    clocks = [pace.enter(new) for pace in paces]
    assert clocks == [1, 0]  # the push of the other has reached one server alone
    push(1, first, 1, clock=1)
    for server in range(2):
        push(server, new, 1, clock=min(clocks) + 1)
    assert [sorted(said) for said in answered] == [[first, new]] * 2
    for server in range(2):
        push(server, first, 2, clock=2)
    assert [len(said) for said in answered] == [2, 2]  # it is ahead, and waits in both
    for server in range(2):
        push(server, new, 2, clock=2)
    assert [len(said) for said in answered] == [4, 4]


def test_slowest_gradient_is_dropped_where_there_is_a_backup(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_workers=3)
    trainers = [paced(cluster, index, together(3, 2)) for index in range(3)]
    late = trainers[2].gradients(7)
    with beside() as call:
        for push in [call(each.step, 1) for each in trainers[:2]]:
            push.result(PATIENCE_S)
        before = trainers[0].copies()
        (outcome,) = trainers[2].client.wait(trainers[2].client.push(late, into=trainers[2].values()))
        assert outcome.verdict is Verdict.STALE
        assert same(trainers[2].copies(), before)  # it has the values of the step that it missed
        trainers[0].client.close()  # and one may be lost
        for push in [call(each.step, 2) for each in trainers[1:]]:
            assert [each.verdict for each in push.result(PATIENCE_S)] == [Verdict.APPLIED]


def test_worker_that_is_no_member_changes_nothing_for_the_others(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    trainers = [paced(cluster, index, together(2)) for index in range(2)]
    cluster.spec["worker"].append("127.0.0.1:1")
    for is_done in (False, True):
        cluster.worker(2).close(is_done=is_done)
    with beside() as call:
        first = call(trainers[0].step, 1)
        trainers[1].pull()
        assert not first.done()
        assert [each.version for each in trainers[1].step(1)] == [1]
        first.result(PATIENCE_S)


def test_one_that_is_lost_and_one_that_is_done_leave_the_last_to_go_on(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_workers=3)
    trainers = [paced(cluster, index, together(3, 2)) for index in range(3)]
    trainers[1].client.close(is_done=True)
    trainers[2].client.close()
    for number in (1, 2):
        assert [each.version for each in trainers[0].step(number)] == [number]


def test_whole_gradient_and_rows_of_one_variable_are_refused_in_any_order() -> None:
    whole, rows = torch.ones(3, 2), Rows(torch.tensor([1]), torch.ones(1, 2))
    for first, second in ((whole, rows), (rows, whole)):
        with pytest.raises(ParameterError, match="a dense gradient and a sparse one"):
            mean_of([({"table": first}, 1), ({"table": second}, 1)])


def test_rate_of_a_push_follows_its_staleness(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    plan = make_plan([Variable(name, (1,), torch.float32) for name in ("a", "b")], 2)
    spec = OptimizerSpec("SGD", ((("a", "b"), {"lr": 1.0}),))
    values, gradients = ({name: torch.full((1,), value) for name in ("a", "b")} for value in (0.0, -1.0))
    clients = [cluster.worker(index) for index in range(2)]
    for index, client in enumerate(clients):
        client.define(plan, [spec], values if index == 0 else None, pacing=Pacing(sg.Async(RateTable((1.0, 0.5)))))
    with pytest.raises(ParameterError, match="rate_of gives other rates"):
        clients[1].define(plan, [spec], pacing=Pacing(sg.Async(RateTable((1.0, 0.25)))))
    for client in (clients[0], clients[0], clients[1]):
        client.wait(client.push(gradients))  # none sees what the others did: a staleness of 0, 1 and 2
    clients[0].wait(clients[0].pull(values))
    assert [each.item() for each in values.values()] == [2.0, 2.0]


def test_rows_of_several_workers_are_one_update(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    table = torch.zeros(6, 2)
    plan = make_plan([Variable("table", (6, 2), torch.float32, sparse=True)], 1)
    spec = OptimizerSpec("SGD", ((("table",), {"lr": 1.0}),))
    clients = [cluster.worker(index) for index in range(2)]
    for index, client in enumerate(clients):
        client.define(plan, [spec], {"table": table} if index == 0 else None, pacing=together(2))
    rows = [torch.sparse_coo_tensor([own], torch.ones(2, 2), (6, 2), check_invariants=True) for own in ([1, 4], [4, 5])]
    with beside() as call:
        handles = [client.push({"table": own}, weight=2) for client, own in zip(clients, rows, strict=True)]
        for done in [call(client.wait, handle) for client, handle in zip(clients, handles, strict=True)]:
            assert [each.version for each in done.result(PATIENCE_S)] == [1]
    clients[0].wait(clients[0].pull({"table": table}))
    assert table[:, 0].tolist() == [0, -0.5, 0, 0, -1, -0.5]


def test_gradient_that_comes_after_its_step_is_dropped_and_counted(new_cluster: NewCluster) -> None:
    cluster, batch = new_cluster(), torch.ones(2, 6)
    with contextlib.ExitStack() as stack, beside() as call:
        tasks = [task(cluster, index=index, consistency=sg.Synchronous(backup_workers=1)) for index in range(2)]
        built = [build(stack.enter_context(each)) for each in tasks]
        fast, own = (training_step(*each) for each in built)
        for strategy in tasks:
            strategy.run(lambda: None)  # takes the values of version 0

        def slow(inputs: torch.Tensor) -> None:
            call(tasks[0].run, fast, (batch,)).result(PATIENCE_S)
            own(inputs)

        tasks[1].run(slow, args=(batch,))
        assert [each.num_dropped for each in tasks] == [0, 1]
        assert [each.version for each in tasks] == [1, 1]
        assert tasks[1].staleness() == {1: {1: 1}}
        for one, other in zip(built[0][0].parameters(), built[1][0].parameters(), strict=True):
            assert torch.equal(one, other)


def test_synchronous_workers_equal_one_device(new_cluster: NewCluster) -> None:
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(size, 6, generator=generator) for size in (8, 7, 2)]  # of the last one worker 2 has nothing

    def train(strategy: Any) -> list[torch.Tensor]:
        with made, strategy.scope():  # what is made in a scope is noted for the whole process
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

        def step(inputs: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        for batch in strategy.distribute(data):
            strategy.run(step, args=(batch,))
        return [each.detach().clone() for each in model.parameters()]

    made = threading.Lock()
    expected = train(sg.OneDeviceStrategy())
    cluster = new_cluster(num_ps=2, num_workers=3)
    with contextlib.ExitStack() as stack, beside() as call:
        tasks = [stack.enter_context(task(cluster, index=index, consistency=sg.Synchronous())) for index in range(3)]
        for trained in [call(train, each) for each in tasks]:
            for value, own in zip(trained.result(PATIENCE_S), expected, strict=True):
                torch.testing.assert_close(value, own)
        assert {each.version for each in tasks} == {len(data)}


@pytest.mark.parametrize(
    "consistency", [sg.Async(), sg.BoundedStaleness(1), sg.Synchronous(), sg.Synchronous(backup_workers=1)], ids=repr
)
def test_chief_at_a_barrier_waits_for_what_others_push(new_cluster: NewCluster, consistency: Any) -> None:
    made = threading.Lock()

    def train(strategy: Any) -> tuple[int, int]:
        with made:  # what is made in a scope is noted for the whole process
            step = training_step(*build(strategy))
        strategy.barrier()  # all begin together
        versions = []
        for num_steps in (1 + 2 * strategy.input_pipeline[1], 1):
            for _ in range(num_steps):
                strategy.run(step, args=(torch.ones(2, 6),))
            strategy.barrier()
            versions.append(strategy.state_dict()["version"])
            strategy.barrier()
        return versions[0], versions[1] - versions[0]

    cluster = new_cluster(num_ps=2)
    with contextlib.ExitStack() as stack, beside() as call:
        tasks = [stack.enter_context(task(cluster, index=index, consistency=consistency)) for index in range(2)]
        found = [each.result(PATIENCE_S) for each in [call(train, each) for each in tasks]]
    if isinstance(consistency, sg.Synchronous):
        assert found[0] == found[1]
        assert found[0][0] >= 3
    else:
        assert found == [(1 + 3, 2)] * 2


def test_barrier_waits_for_nobody_who_left_and_names_who_does_not_come(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    strategies = [task(cluster, index=index, stall_timeout_s=0.3) for index in range(2)]
    for strategy in strategies:
        strategy.run(training_step(*build(strategy)), args=(torch.ones(2, 6),))
    first, second = strategies
    with pytest.raises(ParameterError, match=r"worker/1 has neither called it nor pushed for 0\.3 s"):
        first.barrier()
    second.close()
    first.barrier()
    assert first.version == 2
    with pytest.raises(sg.errors.StrategyError, match="closed"):
        second.barrier()
    with pytest.raises(sg.errors.StrategyError, match="inside replica 0"):
        first.run(first.barrier)
    with task(cluster, "evaluator") as evaluator:
        evaluator.barrier()
    first.close()
