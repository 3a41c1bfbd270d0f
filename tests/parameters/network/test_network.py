"""Workers and parameter servers over real sockets of loopback, servers in threads of this process."""

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stratagem.cluster import token as tokens
from stratagem.cluster.io_thread import log
from stratagem.errors import (
    AddressInUseError,
    ClusterError,
    ClusterJoinError,
    ClusterSpecError,
    ClusterTimeoutError,
    HandshakeError,
    ParameterError,
    ParameterServerLostError,
)
from stratagem.parameters.network import bodies
from stratagem.parameters.network.client.connection import PendingReply, RetryError
from stratagem.parameters.network.client.parameter_client import ParameterClient
from stratagem.parameters.network.compression import Compression
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.server import held_pushes
from stratagem.parameters.network.server.ps_server import ParameterServer
from stratagem.parameters.network.shard_states import StateOfAll, described
from stratagem.parameters.partitioning import make_plan
from stratagem.parameters.protocol import OptimizerSpec, Variable, Verdict, describe_optimizer
from tests.cluster.tasks import free_ports
from tests.parameters.network.attacker import Attacker
from tests.parameters.network.cluster import PATIENCE_S, Cluster, Trainer, same
from tests.travelling import TRAVELLING

NewCluster = Callable[..., Cluster]


def by_torch_alone(num_steps: int) -> dict[str, torch.Tensor]:
    """What a program without servers has after so many steps."""
    trainer = Trainer(None, 1)  # type: ignore[arg-type]  # it is never asked
    for seed in range(num_steps):
        trainer.gradients(seed)
        trainer.optimizer.step()
    return trainer.copies()


@pytest.mark.parametrize(("num_ps", "cut"), [(1, False), (2, False), (3, True)])
def test_one_worker_gets_what_torch_alone_computes(new_cluster: NewCluster, num_ps: int, cut: bool) -> None:
    cluster = new_cluster(num_ps=num_ps)
    trainer = Trainer(cluster.worker(), num_ps, cut=cut)
    trainer.define()
    outcomes = [trainer.step(seed) for seed in range(3)]
    assert same(trainer.copies(), by_torch_alone(3))
    assert [[each.version for each in step] for step in outcomes] == [[number] * num_ps for number in (1, 2, 3)]


def test_workers_see_each_others_updates_and_staleness_is_counted(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    first = cluster.trainer(0)
    second = cluster.trainer(1)
    assert same(first.copies(), second.copies())
    first.step(1)
    first.step(2)
    assert {each.staleness for each in second.step(3)} == {2}
    first.pull()
    assert same(first.copies(), second.copies())


def test_worker_waits_for_the_chief_and_takes_its_values(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    other = Trainer(cluster.worker(1), 1)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    waiting = threading.Thread(target=other.define, kwargs={"has_values": False})
    waiting.start()
    chief = cluster.trainer(0)
    waiting.join(PATIENCE_S)
    assert same(other.copies(), chief.copies())
    assert other.copies()["0.weight"].count_nonzero()


def test_worker_gives_up_when_the_chief_never_comes(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    trainer = Trainer(cluster.worker(1), 1)
    trainer.client.join_timeout_s = 0.2
    with pytest.raises(ClusterTimeoutError, match=r"chief has not defined the variables of ps/0 within 0\.2 s"):
        trainer.define(has_values=False)


def test_other_model_is_refused_and_the_difference_named(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    cluster.trainer(0)
    other = Trainer(cluster.worker(1), 1)
    variables = [Variable("0.weight", (9, 6), torch.float32), *other.plan.variables[1:]]
    with pytest.raises(ParameterError, match=r"variable 0 is '0.weight' \(5, 6\).* and '0.weight' \(9, 6\)"):
        other.client.define(make_plan(variables, 1), [other.spec])


def test_options_of_the_optimizer_follow_a_scheduler(new_cluster: NewCluster) -> None:
    trainer = new_cluster().trainer(0)
    before = trainer.copies()
    trainer.step(1, options=[{"lr": 0.0}])
    assert same(trainer.copies(), before)


def test_rows_of_an_embedding_travel_alone(new_cluster: NewCluster) -> None:
    client = new_cluster(num_ps=2).worker()
    table = torch.nn.Parameter(torch.zeros(10, 3))
    optimizer = torch.optim.SGD([table], lr=1.0)
    plan = make_plan([Variable("table", (10, 3), torch.float32, sparse=True)], 2)
    client.define(plan, [describe_optimizer(optimizer, {id(table): "table"})], {"table": table.detach()})
    gradient = torch.sparse_coo_tensor([[7, 2, 7]], torch.ones(3, 3), (10, 3), check_invariants=True)
    client.wait(client.push({"table": gradient}))
    client.wait(client.pull({"table": table}, {"table": torch.tensor([7, 7, 2])}))
    assert table[:, 0].tolist() == [0, 0, -1, 0, 0, 0, 0, -2, 0, 0]


def test_push_that_is_not_finite_changes_nothing(new_cluster: NewCluster) -> None:  # A7
    cluster = new_cluster()
    trainer = cluster.trainer(0)
    before = trainer.copies()
    gradients = {**trainer.gradients(), "0.weight": torch.full((5, 6), float("nan"))}
    (outcome,) = trainer.client.wait(trainer.client.push(gradients))
    assert outcome.verdict is Verdict.REFUSED
    assert "'0.weight' is not finite" in outcome.reason
    assert same(cluster.trainer(1).copies(), before)
    assert [each.version for each in trainer.step(1)] == [1]


@pytest.mark.parametrize("bad", [torch.ones(5, 5), torch.ones(5, 6).double()])
def test_gradient_that_is_not_like_its_variable_is_refused_before_it_is_sent(
    new_cluster: NewCluster, bad: torch.Tensor
) -> None:
    trainer = new_cluster().trainer(0)
    with pytest.raises(ParameterError, match=r"value for '0.weight' is torch.float32 \(5, 6\), got"):
        trainer.client.push({"0.weight": bad})
    with pytest.raises(ParameterError, match="no variable 'nothing'"):
        trainer.client.push({"nothing": bad})
    assert [each.version for each in trainer.step(1)] == [1]


def test_state_taken_while_others_push_fits_another_number_of_servers(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    trainers = [cluster.trainer(0), cluster.trainer(1)]
    stop = threading.Event()

    def push_until_told() -> None:
        seed = 0
        while not stop.is_set():
            trainers[1].step(seed)
            seed += 1

    pushing = threading.Thread(target=push_until_told)
    pushing.start()
    try:
        versions = []
        for _ in range(10):
            versions.append(trainers[0].client.state().version)
    finally:
        stop.set()
        pushing.join(PATIENCE_S)
    assert versions == sorted(versions)
    state = trainers[0].client.state()
    elsewhere = new_cluster(num_ps=3)
    resumed = Trainer(elsewhere.worker(0), 3, cut=True)
    resumed.define(state=state)
    for name, value in resumed.copies().items():
        assert torch.equal(value, state.values[name])
    trainers[0].pull()
    trainers[0].step(9)
    resumed.step(9)
    for name, value in resumed.copies().items():  # momentum came along
        torch.testing.assert_close(value, trainers[0].copies()[name])


def test_all_shards_of_a_state_have_seen_the_same_pushes(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    saver, pusher = cluster.worker(0), cluster.worker(1)
    variables = [Variable("a", (1,), torch.float32), Variable("b", (1,), torch.float32)]
    plan = make_plan(variables, 2)
    assert [len(pieces) for pieces in plan.shards] == [1, 1]
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a", "b")}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    spec = describe_optimizer(optimizer, {id(each): name for name, each in parameters.items()})
    saver.define(plan, [spec], {name: each.detach() for name, each in parameters.items()})
    pusher.define(plan, [spec])
    stop = threading.Event()

    def push_until_told() -> None:
        into = {name: torch.zeros(1) for name in ("a", "b")}
        while not stop.is_set():
            pusher.wait(pusher.push({"a": -torch.ones(1), "b": -torch.ones(1)}, into=into))

    pushing = threading.Thread(target=push_until_told)
    pushing.start()
    try:
        states = [saver.state() for _ in range(20)]
    finally:
        stop.set()
        pushing.join(PATIENCE_S)
    assert all(torch.equal(each.values["a"], each.values["b"]) for each in states)
    assert states[-1].values["a"].item() > states[0].values["a"].item()


def held(trainer: Trainer) -> None:
    trainer.client._talk.finish({0: PendingReply(FrameKind.HOLD, {})})


def state_at(trainer: Trainer, up_to: dict[str, int]) -> PendingReply:
    asked = PendingReply(FrameKind.STATE, {"up_to": up_to}, (), StateOfAll.rooms(trainer.plan, 0))
    trainer.client._talk.ask({0: asked})
    trainer.client._talk.wait({0: asked})
    return asked


def test_two_tasks_may_save_at_once(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_workers=3)
    first, second, pusher = (cluster.trainer(index) for index in range(3))
    held(first)
    assert second.client.state().version == 0
    push = pusher.client.push(pusher.gradients(1))
    second.pull()  # what came before it has been looked at
    assert not push.pendings[0].is_answered.is_set()  # the other is still at it
    assert state_at(first, {}).answer["version"] == 0
    assert [each.version for each in pusher.client.wait(push)] == [1]


def test_hold_of_a_task_that_is_gone_ends_with_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    saver, pusher = cluster.trainer(0), cluster.trainer(1)
    held(saver)
    saver.client.close()
    assert [each.version for each in pusher.step(1)] == [1]


def test_state_is_of_one_moment_or_asked_for_again(new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_cluster().trainer(0)
    monkeypatch.setattr(held_pushes, "HOLD_S", 0.0)
    held(trainer)
    trainer.step(1)
    assert isinstance(state_at(trainer, {}).error, RetryError)
    monkeypatch.undo()
    assert trainer.client.state().version == 1


def pushed_to(trainer: Trainer, shard: int) -> None:
    """Lets a push come to one server alone."""
    body = {
        **{"number": 1, "version": 0, "clock": 1, "optimizer": 0, "weight": 1, "options": None},
        **{"gradients": [], "assigned": [], "then_pull": False, "is_shared": False},
    }
    trainer.client._talk.finish({shard: PendingReply(FrameKind.PUSH, body)})


def test_state_without_a_push_that_one_server_alone_has_is_none(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(num_ps=2)
    saver, pusher = cluster.trainer(0), cluster.trainer(1)
    monkeypatch.setattr(held_pushes, "HOLD_S", 0.05)
    pushed_to(pusher, 0)
    with pytest.raises(
        ClusterTimeoutError, match=r"a push that other parameter servers have applied has not come, within 0\.05 s"
    ):
        saver.client.state()
    monkeypatch.setattr(held_pushes, "HOLD_S", 1000.0)
    pusher.client.close()  # who has died will not push it any more
    assert saver.client.state().version == 1


def left_while_its_push_waits(cluster: Cluster, *, is_done: bool) -> Trainer:
    """The one for whom the push of another waits, which is gone by now."""
    saver, pusher = cluster.trainer(0), cluster.trainer(1)
    held(saver)
    pusher.client.push(pusher.gradients(1))
    saver.pull()
    pusher.client.close(is_done=is_done)
    return saver


def test_push_that_had_to_wait_is_applied_also_when_its_worker_has_left(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    saver = left_while_its_push_waits(cluster, is_done=True)
    assert state_at(saver, {"2": 1}).answer["version"] == 1
    again = cluster.trainer(1)
    assert [each.version for each in again.step(2)] == [2]


def test_worker_that_is_back_before_its_last_push_was_applied_goes_on_without_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    saver = left_while_its_push_waits(cluster, is_done=False)
    again = cluster.trainer(1)
    assert state_at(saver, {}).answer["version"] == 0
    assert [each.version for each in again.step(2)] == [1]


def test_servers_of_which_some_were_started_anew_are_refused(new_cluster: NewCluster) -> None:  # F14
    cluster = new_cluster(num_ps=2)
    first = cluster.trainer(0)
    first.step(1)
    state = first.client.state()
    first.client.close()
    cluster.renew(0)
    chief = Trainer(cluster.worker(0), 2)
    with pytest.raises(ParameterServerLostError, match="ps/0 has been restarted, but ps/1 still has its trained"):
        chief.define(state=state)
    chief.client.close()
    cluster.renew(1)
    chief = Trainer(cluster.worker(0), 2)
    chief.define(state=state)
    assert [each.version for each in chief.step(2)] == [2, 2]


@pytest.mark.parametrize("part", ["executor", "sockets"])
def test_server_that_cannot_go_on_fails_and_cuts_its_clients_off(token_file: Path, part: str) -> None:
    with Cluster(num_workers=1) as cluster, ThreadPoolExecutor(1) as threads:
        cluster.servers[0].close()
        server = cluster.servers[0] = ParameterServer(cluster.spec, 0).start()
        serving = threads.submit(server.serve)
        trainer = cluster.trainer(0)
        if part == "executor":
            server._desk._requests.put(lambda: {}["no such thing"])
        else:
            server._answers.append(())  # type: ignore[arg-type]
        with pytest.raises(ParameterServerLostError, match=r"ps/0 at .* is lost: its connection has ended"):
            [trainer.step(1) for _ in iter(int, 1)]
        error = serving.exception(PATIENCE_S)
        server.close()
    if part == "executor":
        assert str(error) == "ps/0 cannot go on with its shard"
        assert isinstance(error.__cause__, KeyError)
    else:
        assert isinstance(error, ValueError)


def test_servers_may_come_one_long_after_the_other(token_file: Path) -> None:
    with contextlib.ExitStack() as stack:
        hasty = {"heartbeat_s": 0.1, "num_missed": 10}
        cluster = stack.enter_context(Cluster(num_ps=2, num_workers=1, **hasty))
        cluster.servers[1].close()
        late = threading.Timer(2.0, cluster.renew, [1])
        late.start()
        stack.callback(late.join, PATIENCE_S)
        trainer = cluster.trainer(0, **hasty)
        assert [each.version for each in trainer.step(1)] == [1, 1]


class _Stopped(logging.Handler):
    """Holds the thread that logs something, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_here, self.may_go = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_here.set()
        assert self.may_go.wait(PATIENCE_S)


def test_close_waits_for_the_thread_that_serves(token_file: Path) -> None:
    """The serving thread is in the middle of its round, held by a handler of logs, when another closes the server."""
    spec = {"worker": ["127.0.0.1:1"], "ps": [f"127.0.0.1:{free_ports(1)[0]}"]}
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except BaseException as error:  # the test shows it
            failures.append(error)

    stopped = _Stopped()
    with ParameterServer(spec, 0) as server, Attacker(spec) as stranger:
        serving, closing = threading.Thread(target=serve), threading.Thread(target=server.close)
        log.addHandler(stopped)
        try:
            serving.start()
            stranger.send(b"what no client says")  # is refused, and logged
            assert stopped.is_here.wait(PATIENCE_S)
            closing.start()
            closing.join(0.5)
            has_waited = closing.is_alive()
        finally:
            stopped.may_go.set()
            log.removeHandler(stopped)
            serving.join(PATIENCE_S)
            closing.join(PATIENCE_S)
    assert not failures
    assert has_waited
    assert not serving.is_alive()
    assert not closing.is_alive()


def test_server_that_was_closed_serves_no_more(token_file: Path) -> None:
    server = ParameterServer({"worker": ["127.0.0.1:1"], "ps": [f"127.0.0.1:{free_ports(1)[0]}"]}, 0).start()
    server.close()
    server.serve()  # as by a thread that begins late
    with pytest.raises(ClusterError, match="ps/0 was closed; make a new ParameterServer"):
        server.start()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shares_memory", [False, True])
def test_servers_keep_variables_of_every_type(new_cluster: NewCluster, *, shares_memory: bool) -> None:
    values = {str(dtype): torch.arange(6).to(dtype) for dtype in TRAVELLING}
    plan = make_plan([Variable(name, (6,), each.dtype, trained=False) for name, each in values.items()], 2)
    client = new_cluster(num_ps=2).worker(0, shares_memory=shares_memory)
    client.define(plan, [OptimizerSpec("SGD", (((), {"lr": 1.0}),))], values)
    new = {name: torch.arange(5, -1, -1).to(each.dtype) for name, each in values.items()}
    client.wait(client.push({}, assigned=new))
    found = {name: torch.empty_like(each) for name, each in values.items()}
    client.wait(client.pull(found))
    saved = client.state().values
    for name, each in new.items():
        assert torch.equal(found[name].view(torch.uint8), each.view(torch.uint8))
        assert saved[name].dtype == each.dtype
        assert torch.equal(saved[name].view(torch.uint8), each.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int64, torch.bool, torch.float8_e5m2], ids=str)
def test_gradient_for_a_variable_that_no_optimizer_can_update_is_refused(
    new_cluster: NewCluster, dtype: torch.dtype
) -> None:
    client = new_cluster().worker(0)
    plan = make_plan([Variable("a", (3,), torch.float32), Variable("n", (3,), dtype)], 1)
    values = {"a": torch.zeros(3), "n": torch.ones(3).to(dtype)}
    client.define(plan, [OptimizerSpec("SGD", ((("a", "n"), {"lr": 1.0}),))], values)
    (refused,) = client.wait(client.push({"n": values["n"]}))
    assert refused.verdict is Verdict.REFUSED
    assert f"'n' is {str(dtype).removeprefix('torch.')}, which no optimizer updates" in refused.reason
    assert [each.version for each in client.wait(client.push({"a": torch.ones(3)}))] == [1]  # it is whole


def test_variable_of_a_type_that_cannot_travel_is_refused(new_cluster: NewCluster) -> None:
    plan = make_plan([Variable("q", (3,), torch.bits8, trained=False)], 1)
    with pytest.raises(ParameterError, match=r"'q': a tensor of type bits8 cannot travel .*; types that can: bool,"):
        new_cluster().worker(0).define(plan, [OptimizerSpec("SGD", (((), {"lr": 1.0}),))], {})


def test_server_that_has_a_table_alone_tells_its_version_too(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    values = {"a": torch.zeros(3), "table": torch.zeros(4, 2)}
    plan = make_plan([Variable("a", (3,), torch.float32), Variable("table", (4, 2), torch.float32, sparse=True)], 2)
    assert sorted(len(pieces) for pieces in plan.shards) == [1, 1]
    spec = OptimizerSpec("SGD", ((("a", "table"), {"lr": 1.0}),))
    for index in range(2):
        client = cluster.worker(index)
        client.define(plan, [spec], values if index == 0 else None)
        client.wait(client.pull({"a": values["a"]}))
        for _ in range(2):
            outcomes = client.wait(client.push({"a": torch.ones(3)}, into={"a": values["a"]}))
            assert [each.staleness for each in outcomes] == [0, 0]


def test_state_of_numbers_in_double_precision_is_saved(new_cluster: NewCluster) -> None:
    value = torch.nn.Parameter(torch.ones(3))
    spec = describe_optimizer(torch.optim.Adam([value]), {id(value): "a"})
    client = new_cluster().worker(0)
    torch.set_default_dtype(torch.float64)  # Adam counts its steps in it
    try:
        client.define(make_plan([Variable("a", (3,), torch.float32)], 1), [spec], {"a": value.detach()})
        client.wait(client.push({"a": torch.ones(3, dtype=torch.float32)}))
        (kept,) = client.state().optimizers
    finally:
        torch.set_default_dtype(torch.float32)
    assert (kept["a"]["step"].dtype, kept["a"]["step"].item()) == (torch.float64, 1)


def test_state_of_another_shape_is_refused_with_its_name(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    trainer = cluster.trainer(0)
    trainer.step(1)
    state = trainer.client.state()
    small = dataclasses.replace(state, values={**state.values, "2.weight": torch.zeros(2, 4)})
    with pytest.raises(ParameterError, match=r"the value of '2\.weight' in the state is torch\.float32 \(2, 4\)"):
        small.divided(trainer.plan, 1)
    kept = {name: dict(own) for name, own in state.optimizers[0].items()}
    kept["2.bias"]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ParameterError, match=r"'momentum_buffer' of '2\.bias' in the state"):
        dataclasses.replace(state, optimizers=(kept,)).divided(trainer.plan, 1)


def test_table_with_momentum_is_refused(new_cluster: NewCluster) -> None:
    plan = make_plan([Variable("table", (4, 2), torch.float32, sparse=True)], 1)
    spec = OptimizerSpec("SGD", ((("table",), {"lr": 1.0, "momentum": 0.9}),))
    with pytest.raises(ParameterError, match="SGD with momentum keeps a state of 'table' that grows"):
        new_cluster().worker(0).define(plan, [spec], {"table": torch.zeros(4, 2)})


def test_description_of_a_state_of_many_variables_fits_into_a_frame() -> None:
    plan = make_plan([Variable(f"layers.{number}.weight", (2,), torch.float32) for number in range(20_000)], 1)
    kept = {each.name: {"step": torch.ones(()), "exp_avg": torch.ones(2)} for each in plan.variables}
    saved, tensors = described(plan.shards[0], [kept])
    bodies.encode(FrameKind.LOAD, {"version": 1, "saved": saved})
    assert len(tensors) == 40_000


def test_compressed_gradients_train_too(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    trainer = cluster.trainer(0, compression=Compression("bf16"))
    for seed in range(3):
        trainer.step(seed)
    exact = by_torch_alone(3)
    for name, value in trainer.copies().items():
        torch.testing.assert_close(value, exact[name], rtol=0.02, atol=0.002)
    assert not same(trainer.copies(), exact)


def test_servers_end_when_the_chief_is_done_and_all_have_left(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_ps=2)
    chief, other = cluster.trainer(0), cluster.trainer(1)
    chief.client.close(is_done=True)
    other.step(1)
    assert all(thread.is_alive() for thread in cluster._threads)
    other.client.close(is_done=True)
    assert cluster.ended()


def test_worker_may_leave_and_come_back(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    chief = cluster.trainer(0)
    first_life = cluster.trainer(1)
    first_life.step(1)
    first_life.client.close()
    second_life = cluster.trainer(1)
    assert [each.version for each in second_life.step(2)] == [2]
    chief.pull()
    assert same(chief.copies(), second_life.copies())


def test_worker_that_the_first_cluster_did_not_have_may_join(new_cluster: NewCluster) -> None:
    cluster = new_cluster(num_workers=1)
    chief = cluster.trainer(0)
    cluster.spec["worker"].append("127.0.0.1:1")
    joined = cluster.trainer(1)
    joined.step(1)
    chief.pull()
    assert same(chief.copies(), joined.copies())


def test_two_tasks_of_one_name_are_refused(new_cluster: NewCluster) -> None:  # A8
    cluster = new_cluster()
    trainer = cluster.trainer(0)
    with pytest.raises(ClusterJoinError, match=r"worker/0 is here already \(pid \d+ on"):
        ParameterClient(cluster.spec, "worker", 0, join_timeout_s=0.3).connect()
    assert [each.version for each in trainer.step(1)] == [1]


def test_cluster_with_other_servers_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    spec = {**cluster.spec, "ps": [*cluster.spec["ps"], *new_cluster().spec["ps"]]}
    with pytest.raises(ClusterJoinError, match="disagree on the cluster"):
        ParameterClient(spec, "worker", 0, join_timeout_s=5).connect()


def test_taken_port_names_its_holder(token_file: Path) -> None:  # F12
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        server = ParameterServer({"worker": ["127.0.0.1:1"], "ps": [address]}, 0)
        with pytest.raises(AddressInUseError, match=rf"{address} is taken \(pid \d+ \S+\)"):
            server.start()
        server.close()


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, b""])
def test_stranger_at_the_address_of_a_server_is_named(
    token_file: Path, greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:  # F12
    monkeypatch.setattr("stratagem.parameters.network.client.connection._HANDSHAKE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"

        def answer() -> None:
            for _ in range(2):
                connection, _ = stranger.accept()
                with connection:
                    connection.settimeout(PATIENCE_S)
                    connection.sendall(greeting)
                    while connection.recv(4096):
                        pass

        answering = threading.Thread(target=lambda: _quietly(answer))
        answering.start()
        client = ParameterClient({"worker": ["127.0.0.1:1"], "ps": [address]}, "worker", 0, join_timeout_s=5)
        with pytest.raises(HandshakeError, match=f"{address} is not a stratagem parameter server"):
            client.connect()
        answering.join(PATIENCE_S)


def test_nobody_at_the_address_of_a_server_is_said_in_time(token_file: Path) -> None:
    client = ParameterClient({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}, "worker", 0, join_timeout_s=0.3)
    with pytest.raises(ClusterJoinError, match=r"ps/0 \(127.0.0.1:2\) has not come .*Connection refused"):
        client.connect()


def test_other_token_is_refused_on_both_sides(new_cluster: NewCluster, tmp_path: Path) -> None:  # A2
    cluster = new_cluster()
    tokens.create(tmp_path / "other")
    client = ParameterClient(cluster.spec, "worker", 0, token_file=tmp_path / "other")
    with pytest.raises(HandshakeError, match="another token") as caught:
        client.connect()
    assert (tmp_path / "other").read_text().strip() not in str(caught.value)
    deadline = time.monotonic() + PATIENCE_S
    while not cluster.servers[0].num_refused and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cluster.servers[0].num_refused == 1
    assert cluster.trainer(0).step(1)


def test_cluster_without_servers_is_refused(token_file: Path) -> None:
    with pytest.raises(ClusterSpecError, match="no job 'ps'"):
        ParameterClient({"worker": ["127.0.0.1:1"]}, "worker", 0)


def _quietly(function: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        function()
