"""Graphs run on the tasks of a cluster: what travels is checked, and who is gone is named."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem import _env
from stratagem.cluster import token as tokens
from stratagem.cluster.channel import connect
from stratagem.cluster.io_thread import IoThread
from stratagem.cluster.membership.member_messages import MessageKind
from stratagem.errors import (
    ClusterSpecError,
    DeviceNotFoundError,
    HandshakeError,
    ProtocolError,
    SessionError,
    TaskLostError,
)
from stratagem.graphs.sessions import sent_parts
from stratagem.graphs.sessions.allowed_operations import NAMES
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.partition import make_plan
from tests.cluster import nursery
from tests.cluster.tasks import TaskProcess, started, workers
from tests.travelling import TRAVELLING

pytestmark = pytest.mark.usefixtures("known_token")

HERE = NodePlace("worker", 0, "CPU", 0)
OPENING = {
    **{"soft": None, "growth": None, "fraction": None, "visible": "", "counts": {}},
    **{"threads": [0, 0], "isolated": False},
}
DECLARING = {
    **{"variable": 1, "name": "w", "container": "", "device": "/device:CPU:0"},
    "value": {"dtype": "float32", "shape": [2]},
}


@pytest.fixture(scope="module")
def cluster(module_token: Path, forked_tasks: None) -> Iterator[tuple[list[TaskProcess], list[str]]]:
    """Two tasks in processes of their own, and their targets."""
    spec = workers(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_env.TOKEN_FILE, str(module_token))
        with started(2) as tasks:
            yield tasks, [task.ask(f"listen({spec!r}, 'worker', {index})") for index, task in enumerate(tasks)]


@pytest.fixture
def server() -> Iterator[sg.Server]:
    with sg.Server.create_local_server() as made:
        yield made


def test_local_server_runs_the_program_of_the_notes(server: sg.Server) -> None:
    with sg.Graph() as graph:
        c = sg.constant("hello, distributed stratagem")
    with sg.Session(server.target, graph) as session:
        assert session.run(c) == "hello, distributed stratagem"


def test_program_that_closes_nothing_ends_well(tmp_path: Path, forked_tasks: None) -> None:
    """As those of the notes; a thread that is in torch at that moment would take the process down."""
    program = """
import stratagem as sg
c = sg.constant("hello")
server = sg.Server.create_local_server()
session = sg.Session(server.target)
print(session.run(c))
sg.Session().run(c)
"""
    done = nursery.run(["-W", "error", "-c", program], 60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_parts_run_in_the_tasks_that_were_asked_for(
    cluster: tuple[list[TaskProcess], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [None, 2], name="x")
        with sg.device("/job:worker/task:1"):
            w = sg.get_variable("w", [2, 2], initializer=torch.nn.init.ones_)
            y = torch.tanh(x @ w)
        with sg.device("/job:worker/task:0/cpu:0"):
            z = (y * 2).sum()
        (gradient,) = torch.autograd.grad(z, [w])
        with sg.device("/job:worker/task:1/cpu:0"):
            train = sg.assign(w, w - 0.5 * gradient)
    rows = torch.tensor([[0.1, -0.2], [0.3, 0.4], [0.5, 0.6]])
    weights = torch.ones(2, 2, requires_grad=True)
    config = sg.SessionConfig(log_device_placement=True)
    with sg.Session(cluster[1][0], graph, config=config) as session, sg.log_placement() as log:
        for size in (3, 1, 2):
            value = rows[:size]
            found, _ = session.run([z, train], {x: value})
            expected = (torch.tanh(value @ weights) * 2).sum()
            torch.testing.assert_close(found, expected.detach())
            weights = (weights - 0.5 * torch.autograd.grad(expected, [weights])[0]).detach().requires_grad_()
        torch.testing.assert_close(session.run(w), weights.detach())
    product = next(record for record in log if record.operation == "MatMul" and record.file)
    assert (product.name, product.device) == ("MatMul", "/job:worker/replica:0/task:1/device:CPU:0")
    assert [(copy.source, copy.num_bytes) for copy in product.copies] == [("the program", 24)]
    summed = next(record for record in log if record.name == "Mul" and record.requested)
    assert [copy.source for copy in summed.copies] == ["/job:worker/replica:0/task:1/device:CPU:0"]
    assert "worker/1 CPU:0" in log.table()
    lines = capsys.readouterr().out.splitlines()
    assert "w: (Variable): /job:worker/replica:0/task:1/device:CPU:0" in lines
    assert "MatMul: /job:worker/replica:0/task:1/device:CPU:0" in lines
    assert "Sum: /job:worker/replica:0/task:0/device:CPU:0" in lines


def test_traced_step_trains_the_programs_model_in_another_task(cluster: tuple[list[TaskProcess], list[str]]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def step_of(model: torch.nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @sg.device("/job:worker/task:1")
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    traced = sg.trace(step_of(models[1]), x, y)
    reference = step_of(models[0]).__wrapped__
    with sg.Session(cluster[1][0], traced.graph) as session:
        for _ in range(3):
            torch.testing.assert_close(session.run(traced, traced.feed(x, y)), reference(x, y).detach())
    torch.testing.assert_close(models[1].weight, models[0].weight)


def test_random_numbers_are_drawn_in_the_task_that_was_asked_for(cluster: tuple[list[TaskProcess], list[str]]) -> None:
    with sg.Graph() as graph, sg.device("/job:worker/task:1/cpu:0"):
        drawn = [torch.rand(20), torch.randint(99, (20,)), torch.randperm(20), torch.normal(0.0, 1.0, (20,))]
        own = torch.rand(3, generator=torch.Generator()) + sg.constant(0.0)
    with sg.Session(cluster[1][0], graph) as session:
        for first, second in zip(session.run(drawn), session.run(drawn), strict=True):
            assert not torch.equal(first, second)
        with pytest.raises(
            SessionError, match=r"RandomUniform_1 .* cannot travel .* it has an argument <torch\._C\.Generator"
        ):
            session.run(own)
    assert {str(node.spec) for node in graph.nodes if node.type.startswith("Random")} == {
        "/job:worker/task:1/device:CPU:0"
    }


def test_types_and_large_tensors_travel_whole(server: sg.Server) -> None:
    values = [
        torch.randn(3, 700_000),  # more than one piece
        torch.tensor([True, False]),
        torch.randn(4).to(torch.bfloat16),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.randn(4, 5).T,
    ]
    with sg.Graph() as graph:
        inputs = [sg.placeholder(each.dtype, each.shape) for each in values]
        outputs = [each.clone() for each in inputs]
    with sg.Session(server.target, graph) as session:
        for found, value in zip(session.run(outputs, dict(zip(inputs, values, strict=True))), values, strict=True):
            assert torch.equal(found, value)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TRAVELLING, ids=str)
def test_values_of_every_type_are_fed_kept_and_fetched(server: sg.Server, dtype: torch.dtype) -> None:
    value, wide = torch.arange(6).to(dtype), torch.complex128 if dtype.is_complex else torch.float64
    with sg.Graph() as graph:
        x = sg.placeholder(dtype, [6])
        kept = sg.get_variable("kept", initializer=value.clone(), trainable=False)
        fetches = [x.clone(), x.to(wide), kept, sg.constant(value)]
    with sg.Session(server.target, graph) as session:
        expected = [value, value.to(wide), value, value]
        for found, wanted in zip(session.run(fetches, {x: value}), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_type_that_cannot_travel_is_refused_with_those_that_can(server: sg.Server) -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.bits8, [2])
        y = x.clone()
    value = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    with (
        sg.Session(server.target, graph) as session,
        pytest.raises(SessionError, match=r"type bits8 cannot travel to another task; types that can: bool, uint8, .*"),
    ):
        session.run(y, {x: value})


def test_error_of_an_operation_names_it_and_its_task(server: sg.Server) -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.int64, [2])
        table = sg.get_variable("table", [3, 2])
        y = torch.nn.functional.embedding(x, table)
        new = sg.assign(table, table * 2 + y.sum())
    with sg.Session(server.target, graph) as session:
        before = session.run(table)
        with pytest.raises(
            SessionError, match=r"^Embedding \(.*made at test_cluster_session.py:\d+\) failed on /job:local/repl"
        ):
            session.run(new, {x: [1, 5]})
        assert torch.equal(session.run(table), before)
        assert session.run(y, {x: [1, 2]}).shape == (2, 2)


def test_devices_and_tasks_that_do_not_exist_are_named(cluster: tuple[list[TaskProcess], list[str]]) -> None:
    for device, message in (
        ("/job:worker/task:5", "Const was placed on '/job:worker/task:5': task worker/5 does not exist; cluster has"),
        ("/job:ps", "task ps/0 does not exist"),
        (
            "/job:worker/task:1/gpu:3",
            "'/job:worker/task:1/device:GPU:3', which does not exist; that task has /device:CPU:0",
        ),
    ):
        with sg.Graph() as graph, sg.device(device):
            c = sg.constant(1.0)
        with sg.Session(cluster[1][0], graph) as session, pytest.raises(DeviceNotFoundError, match=message):
            session.run(c)


def test_operation_that_may_not_travel_is_refused_before_it_does(server: sg.Server) -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2, 2])
        y = torch.linalg.cholesky_ex(x)[0]
    with (
        sg.Session(server.target, graph) as session,
        pytest.raises(
            SessionError, match=r"aten.linalg_cholesky_ex.*is not among the operations that another task runs"
        ),
    ):
        session.run(y, {x: torch.eye(2)})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_run_over_a_task_that_is_lost_names_it(
    module_token: Path, forked_tasks: None, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From this task to the other and back again; the other dies, or stops, between two runs."""
    monkeypatch.setenv("STRATAGEM_HEARTBEAT_TIMEOUT", "2")
    spec = workers(2)
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2])
        with sg.device("/job:worker/task:0"):
            one = x + 1
        with sg.device("/job:worker/task:1"):
            two = one * 2
        with sg.device("/job:worker/task:0"):
            three = two - 1
    with started(1) as (other,), sg.Server(spec, "worker", 0) as server:
        other.ask(f"listen({spec!r}, 'worker', 1)")
        with sg.Session(server.target, graph) as session:
            assert session.run(three, {x: [1.0, 2.0]}).tolist() == [3.0, 5.0]
            other.signal(number)
            with pytest.raises(
                TaskLostError,
                match=r"^task worker/1 is gone: (it closed|the connection|no sign of life for .* answers)",
            ):
                session.run(three, {x: [1.0, 2.0]})
            assert session.run(one, {x: [1.0, 2.0]}).tolist() == [2.0, 3.0]
            with pytest.raises(TaskLostError, match="task worker/1 is gone"):
                session.run(three, {x: [1.0, 2.0]})


@pytest.mark.parametrize("where", ["here", "in a cluster"])
def test_session_in_a_forked_process_is_a_clear_error(server: sg.Server, where: str) -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2])
        doubled = x * 2
    with sg.Session(server.target, graph) if where == "in a cluster" else sg.Session(graph) as session:
        assert session.run(doubled, {x: [1.0, 2.0]}).tolist() == [2.0, 4.0]
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                with session:
                    session.run(doubled, {x: [1.0, 2.0]})
            except SessionError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            assert pipe.read().startswith(
                f"the session belongs to process {os.getpid()}, from which this one was forked"
            )
        os.waitpid(pid, 0)
        assert session.run(doubled, {x: [3.0, 4.0]}).tolist() == [6.0, 8.0]


@pytest.mark.parametrize("own_server", [False, True])
def test_program_that_was_suspended_goes_on(cluster: tuple[list[TaskProcess], list[str]], *, own_server: bool) -> None:
    """As by Ctrl-Z and `fg`: nobody was silent, this program did not listen."""
    with contextlib.closing(TaskProcess(program="tests.cluster.session_program")) as program:
        assert program.ask(f"begin({('' if own_server else cluster[1][0])!r})") == "begun"
        assert program.ask("run()") == [2.0, 4.0]
        program.signal(signal.SIGSTOP)
        time.sleep(3.0)  # the fault itself: longer than a task may be silent
        program.signal(signal.SIGCONT)
        program.send("__import__('time').sleep(1.5) or run()")  # what is lost is noticed meanwhile
        assert program.value() == [2.0, 4.0]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


@contextlib.contextmanager
def interrupted_when(ready: Callable[[], bool], then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ctrl-C comes in the block as soon as something holds, and then something is done."""

    is_over = threading.Event()

    def watch() -> None:
        wait_until(lambda: is_over.is_set() or ready())
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            then()

    thread = threading.Thread(target=watch)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may come before the block has begun
            thread.start()
            yield
    finally:
        is_over.set()
        thread.join()


def processor_s(task: TaskProcess) -> float:
    """How long a task has computed."""
    fields = Path(f"/proc/{task.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_ends_a_run_in_other_tasks_and_the_session_goes_on(
    cluster: tuple[list[TaskProcess], list[str]],
) -> None:
    tasks, targets = cluster
    with sg.Graph() as graph, sg.device("/job:worker/task:1"):
        x = sg.placeholder(torch.float32, [1000, 1000])
        w = sg.get_variable("count", initializer=0.0)
        y = x
        for _ in range(500):  # half a minute and more
            y = y @ x
        slow = sg.assign(w, w + 1 + 0 * y.sum())
        quick = x[0, 0] + w
    value = torch.eye(1000)
    with sg.Session(targets[0], graph) as session:
        assert session.run(quick, {x: value}).item() == 1.0
        before = processor_s(tasks[1])
        with interrupted_when(lambda: processor_s(tasks[1]) > before + 0.3):
            session.run(slow, {x: value})
        assert session.run(quick, {x: value}).item() == 1.0  # the same thread of the task computes it


def test_ctrl_c_in_the_middle_of_a_call_leaves_the_connection_whole(
    cluster: tuple[list[TaskProcess], list[str]],
) -> None:
    """The task has stopped, and goes on after Ctrl-C: its answer comes when nobody waits for it any more."""
    tasks, targets = cluster
    with sg.Graph() as graph, sg.device("/job:worker/task:1"):
        one = sg.constant(1.0) + 1
        w = sg.get_variable("ones", [2], initializer=torch.nn.init.ones_)
    with sg.Session(targets[0], graph) as session:
        assert session.run(one).item() == 2.0
        calls = session._fleet._connections["worker/1"]._calls  # type: ignore[attr-defined]
        has_begun = threading.Event()
        tasks[1].signal(signal.SIGSTOP)
        earlier = set(calls)  # such as that the last run is over
        with interrupted_when(
            lambda: has_begun.is_set() and bool(set(calls) - earlier), lambda: tasks[1].signal(signal.SIGCONT)
        ):
            has_begun.set()
            session.run(w)
        assert session.run(w).tolist() == [1.0, 1.0]


def test_target_that_is_none_is_refused(server: sg.Server, tmp_path: Path) -> None:
    graph = sg.Graph()
    with pytest.raises(ClusterSpecError, match=r"the target of a session is such as 'stratagem://10.0.0.1:2222', got"):
        sg.Session("grpc://127.0.0.1:1", graph)
    target = server.target
    tokens.create(tmp_path / "own" / "other")
    with pytest.raises(HandshakeError, match="has another token than this task"):
        sg.Session(target, graph, config=sg.SessionConfig(token_file=tmp_path / "own" / "other"))
    server.stop()
    with pytest.raises(TaskLostError, match=r"cannot be reached: .*Start it with sg.Server"):
        sg.Session(target, graph)


def test_session_ends_with_its_server(server: sg.Server) -> None:
    with sg.Graph() as graph:
        c = sg.constant(1.0) + 1
    with sg.Session(server.target, graph) as session:
        assert session.run(c).item() == 2.0
        server.stop()
        with pytest.raises(TaskLostError, match="is gone"):
            session.run(c)


# What a task takes from others


def described() -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A part as it travels."""
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2])
        y = torch.clamp(x * sg.constant([1.0, 2.0]), max=float("inf")).sum(0, dtype=torch.float64)
    (part,) = make_plan([graph.recorder.lookup(y)], {graph.recorder.lookup(x)}, lambda node: HERE).parts  # type: ignore[list-item, arg-type]
    sent = sent_parts.encode_part(part, {})
    about: dict[str, Any] = json.loads(json.dumps(sent.about))
    return about, sent.constants


def test_part_is_the_same_after_its_journey() -> None:
    about, constants = described()
    part, sent = sent_parts.decode_part(about, constants, HERE, {})
    assert [str(node.function) for node in part.nodes] == [
        "None",
        "aten.mul.Tensor",
        "aten.clamp.default",
        "aten.sum.dim_IntList",
    ]
    assert part.nodes[2].args[2] == float("inf")
    assert len(sent.inputs) == len(sent.outputs) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.pop("nodes"),
        lambda part: part.update(more=[]),
        lambda part: part["inputs"][0].update(shape=[-1]),
        lambda part: part["inputs"][0].update(shape=[2**40, 2**40]),
        lambda part: part["inputs"][0].update(dtype="object"),
        lambda part: part["nodes"][1].update(operation=["from_file", "default"]),
        lambda part: part["nodes"][1].update(operation=["mul_", "Tensor"]),
        lambda part: part["nodes"][1].update(operation=["mul", "out"]),
        lambda part: part["nodes"][1].update(operation=["__class__", "default"]),
        lambda part: part["nodes"][1].update(operation="mul"),
        lambda part: part["nodes"][1].update(args=[{"output": [1, 0]}]),
        lambda part: part["nodes"][1].update(args=[{"output": [-1, 3]}]),
        lambda part: part["nodes"][1].update(args=[{"output": [0, 0], "more": 1}]),
        lambda part: part["nodes"][1].update(args=[{"code": "import os"}]),
        lambda part: part["nodes"][1].update(args=["../../etc/passwd"]),
        lambda part: part["nodes"][1].update(args=[0] * 50),
        lambda part: part["nodes"][1].update(args=[{"size": 0}]),
        lambda part: part.update(num_sizes=-1),
        lambda part: part.update(num_sizes=[1]),
        lambda part: part["inputs"][0].update(shape=[{"size": 0}]),
        lambda part: part["nodes"][1].update(kwargs={"nothing": 1}),
        lambda part: part["nodes"][1].update(num_outputs=10**9),
        lambda part: part["nodes"][1].update(kind="placeholder"),
        lambda part: part["nodes"][1].update(name=None),
        lambda part: part["nodes"].append(
            {"kind": "assign", "name": "", "line": "", "variable": 7, "inputs": [[0, 0]]}
        ),
        lambda part: part["nodes"].append({"kind": "constant", "name": "", "line": ""}),
        lambda part: part["outputs"].append([-1, 0]),
        lambda part: part["outputs"].append([99, 0]),
        lambda part: part.update(nodes=[]),
    ],
)
def test_part_that_breaks_a_rule_is_refused(change: Any) -> None:
    about, constants = described()
    change(about)
    with pytest.raises(ProtocolError):
        sent_parts.decode_part(about, constants, HERE, {})


@pytest.mark.parametrize("numbers", [[], [1, 2], [None], [-1], [2**40], [2**70], [1.5], ["1"]])
def test_numbers_that_are_no_sizes_are_refused_before_memory_is_taken(numbers: list[Any]) -> None:
    about, constants = described()
    about["num_sizes"] = 1
    about["inputs"][0]["shape"] = [{"size": 0}]
    _, sent = sent_parts.decode_part(about, constants, HERE, {})
    assert sent.empty_inputs([3])[0].shape == (3,)
    with pytest.raises(ProtocolError):
        sent.empty_inputs(numbers)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["add_n"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["output", "dtype", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a description that could hold something else."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(inner, (*path, key))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_part_with_anything_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    about, constants = described()
    path = data.draw(st.sampled_from([path for path in places_in(about) if path]))
    inner: Any = about
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(JSON)
    with contextlib.suppress(ProtocolError):
        sent_parts.decode_part(about, constants, HERE, {})


def test_no_operation_that_may_travel_touches_anything_but_tensors() -> None:
    for name in NAMES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if sent_parts.allowed_operations.operation(name, overload) is None:
                continue
            for argument in getattr(packet, overload)._schema.arguments:
                assert not {"Storage", "Stream", "PyObject"} & {str(argument.type)}
    unchecked = {"as_strided", "_reshape_alias", "set_", "resize", "max_unpool2d", "max_unpool3d", "_unsafe_index"}
    assert not {"from_file", "empty", "empty_strided", "record_stream", *unchecked} & NAMES


@pytest.mark.parametrize(
    "body",
    [
        {"call": "run", "about": {"part": 0, "run": 0}, "sizes": []},  # before anything was opened
        {"call": "open", "about": {}, "sizes": []},
        {"call": "eval", "about": {"code": "1"}, "sizes": []},
        {"call": "open", "about": OPENING, "sizes": [5]},
        {"call": "open", "about": OPENING, "sizes": [], "then": {"call": "open", "about": OPENING, "sizes": []}},
        {
            "call": "open",
            "about": OPENING,
            "sizes": [],
            "then": {"call": "run", "about": {"part": 1, "run": 1}, "sizes": []},
        },
        {"call": "open", "about": OPENING, "sizes": [], "then": {"call": "commit", "about": {"run": []}, "sizes": []}},
        *(
            {"call": "open", "about": OPENING, "sizes": [], "then": {"call": call, "about": about, "sizes": sizes}}
            for call, about, sizes in (
                ("write", {"variable": 1, "anew": False}, [8]),  # before it was declared
                ("declare", DECLARING, [2**40]),
                ("declare", DECLARING | {"container": 3}, []),
                ("declare", DECLARING | {"name": "w" * 600}, []),
                ("declare", DECLARING | {"value": {"dtype": "float32", "shape": [2**40, 2**40]}}, []),
                ("commit", {"run": 1, "values": [5]}, []),
                ("commit", {"run": 1, "values": "w"}, []),
                ("open", OPENING | {"threads": 3}, []),
            )
        ),
        {
            **{"call": "open", "about": OPENING, "sizes": []},
            "then": {"call": "part", "about": {"part": 1, "device": "/device:CPU:0", "counts": []}, "sizes": [2**40]},
        },
    ],
)
def test_call_that_breaks_a_rule_ends_the_connection_and_nothing_else(server: sg.Server, body: dict[str, Any]) -> None:
    thread = IoThread("test")
    thread.start()

    async def break_the_rule() -> str:
        port = int(server.target.rpartition(":")[2])
        channel = await connect("127.0.0.1", port, server.token)
        then = body.get("then")
        channel.send(MessageKind.CALL, {"id": 0, **{name: value for name, value in body.items() if name != "then"}})
        try:
            if then is not None:
                assert (await channel.receive())[1]["error"] == ""
                channel.send(MessageKind.CALL, {"id": 1, **then})
            await channel.receive()
        except Exception as error:
            return type(error).__name__
        finally:
            channel.abort()
        return "answered"

    try:
        assert thread.run(break_the_rule()) == "ClosedError"
    finally:
        thread.stop()
    with sg.Graph() as graph:
        c = sg.constant(1.0)
    with sg.Session(server.target, graph) as session:
        assert session.run(c).item() == 1.0
