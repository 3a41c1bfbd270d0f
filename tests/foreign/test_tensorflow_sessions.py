"""Programs with sessions as TensorFlow's have them: several clients, each with its own graph, train one model.

Between-graph replication: every client records the same graph, and variables of one name on one task are the same
variable. What comes out is compared with plain torch.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import SessionError, TaskLostError
from tests.cluster.conftest import known_token, module_token, no_starter
from tests.cluster.tasks import TaskProcess, free_ports

__all__ = ["known_token", "module_token", "no_starter"]

pytestmark = pytest.mark.usefixtures("known_token")

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)[:, None]
ONE, OTHER = (X[:4], Y[:4]), (X[4:], Y[4:])


@pytest.fixture
def target() -> Iterator[str]:
    with sg.Server.create_local_server() as server:
        yield server.target


def replica_device_setter(worker: str) -> Callable[[Any], str]:
    """TensorFlow's `tf.train.replica_device_setter`: variables on the parameter server, the rest on a worker."""
    return lambda operation: "/job:ps/task:0" if operation.type == "Variable" else worker


class Client:
    """A program with its own graph and session: a linear model, trained by SGD, and a global step."""

    def __init__(self, target: str, device: Any = None, *, name: str = "w", config: Any = None) -> None:
        with sg.Graph() as graph, sg.device(device):
            self.x, self.y = (sg.placeholder(torch.float32, [4, size]) for size in (3, 1))
            self.w = sg.get_variable(name, [3, 1], initializer=torch.nn.init.ones_)
            self.num_steps = sg.get_variable("global_step", initializer=torch.tensor(0), trainable=False)
            optimizer = torch.optim.SGD([self.w], lr=0.1)
            self.loss = torch.nn.functional.mse_loss(self.x @ self.w, self.y)
            self.loss.backward()
            optimizer.step()
            self.count = sg.assign(self.num_steps, self.num_steps + 1)
            self.initializer = sg.global_variables_initializer()
        self.train = [self.loss, *graph.updates]
        self.session = sg.Session(target, graph, config=config)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.session.run(self.train, dict(zip((self.x, self.y), batch, strict=True)))[0]
        return loss

    @property
    def weight(self) -> torch.Tensor:
        value: torch.Tensor = self.session.run(self.w)
        return value

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()


class Plain:
    """The same in plain torch."""

    def __init__(self) -> None:
        self.w = torch.ones(3, 1, requires_grad=True)

    def gradient(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(torch.nn.functional.mse_loss(batch[0] @ self.w, batch[1]), [self.w])[0]

    def apply(self, *gradients: torch.Tensor) -> None:
        with torch.no_grad():
            for each in gradients:
                self.w -= 0.1 * each


@contextlib.contextmanager
def before_commit(client: Client, event: Callable[[], object]) -> Iterator[None]:
    """Something happens when the next run of a client has computed everything and changed nothing yet."""
    fleet: Any = client.session._fleet
    commit = fleet.commit

    def late(*args: Any) -> None:
        event()
        commit(*args)

    fleet.commit = late
    try:
        yield
    finally:
        fleet.commit = commit


def test_clients_train_one_model_in_turns(target: str) -> None:
    plain = Plain()
    with Client(target) as one, Client(target) as other:
        for client, batch in ((one, ONE), (other, OTHER), (one, OTHER), (one, ONE), (other, ONE)):
            expected = torch.nn.functional.mse_loss(batch[0] @ plain.w, batch[1])
            torch.testing.assert_close(client.step(batch), expected.detach())
            plain.apply(plain.gradient(batch))
            for each in (one, other):
                torch.testing.assert_close(each.weight, plain.w.detach())
        assert one.session.run("global_step").item() == 5


def test_asynchronous_updates_are_made_on_the_value_that_is_there(target: str) -> None:
    """Both have computed their gradients of the same weights; TensorFlow adds both up, and so do we."""
    plain = Plain()
    plain.apply(plain.gradient(ONE), plain.gradient(OTHER))
    with Client(target) as one, Client(target) as other:
        assert torch.equal(one.weight, torch.ones(3, 1))
        with before_commit(one, lambda: other.step(OTHER)):
            one.step(ONE)
        torch.testing.assert_close(one.weight, plain.w.detach())


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (lambda w: sg.assign(w, w + 2.0), 13.0),  # 1 + 10, then + 2
        (lambda w: sg.assign(w, 2.0 - w), -9.0),
        (lambda w: sg.assign(w, sg.constant(2.0) + w), 13.0),
        (lambda w: w.mul_(3.0).sub_(1.0), 32.0),
        (lambda w: sg.assign(w, torch.lerp(w, torch.tensor(0.0), 0.5)), 5.5),
        (lambda w: sg.assign(w, w.clamp(max=5.0)), 5.0),
        (lambda w: sg.assign(w, sg.constant(2.0) + w * 1.0), 13.0),
        (lambda w: sg.assign(w, torch.relu(w) + 2.0), 13.0),
        (lambda w: sg.assign(w, torch.where(w >= 0, w + 2.0, w)), 13.0),
        (lambda w: sg.assign(w, 0.5 * sg.constant(2.0) + 0.25 * w), 3.75),
        (lambda w: sg.assign(w, w + (w * 2.0 + 1.0)), 34.0),  # all of it, not only the sum
        (lambda w: sg.assign(w, sg.add_n([sg.constant(2.0), w])), 13.0),
        (lambda w: sg.assign(w, torch.cat([w.reshape(1), sg.constant([2.0])])[0] + 2.0), 13.0),
        (lambda w: sg.assign(w, w + torch.dropout(w, 0.0, True)), 22.0),  # of the numbers that were drawn
        (lambda w: sg.assign(w, w + w.sum()), 12.0),  # what mixes elements is not computed again
        (lambda w: w.copy_(torch.tensor(7.0)), 7.0),  # replaces what is there
        (lambda w: sg.assign(w, torch.exp(w) * 0 + 4.0), 4.0),
    ],
)
def test_every_update_is_made_on_the_value_that_is_there(
    target: str, update: Callable[[Any], Any], expected: float
) -> None:
    with sg.Graph() as graph, torch.no_grad():
        w = sg.get_variable("w", initializer=1.0)
        update(w)
        (changed,) = graph.updates
    with sg.Graph() as others, torch.no_grad():
        plus_ten = sg.assign(v := sg.get_variable("w", initializer=1.0), v + 10.0)
    with sg.Session(target, graph) as session, sg.Session(target, others) as other:
        fleet: Any = session._fleet
        commit = fleet.commit
        session.run(w)
        fleet.commit = lambda *args: (other.run(plus_ten), commit(*args))
        assert session.run(changed).item() == expected, "what is fetched is what the variable has"
        fleet.commit = commit
        assert session.run(w).item() == other.run("w").item() == expected


@pytest.mark.parametrize("in_hook", [False, True])
def test_gradient_is_that_of_the_value_that_was_read(target: str, in_hook: bool) -> None:
    """Also where it is made of the variable element by element, as that of this loss."""
    with sg.Graph() as graph:
        w = sg.get_variable("w", initializer=1.0)
        optimizer = torch.optim.SGD([w], lr=0.25)
        if in_hook:
            w.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        (w**2).backward()
        if not in_hook:
            optimizer.step()
        (changed,) = graph.updates
    with sg.Graph() as others, torch.no_grad():
        plus_ten = sg.assign(v := sg.get_variable("w", initializer=1.0), v + 10.0)
    with sg.Session(target, graph) as session, sg.Session(target, others) as other:
        fleet: Any = session._fleet
        commit = fleet.commit
        session.run(w)
        fleet.commit = lambda *args: (other.run(plus_ten), commit(*args))
        assert session.run(changed).item() == 11.0 - 0.25 * 2.0


def check_momentum(target: str, device: Any = None) -> None:
    """The weight follows the buffer that the other client has changed meanwhile."""

    def build() -> tuple[sg.Graph, Any, Any]:
        with sg.Graph() as graph, torch.no_grad(), sg.device(device):
            w, m = (sg.get_variable(name, initializer=1.0) for name in ("weight", "momentum"))
            x = sg.placeholder(torch.float32)
            m.mul_(0.5).add_(torch.exp(x * 0) + x + 0 * m)
            w.add_(m, alpha=-0.1)
        return graph, x, graph.updates

    (graph, x, updates), (others, others_x, others_updates) = build(), build()
    with sg.Session(target, graph) as session, sg.Session(target, others) as other:
        fleet: Any = session._fleet
        commit = fleet.commit
        fleet.commit = lambda *args: (other.run(others_updates, {others_x: 1.0}), commit(*args))
        found = session.run(updates, {x: 2.0})
        m = 0.5 * (0.5 * 1.0 + 2.0) + 3.0
        assert [each.item() for each in found] == pytest.approx([m, 1.0 - 0.1 * 2.5 - 0.1 * m])
        assert other.run(["momentum", "weight"]) == list(found)


def test_step_of_an_optimizer_is_made_anew_as_a_whole(target: str) -> None:
    check_momentum(target)


def test_no_update_of_many_clients_is_lost(target: str) -> None:
    """The global step of TensorFlow's programs: every client sees numbers that no other sees."""
    seen: list[list[int]] = [[], [], []]

    def count(numbers: list[int]) -> None:
        with Client(target) as client:
            numbers += [int(client.session.run(client.count)) for _ in range(20)]

    threads = [threading.Thread(target=count, args=(numbers,)) for numbers in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in seen for number in numbers) == list(range(1, 61))
    assert all(numbers == sorted(numbers) for numbers in seen)


def test_program_with_a_parameter_server_and_two_workers() -> None:
    """As in TensorFlow's guide: a task for the variables, each client computes on its own worker."""
    ports = free_ports(3)
    spec = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{each}" for each in ports[1:]]}
    plain = Plain()
    plain.apply(plain.gradient(ONE), plain.gradient(OTHER))
    with sg.Server(spec, "ps", 0), sg.Server(spec, "worker", 0) as first, sg.Server(spec, "worker", 1) as second:
        clients = [
            Client(server.target, replica_device_setter(f"/job:worker/task:{index}"))
            for index, server in enumerate((first, second))
        ]
        with clients[0] as one, clients[1] as other, sg.log_placement() as log:
            assert torch.equal(one.weight, other.weight)
            with before_commit(one, lambda: other.step(OTHER)):
                one.step(ONE)
            torch.testing.assert_close(other.weight, plain.w.detach())
            check_momentum(first.target, replica_device_setter("/job:worker/task:1"))
            sg.Session.reset(second.target)
            with pytest.raises(SessionError, match=r"another program has reset it; make a new session"):
                one.step(ONE)
        devices = {type_: {each.device for each in log if each.operation == type_} for type_ in ("Assign", "MatMul")}
    assert devices["Assign"] == {"/job:ps/replica:0/task:0/device:CPU:0"}
    assert devices["MatMul"] == {f"/job:worker/replica:0/task:{index}/device:CPU:0" for index in range(2)}


def test_variables_stay_until_they_are_reset(target: str) -> None:
    with Client(target) as client:
        client.step(ONE)
        trained = client.weight
    with in_container(target) as apart:
        assert torch.equal(apart.weight, torch.ones(3, 1))
        apart.step(ONE)
        with Client(target) as client:
            assert torch.equal(client.weight, trained), "of a session that has ended"
            sg.Session.reset(target, ["trial"])
            assert torch.equal(client.weight, trained)
            with pytest.raises(SessionError, match=r"variable 'w' .* reset"):
                apart.step(ONE)
            client.session.run(client.initializer)
            assert torch.equal(client.weight, torch.ones(3, 1))
            sg.Session.reset(target, ["local"])  # the job: TensorFlow's name of the default container
            with pytest.raises(SessionError, match=r"variable 'w' .* reset"):
                client.step(ONE)
    with in_container(target) as apart:
        assert torch.equal(apart.weight, torch.ones(3, 1))


def in_container(target: str) -> Client:
    with sg.container("trial"):
        return Client(target)


def test_isolated_session_shares_nothing(target: str) -> None:
    alone = sg.SessionConfig(isolate_session_state=True)
    with Client(target) as shared, Client(target, config=alone) as one, Client(target, config=alone) as other:
        one.step(ONE)
        sg.Session.reset(target)
        assert not torch.equal(one.weight, torch.ones(3, 1))
        assert torch.equal(other.weight, torch.ones(3, 1))
        assert torch.equal(shared.weight, torch.ones(3, 1))


def test_sessions_without_a_target_have_variables_of_their_own() -> None:
    with Client("") as one, Client("") as other:
        one.step(ONE)
        assert torch.equal(other.weight, torch.ones(3, 1))


def test_variable_that_does_not_fit_is_refused_with_the_cure(target: str) -> None:
    with Client(target) as client:
        before = client.weight
        for made, message in (
            (
                lambda: sg.get_variable("w", [2, 2]),
                r"'w' of container '' is \(3, 1\) float32 here, .* one has \(2, 2\)",
            ),
            (lambda: sg.get_variable("w", [3, 1], torch.float64), r"this one has \(3, 1\) float64. Give it another"),
        ):
            with sg.Graph() as graph:
                made()
            with sg.Session(target, graph) as session, pytest.raises(SessionError, match=message):
                session.run("w")
        cpus = sg.SessionConfig(device_count={"CPU": 2})
        with (
            Client(target, "/cpu:1", config=cpus) as elsewhere,
            pytest.raises(
                SessionError, match=r"is on /job:local.*CPU:0, where another .*on /job:local.*CPU:1. Place it"
            ),
        ):
            elsewhere.step(ONE)
        assert torch.equal(client.weight, before)


def test_reset_refuses_what_is_no_target(target: str) -> None:
    for arguments in ((("",)), (target, "trial"), (target, [1])):
        with pytest.raises(TypeError, match="got"):
            sg.Session.reset(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TaskLostError, match="cannot be reached"):
        sg.Session.reset(f"stratagem://127.0.0.1:{free_ports(1)[0]}")


def test_client_that_is_killed_leaves_the_model_and_nothing_else(target: str, forked_tasks: None) -> None:
    with contextlib.closing(TaskProcess(program="tests.cluster.session_program")) as program:
        assert program.ask(f"begin({target!r})") == "begun"
        assert program.ask("add()") == 1.0
        with sg.Graph() as graph:
            total = sg.get_variable("total", initializer=0.0)
            more = sg.assign(total, total + 1)
        with sg.Session(target, graph) as session:
            assert session.run(more).item() == 2.0
            program.send("add_forever()")
            while session.run(total).item() < 20:
                pass
            program.kill()
            assert session.run(more).item() == session.run(total).item() > 20
