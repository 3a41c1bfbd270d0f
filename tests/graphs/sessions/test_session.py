"""Sessions compute what eager torch computes, on the devices that were asked for, at the same time."""

import collections
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.devices.inventory import Inventory
from stratagem.errors import (
    DeviceConfigurationError,
    DeviceNotFoundError,
    DevicesInUseError,
    FeedError,
    GraphError,
    PlacementWarning,
    SessionError,
)
from stratagem.graphs.sessions.node_devices import Placer
from tests.placement.conftest import two_products
from tests.steps import plain_step

Pair = collections.namedtuple("Pair", "first second")
UNIFORM = functools.partial(torch.nn.init.uniform_, a=-1, b=1)


@pytest.fixture(autouse=True)
def four_gpus(inventory: Inventory) -> Iterator[None]:
    inventory.simulate("GPU", 4)
    sg.reset_default_graph()
    yield
    sg.reset_default_graph()


def three_products() -> tuple[sg.Graph, list[torch.Tensor], torch.Tensor]:
    """The example of the notes: three products on three devices, summed on the CPU."""
    with sg.Graph() as graph:
        products = []
        for index in range(3):
            with sg.device(f"/gpu:{index}"):
                a = sg.get_variable(f"a_{index}", [2, 3], initializer=UNIFORM)
                b = sg.get_variable(f"b_{index}", [3, 2], initializer=UNIFORM)
                products.append(torch.matmul(a, b))
        with sg.device("/cpu:0"):
            total = sg.add_n(products)
    return graph, products, total


def test_parts_on_several_devices_give_what_torch_gives() -> None:
    graph, products, total = three_products()
    with sg.Session(graph) as session:
        names = [node.name for node in graph.variables]
        values = dict(zip(names, session.run(names), strict=True))
        expected = [values[f"a_{index}"] @ values[f"b_{index}"] for index in range(3)]
        found, (one, two, three) = session.run((total, products))
    for got, wanted in zip((one, two, three), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(found, expected[0] + expected[1] + expected[2])


def test_log_has_the_lines_of_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    graph, total = two_products("/device:GPU:2", "/device:GPU:3")
    with sg.Session(graph, config=sg.SessionConfig(log_device_placement=True)) as session:
        assert session.run(total).tolist() == [[44.0, 56.0], [98.0, 128.0]]
        session.run(total)
    task = "/job:localhost/replica:0/task:0/device"
    assert capsys.readouterr().out.splitlines() == [
        "Device mapping:",
        *(f"{task}:GPU:{index} -> device: {index}, name: simulated GPU" for index in range(4)),
        f"Const: {task}:GPU:2",
        f"Const_1: {task}:GPU:2",
        f"MatMul: {task}:GPU:2",
        f"Const_2: {task}:GPU:3",
        f"Const_3: {task}:GPU:3",
        f"MatMul_1: {task}:GPU:3",
        f"AddN: {task}:CPU:0",
    ]


def test_placement_log_has_the_operations_of_a_session() -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [4, 3], name="x")
        with sg.device("/cpu:0"):
            w = sg.get_variable("w", [3, 2])
        with sg.device("/gpu:1"):
            y = x @ w
        loss = y.sum()
        (gradient,) = torch.autograd.grad(loss, [w])
        train = sg.assign(w, w - gradient)
    with sg.Session(graph) as session, sg.log_placement() as log:
        session.run([loss, train], {x: torch.ones(4, 3).numpy()})
        session.run(loss, {x: np.ones((4, 3), np.float32)})
    records = {record.name: record for record in log if record.file}
    product = records["MatMul"]
    assert (product.operation, product.requested, product.device, product.why) == (
        *("MatMul", "/device:GPU:1", "/device:GPU:1", "scope"),
    )
    assert [(copy.maker, copy.source, copy.num_bytes) for copy in product.copies] == [
        ("x", "/device:CPU:0", 48),
        ("w", "/device:CPU:0", 24),
    ]
    assert product.inputs == ("x", "w")
    assert "y = x @ w" in Path(product.file).read_text().splitlines()[product.line - 1]
    assert (records["x"].device, records["x"].why) == ("/device:CPU:0", "fed")
    assert (records["Sum"].device, records["Sum"].why) == ("/device:GPU:1", "follows its inputs")
    assert records["MatMul_1"].why == "gradient of MatMul"
    assert records["w/Assign"].why == "with its variable"
    assert (records["MatMul_2"].operation, records["MatMul_2"].num_bytes_copied) == ("MatMul", 72)  # of the second run
    assert "x  " in log.table()
    assert "gradient of MatMul" in log.to_json()


def test_fetches_come_back_in_kind() -> None:
    with sg.Graph() as graph:
        a = sg.constant([1.0, 2.0])
        b = a * 2
        init = sg.global_variables_initializer()
    with sg.Session(graph) as session:
        found = session.run({"one": [a, ("Mul:0", b)], "two": Pair(a, init), "three": init})
    assert found["one"][0].tolist() == [1.0, 2.0]
    assert [each.tolist() for each in found["one"][1]] == [[2.0, 4.0]] * 2
    assert isinstance(found["two"], Pair)
    assert found["two"].first.tolist() == [1.0, 2.0]
    assert found["two"].second is None
    assert found["three"] is None


def test_only_what_is_needed_runs() -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2])
        counted = sg.get_variable("counted", initializer=0.0)
        sg.assign(counted, counted + 1)
        y = x * 2
        z = torch.linalg.cholesky(torch.zeros(2, 2) * x.sum())  # would fail
    with sg.Session(graph) as session:
        assert session.run(y, {x: [1.0, 2.0]}).tolist() == [2.0, 4.0]
        assert session.run(counted).item() == 0
        assert session.run("StridedSlice" if False else y, {y: torch.ones(2)}).tolist() == [1.0, 1.0]
        with pytest.raises(SessionError, match=r"made at test_session.py:\d+\) failed on /job:localhost.*cholesky"):
            session.run(z, {x: [1.0, 2.0]})
        assert session.run(y, {x: [1.0, 2.0]}).tolist() == [2.0, 4.0]


def test_variables_change_when_a_run_has_succeeded_and_can_begin_again() -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [])
        w = sg.get_variable("w", initializer=1.0)
        new = sg.assign(w, w + x)
        both = w + new  # reads what w was when the run began
        failing = torch.linalg.cholesky((new * -1).reshape(1, 1))
        init = sg.global_variables_initializer()
    with sg.Session(graph) as session:
        assert [each.item() for each in session.run([new, both], {x: 2.0})] == [3.0, 4.0]
        assert session.run(w).item() == 3.0
        with pytest.raises(SessionError, match="cholesky"):
            session.run(failing, {x: 2.0})
        assert session.run(w).item() == 3.0
        session.run(init)
        assert session.run(w).item() == 1.0
    with sg.Session(graph) as other:
        assert other.run(w).item() == 1.0


def test_results_are_the_callers_own() -> None:
    with sg.Graph() as graph:
        w = sg.get_variable("w", [2], initializer=torch.nn.init.ones_)
        c = sg.constant([1.0, 2.0])
        new = sg.assign(w, w * 1)
        x = sg.placeholder(torch.float32, [2])
    fed = torch.ones(2)
    with sg.Session(graph) as session:
        for each in session.run([w, c, new, w.view(2, 1), x], {x: fed}):
            each.fill_(7.0)
        assert [each.tolist() for each in session.run([w, c], {})] == [[1.0, 1.0], [1.0, 2.0]]
    assert fed.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
        functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
        functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    ],
)
@pytest.mark.parametrize("num_before", [0, 1])
def test_traced_training_step_does_what_the_step_does(optimizer: Any, num_before: int) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(5)]
    models = [
        torch.nn.Sequential(  # a bias before a normalisation has gradients of rounding only
            torch.nn.Linear(6, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
        )
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    steps = [plain_step(model, optimizer(model.parameters())) for model in models]
    for step in steps * num_before:
        step(*data[0])  # type: ignore[operator]
    traced = sg.trace(steps[1], *data[0])  # type: ignore[arg-type]
    with sg.Session(traced.graph) as session:
        for batch in data:
            expected = steps[0](*batch)  # type: ignore[operator]
            found = session.run(traced, traced.feed(*batch))
            torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    for step in steps:
        step(*data[0])  # type: ignore[operator]  # and goes on without the session
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(models[0][1].running_mean, models[1][1].running_mean)


def test_transformer_with_dropout_gives_what_torch_gives_with_the_same_seed() -> None:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    value = torch.randn(2, 5, 8)
    traced = sg.trace(lambda x: torch.autograd.grad(model(x).square().sum(), list(model.parameters())), value)
    torch.manual_seed(3)
    expected = torch.autograd.grad(model(value).square().sum(), list(model.parameters()))
    with sg.Session(traced.graph) as session:
        torch.manual_seed(3)
        found = session.run(traced, traced.feed(value))
        again = session.run(traced, traced.feed(value))
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found[0], again[0])


def cnn() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.MaxPool2d(2),
        torch.nn.GELU(),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
    )


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (cnn, torch.randn(2, 3, 8, 8)),
        (lambda: torch.nn.LSTM(4, 3, num_layers=2), torch.randn(5, 2, 4)),
        (lambda: torch.nn.GRU(4, 3, bidirectional=True), torch.randn(5, 2, 4)),
        (lambda: torch.nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)),
        (lambda: torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Dropout(), torch.nn.PReLU()), torch.randn(3, 4)),
    ],
)
def test_models_and_their_gradients_are_those_of_torch(model: Any, value: torch.Tensor) -> None:
    torch.manual_seed(0)
    made = model()

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        outcome = made(x, x, x) if isinstance(made, torch.nn.MultiheadAttention) else made(x)
        y = outcome if isinstance(outcome, torch.Tensor) else outcome[0]
        return [y, *torch.autograd.grad(y.sin().sum(), [x, *made.parameters()])]

    example = value.clone().requires_grad_()
    traced = sg.trace(results, example)
    torch.manual_seed(1)
    expected = results(example)
    with sg.Session(traced.graph) as session:
        torch.manual_seed(1)
        found = session.run(traced, traced.feed(example))
    torch.testing.assert_close(found, [each.detach() for each in expected])


def test_traced_function_returns_all_that_it_returns() -> None:
    traced = sg.trace(lambda x, factor: {"double": x * factor, "rest": ("text", 3, None, ())}, torch.ones(2), 2.0)
    with sg.Session(traced.graph) as session:
        found = session.run([traced], traced.feed(torch.tensor([1.0, 2.0]), 2.0))
    assert found[0]["double"].tolist() == [2.0, 4.0]
    assert found[0]["rest"] == ("text", 3, None, ())
    with pytest.raises(GraphError, match="depends neither on its arguments nor on tensors that existed before"):
        sg.trace(lambda x: torch.ones(3), torch.ones(2))


def test_trace_that_keeps_tensors_is_refused_and_leaves_the_program_as_it_was() -> None:
    kept = []
    model = torch.nn.Linear(3, 1)
    model.weight.grad = torch.ones(1, 3)

    def keeping(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        kept.append(x * 2)
        return loss

    with pytest.raises(
        GraphError, match=r"the function keeps 1 tensor\(s\) that it has made, first <GraphTensor 'Mul'"
    ):
        sg.trace(keeping, torch.ones(2, 3))
    assert model.weight.grad.tolist() == [[1.0, 1.0, 1.0]]
    assert model.bias.grad is None
    step = plain_step(model, torch.optim.NAdam(model.parameters()))
    with pytest.raises(GraphError, match="NAdam makes its state in its first step, in a way that cannot be foreseen"):
        sg.trace(step, torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))  # type: ignore[arg-type]


def test_towers_with_variables_on_the_cpu_train_like_one_device() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    start = torch.randn(3, 1)
    with sg.Graph() as graph:
        inputs, targets = sg.placeholder(torch.float32, [8, 3]), sg.placeholder(torch.float32, [8, 1])
        with sg.device("/cpu:0"):
            w = sg.get_variable("w", initializer=start)
        gradients = []
        for index in range(2):
            with sg.device(f"/gpu:{index}"):
                part = slice(4 * index, 4 * index + 4)
                loss = torch.nn.functional.mse_loss(inputs[part] @ w, targets[part])
                gradients.append(torch.autograd.grad(loss, [w])[0])
        with sg.device("/cpu:0"):
            train = sg.assign(w, w - 0.1 * sg.add_n(gradients) / 2)
    placer = Placer(sg.Session(graph)._fleet)
    placer.place(graph.nodes)
    assert {placer.where(gradient.node).device for gradient in gradients} == {"/device:GPU:0", "/device:GPU:1"}
    assert placer.where(train.node).device == "/device:CPU:0"
    expected = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([expected], lr=0.1)
    with sg.Session(graph) as session:
        for _ in range(4):
            session.run(train, {inputs: x, targets: y})
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(x @ expected, y).backward()
            optimizer.step()
        torch.testing.assert_close(session.run(w), expected.detach())


def test_unplaced_nodes_follow_their_neighbours() -> None:
    with sg.Graph() as graph:
        small = sg.constant([1.0])
        with sg.device("/gpu:3"):
            large = torch.ones(100) * small
        after = large + 1
        with sg.device("/gpu:1"):
            other = small * 2
        mixed = other + after
        alone = sg.constant([5.0])
        with sg.device("/cpu"):
            partial = alone + 1
    with sg.Session(graph) as session:
        session.run([mixed, partial])
        where = session._placer.where
        assert [where(each.node).device for each in (small, after, mixed)] == ["/device:GPU:3"] * 3  # type: ignore[attr-defined]
        assert where(alone.node).device == where(partial.node).device == "/device:CPU:0"  # type: ignore[attr-defined]


def test_parameters_are_used_where_the_program_has_placed_them(capsys: pytest.CaptureFixture[str]) -> None:
    with sg.device("/gpu:2"):
        layer = torch.nn.Linear(3, 2)
    value = torch.ones(1, 3)
    expected = layer(value)
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [1, 3])
        y = layer(x)
    with sg.Session(graph, config=sg.SessionConfig(log_device_placement=True)) as session:
        torch.testing.assert_close(session.run(y, {x: value}), expected.detach())
    lines = capsys.readouterr().out.splitlines()[5:]
    assert len(lines) == 5
    assert all(line.endswith("/device:GPU:2") for line in lines)


def test_devices_compute_at_the_same_time_on_their_own_cores(inventory: Inventory) -> None:
    """Each part waits for the other in the middle: it would never end if they ran one after the other."""
    inventory.configure("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
    meeting = threading.Barrier(2, timeout=30)
    seen: dict[str, tuple[set[int], int]] = {}

    @torch.library.custom_op("stratagem_tests::meet", mutates_args=())
    def meet(x: torch.Tensor) -> torch.Tensor:
        meeting.wait()
        seen[threading.current_thread().name] = (
            os.sched_getaffinity(threading.get_native_id()),
            torch.get_num_threads(),
        )
        return x + 1

    meet.register_fake(lambda x: x)
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [])
        with sg.device("/cpu:0"):
            one = meet(x)
        with sg.device("/cpu:1"):
            two = meet(x)
    threads = torch.get_num_threads()
    with sg.Session(graph) as session:
        assert [each.item() for each in session.run([one, two], {x: 1.0})] == [2.0, 2.0]
        for device in inventory.logical("CPU"):
            assert seen[f"stratagem-session{device.name}"] == (set(device.cores), device.num_threads)
    assert torch.get_num_threads() == threads


# Settings


def test_missing_device_is_an_error_or_falls_back() -> None:
    with sg.Graph() as graph, sg.device("/gpu:7"):
        c = sg.constant([1.0]) + 1
    with (
        sg.Session(graph, config=sg.SessionConfig(allow_soft_placement=False)) as session,
        pytest.raises(
            DeviceNotFoundError, match=r"Const was placed on '/device:GPU:7', but .*gpu:0, gpu:1, gpu:2, gpu:3"
        ),
    ):
        session.run(c)
    with sg.Session(graph, config=sg.SessionConfig(allow_soft_placement=True)) as session:
        with pytest.warns(PlacementWarning, match="what is placed there runs on /device:GPU:3"):
            assert session.run(c).item() == 2.0
        assert session._placer.where(c.node).device == "/device:GPU:3"


def test_device_of_another_task_needs_a_cluster() -> None:
    with sg.Graph() as graph, sg.device("/job:worker/task:1"):
        c = sg.constant(1.0)
    with (
        sg.Session(graph) as session,
        pytest.raises(DeviceNotFoundError, match=r"Make it on a cluster: sg.Session\(serv"),
    ):
        session.run(c)


def test_session_runs_inside_the_block_of_a_graph_and_of_a_scope() -> None:
    weight = torch.ones(2, requires_grad=True)
    with sg.Graph() as graph, sg.device("/gpu:1"):
        x = sg.placeholder(torch.float32, [2])
        with torch.no_grad():
            weight.add_(x)
        num_nodes = len(graph.nodes)
        with sg.Session(graph) as session:
            session.run(graph.updates, {x: [1.0, 2.0]})
    assert weight.tolist() == [2.0, 3.0]
    assert len(graph.nodes) == num_nodes


def test_model_is_the_programs_again_after_the_block_that_has_recorded_its_training() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = model.weight.detach().clone()
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2, 3])
        loss = model(x).sum()
        loss.backward()
        with graph:
            optimizer.step()
        gradient = model.weight.grad
    assert model.weight.grad is None  # not one of the graph, which later steps would add to and never apply
    value = torch.ones(2, 3)
    with sg.Session(graph) as session:
        assert session.run([gradient, graph.updates], {x: value})[0].tolist() == [[2.0] * 3]
    model(value).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), start - 0.4)


def test_memory_of_gpus_is_limited(inventory: Inventory) -> None:
    inventory.simulate("GPU", 2, memory_limit=16)
    with sg.Graph() as graph, sg.device("/gpu:1"):
        large = sg.get_variable("large", [5 * 2**20], initializer=torch.nn.init.zeros_)
    with (
        sg.Session(graph) as session,
        pytest.raises(sg.OutOfMemoryError, match=r"large .* asks for 20 MiB, 0 MiB of 16"),
    ):
        session.run(large)
    with sg.Graph() as graph, sg.device("/gpu:1"):
        x = sg.placeholder(torch.float32, [2**20])
        y = torch.cat([x, x], 0)
    config = sg.SessionConfig()
    with sg.Session(graph, config=config) as session:
        assert session.run(y, {x: torch.ones(2**20)}).shape == (2**21,)
    config.gpu_options.per_process_gpu_memory_fraction = 0.5
    with (
        sg.Session(graph, config=config) as session,
        pytest.raises(
            sg.OutOfMemoryError, match=r"task:0/device:GPU:1: ConcatV2 .* asks for 8 MiB, 4 MiB of 8 MiB are"
        ),
    ):
        session.run(y, {x: torch.ones(2**20)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (sg.SessionConfig(log_device_placement="yes"), "log_device_placement is True or False, got 'yes'"),  # type: ignore[arg-type]
        (
            sg.SessionConfig(gpu_options=sg.GPUOptions(per_process_gpu_memory_fraction=1.5)),
            "above 0 and at most 1, got 1.5",
        ),
        (sg.SessionConfig(gpu_options=sg.GPUOptions(allow_growth=1)), "allow_growth is True or False, got 1"),  # type: ignore[arg-type]
        ("all", "the settings of a session are sg.SessionConfig"),
        (sg.SessionConfig(gpu_options=sg.GPUOptions(visible_device_list="0;1")), "is a text such as '0,2', got '0;1'"),
        (sg.SessionConfig(gpu_options=sg.GPUOptions(visible_device_list="1,1")), "names each GPU once, got '1,1'"),
        (sg.SessionConfig(gpu_options=sg.GPUOptions(visible_device_list="1,7")), "names GPU 7; there are 4, numbered"),
        (sg.SessionConfig(device_count={"GPX": 1}), "unknown kind of device 'GPX'.*Did you mean 'gpu'"),
        (sg.SessionConfig(device_count={"CPU": 0}), r"device_count\['CPU'\] is a number from 1 to 1024, got 0"),
        (sg.SessionConfig(device_count=[1]), r"device_count is a dict such as \{'GPU': 1\}, got \[1\]"),  # type: ignore[arg-type]
        (sg.SessionConfig(intra_op_parallelism_threads=-1), "intra_op_parallelism_threads is a number from 0 to"),
        (sg.SessionConfig(inter_op_parallelism_threads=True), "inter_op_parallelism_threads is a number from 0 to"),
        (sg.SessionConfig(isolate_session_state=1), "isolate_session_state is True or False, got 1"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(config: sg.SessionConfig, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        sg.Session(sg.Graph(), config=config)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: setattr(sg.SessionConfig(), "log_device_placment", True), "did you mean 'log_device_placement'"),
        (lambda: sg.SessionConfig(alow_soft_placement=True), "no setting .*; did you mean 'allow_soft_placement'"),  # type: ignore[call-arg]
        (lambda: sg.GPUOptions(per_process_gpu_memory=0.4), "did you mean 'per_process_gpu_memory_fraction'"),  # type: ignore[call-arg]
        (lambda: setattr(sg.GPUOptions(), "x", 1), "'x'; it has allow_growth, per_process_gpu_memory_fraction, vis"),
        (lambda: setattr(sg.SessionConfig(), "graph_options", 1), "TensorFlow's has no counterpart here, leave it out"),
    ],
)
def test_setting_that_does_not_exist_is_refused_with_a_suggestion(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(DeviceConfigurationError, match=message):
        call()


def device_names(config: sg.SessionConfig) -> list[str]:
    """The physical devices behind the first two of each kind, where the session has them."""
    found = []
    for name in ("/gpu:0", "/gpu:1", "/cpu:0", "/cpu:1"):
        with sg.Graph() as graph, sg.device(name):
            one = sg.constant(1.0) + 1
        with sg.Session(graph, config=config) as session:
            try:
                assert session.run(one).item() == 2.0
            except DeviceNotFoundError:
                continue
            logical = next(iter(session._fleet._threads.values())).device.logical  # type: ignore[attr-defined]
            found.append(f"{name} is {logical.physical.device_type}:{logical.physical.index}")
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (sg.SessionConfig(), ["/gpu:0 is GPU:0", "/gpu:1 is GPU:1", "/cpu:0 is CPU:0"]),
        (
            sg.SessionConfig(gpu_options=sg.GPUOptions(visible_device_list="2, 0")),
            ["/gpu:0 is GPU:2", "/gpu:1 is GPU:0", "/cpu:0 is CPU:0"],
        ),
        (
            sg.SessionConfig(device_count={"gpu": 1}, gpu_options=sg.GPUOptions(visible_device_list="3,1")),
            ["/gpu:0 is GPU:3", "/cpu:0 is CPU:0"],
        ),
        (sg.SessionConfig(device_count={"GPU": 0, "CPU": 2}), ["/cpu:0 is CPU:0", "/cpu:1 is CPU:0"]),
        (sg.SessionConfig(device_count={"GPU": 9}), ["/gpu:0 is GPU:0", "/gpu:1 is GPU:1", "/cpu:0 is CPU:0"]),
    ],
)
def test_session_has_the_devices_of_its_settings(config: sg.SessionConfig, expected: list[str]) -> None:
    assert device_names(config) == expected


def test_thread_options_hold() -> None:
    """Operations compute with so many threads, and so many devices at the same time."""
    graph, _, total = three_products()
    config = sg.SessionConfig(intra_op_parallelism_threads=3, inter_op_parallelism_threads=1)
    with sg.Session(graph, config=config) as session:
        session.run(total)
        threads = session._fleet._threads.values()  # type: ignore[attr-defined]
        assert [each.device.logical.num_threads for each in threads] == [3] * 4
        at_once, most, lock = 0, 0, threading.Lock()

        def work() -> None:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            torch.ones(100, 100) @ torch.ones(100, 100)
            with lock:
                at_once -= 1

        ended = threading.Semaphore(0)
        for each in [*threads] * 5:
            each.do(work, lambda _: ended.release())
        for _ in range(20):
            ended.acquire()
        assert most == 1


# Wrong input


@pytest.fixture
def doubled() -> tuple[sg.Graph, torch.Tensor, torch.Tensor]:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2, 3], name="x")
        return graph, x, x * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3, 2), r"'x' takes shape \(2, 3\), it was fed one of shape \(3, 2\)"),
        (
            torch.ones(2, 3, dtype=torch.float64),
            r"'x' takes values of type float32, it was fed float64; convert them with",
        ),
        (torch.ones(2, 3).to_sparse(), "'x' takes a dense tensor in memory, it was fed one that is not dense"),
        (torch.ones(2, 3, device="meta"), "it was fed one that has no values"),
        (np.ones((2, 3)), "'x' takes values of type float32, it was fed float64"),
        (np.array([["a"] * 3] * 2, dtype=object), r"'x' takes \(2, 3\) float32, it was fed array"),
        ("text", "it was fed 'text', which is not a tensor"),
        (None, "it was fed None"),
    ],
)
def test_wrong_feed_is_named(doubled: tuple[sg.Graph, torch.Tensor, torch.Tensor], value: object, message: str) -> None:
    graph, x, y = doubled
    with sg.Session(graph) as session, pytest.raises(FeedError, match=message):
        session.run(y, {x: value})


def test_feeds_may_be_arrays_numbers_and_names(doubled: tuple[sg.Graph, torch.Tensor, torch.Tensor]) -> None:
    graph, _, y = doubled
    with sg.Session(graph) as session:
        for value in (np.ones((2, 3), np.float32), [[1, 1, 1], [1, 1, 1]], torch.ones(2, 3)):
            assert session.run(y, {"x:0": value}).tolist() == [[2.0] * 3] * 2


def test_placeholder_that_is_not_fed_is_named(doubled: tuple[sg.Graph, torch.Tensor, torch.Tensor]) -> None:
    graph, _, y = doubled
    with (
        sg.Session(graph) as session,
        pytest.raises(
            FeedError, match=r"placeholder 'x' \(\(2, 3\) float32, made at test_session.py:\d+\) is needed and"
        ),
    ):
        session.run(y)


def test_fetch_of_something_else_is_refused(doubled: tuple[sg.Graph, torch.Tensor, torch.Tensor]) -> None:
    graph, x, _ = doubled
    with sg.Graph():
        other = sg.constant(1.0)
    with sg.Session(graph) as session:
        for fetch, message in (
            (other, "is not part of this session's graph"),
            (torch.ones(2), "is not part of this session's graph"),
            ("Mull", "there is no 'Mull' in the graph; did you mean 'Mul'"),
            (3, "only tensors of the graph"),
        ):
            with pytest.raises(GraphError, match=message):
                session.run([fetch], {x: torch.ones(2, 3)})


def test_closed_session_says_where(doubled: tuple[sg.Graph, torch.Tensor, torch.Tensor]) -> None:
    graph, x, y = doubled
    session = sg.Session(graph)
    session.run(y, {x: torch.ones(2, 3)})
    session.close()
    session.close()
    with pytest.raises(SessionError, match=r"the session was closed at .*test_session.py:\d+; make a new one"):
        session.run(y, {x: torch.ones(2, 3)})


def test_devices_cannot_be_changed_while_a_session_is_open(inventory: Inventory) -> None:
    session = sg.Session(sg.Graph())
    with pytest.raises(DevicesInUseError, match=r"Session\(\) at .*test_session.py"):
        inventory.simulate("GPU", 2)
    session.close()
    inventory.simulate("GPU", 2)


def test_forgotten_session_ends_its_threads() -> None:
    graph, _, total = three_products()
    session = sg.Session(graph)
    session.run(total)
    assert any(thread.name.startswith("stratagem-session") for thread in threading.enumerate())
    del session  # the guard of all tests looks for its threads


def test_ctrl_c_ends_a_run_and_the_session_goes_on() -> None:
    begun = threading.Event()
    stop = threading.Event()

    @torch.library.custom_op("stratagem_tests::linger", mutates_args=())
    def linger(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        stop.wait(30)
        return x + 1

    linger.register_fake(lambda x: x)
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [])
        w = sg.get_variable("w", initializer=0.0)
        slow = sg.assign(w, linger(x) + 1)

    def interrupt() -> None:
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        stop.set()

    thread = threading.Thread(target=interrupt)
    with sg.Session(graph) as session:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            session.run(slow, {x: 1.0})
        thread.join()
        assert session.run(w).item() == 0.0
