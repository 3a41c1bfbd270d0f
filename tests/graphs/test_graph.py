"""Operations of torch are recorded with their shapes, names and devices, and nothing is computed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.errors import FeedError, GraphError, GraphTypeError, StratagemWarning, StrategyError
from stratagem.graphs.nodes import NodeKind
from tests.placement.conftest import two_products


@pytest.fixture(autouse=True)
def fresh_default_graph() -> Iterator[None]:
    sg.reset_default_graph()
    yield
    sg.reset_default_graph()


def names(graph: sg.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def devices(graph: sg.Graph) -> dict[str, str]:
    return {node.name: str(node.spec) for node in graph.nodes}


def test_graph_is_entered_as_tensorflow_writes_it() -> None:
    graph = sg.Graph()
    with graph.as_default() as entered:
        doubled = sg.constant(torch.ones(2)) * 2
    assert entered is graph
    assert sg.Session(graph).run(doubled).tolist() == [2.0, 2.0]


def test_graph_names_and_places_what_it_records() -> None:
    graph, total = two_products("/gpu:2", "/device:GPU:3")
    assert names(graph) == ["Const", "Const_1", "MatMul", "Const_2", "Const_3", "MatMul_1", "AddN"]
    assert devices(graph)["MatMul_1"] == "/device:GPU:3"
    assert devices(graph)["AddN"] == "/device:CPU:0"
    assert (tuple(total.shape), total.dtype) == ((2, 2), torch.float32)


def test_names_are_those_that_were_given() -> None:
    with sg.Graph() as graph:
        a = sg.constant(1.0, name="a")
        x = sg.placeholder(torch.int64, [2], name="x")
        w = sg.get_variable("w", [3])
        total = sg.add_n([a, a], name="total")
    assert names(graph) == ["a", "x", "w", "total"]
    assert [each.op_name for each in (a, x, w, total)] == names(graph)
    assert graph.get_tensor_by_name("total:0").op_name == "total"


def test_python_operators_modules_and_functions_have_the_shapes_that_torch_gives() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))
    value = torch.randn(2, 3, 8, 8)
    with sg.Graph():
        x = sg.placeholder(torch.float32, [2, 3, 8, 8])
        made = [
            model(x),
            1 - x / 2 + x**2,
            x[0, :, ::2],
            x.mean((1, 2)),
            torch.softmax(x, 1).argmax(-1),
            torch.cat([x, x]),
        ]
        attended = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    expected = [
        model(value),
        1 - value / 2 + value**2,
        value[0, :, ::2],
        value.mean((1, 2)),
        torch.softmax(value, 1).argmax(-1),
        torch.cat([value, value]),
    ]
    assert [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in expected]
    assert attended.shape == value.shape


def test_parameters_become_variables_and_other_tensors_constants() -> None:
    layer = torch.nn.Linear(3, 2)
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [4, 3])
        inside = torch.nn.Linear(2, 2)  # filling its weights is no part of the graph
        y = inside(layer(x)) + torch.ones(2)
    kinds = [node.kind for node in graph.nodes]
    assert kinds.count(NodeKind.VARIABLE) == 4
    assert kinds.count(NodeKind.CONSTANT) == 1
    assert {id(node.tensor) for node in graph.variables} == {
        id(each) for module in (layer, inside) for each in module.parameters()
    }
    assert y.requires_grad


def test_what_concerns_no_tensor_of_the_graph_is_computed_at_once() -> None:
    with sg.Graph() as graph:
        value = torch.arange(4.0).sum()
        assert value.item() == 6
    assert names(graph) == []


def test_gradients_run_where_their_operations_run() -> None:
    with sg.Graph() as graph:
        with sg.device("/gpu:0"):
            w = sg.get_variable("w", [3, 3])
            hidden = torch.tanh(w @ w)
        with sg.device("/gpu:1"):
            loss = (hidden * 2).sum()
        before = len(graph.nodes)
        with sg.device("/cpu:0"):
            (gradient,) = torch.autograd.grad(loss, [w])
    assert gradient.shape == (3, 3)
    found = {node.type: str(node.spec) for node in graph.nodes[before:]}
    assert found["TanhBackward"] == found["MatMul"] == "/device:GPU:0"
    assert found["Mul"] == "/device:GPU:1"


def test_device_function_sees_the_operations_of_a_graph() -> None:
    def choose(operation: sg.placement.Operation) -> str | None:  # type: ignore[name-defined]
        return "/gpu:1" if operation.type == "MatMul" else None

    with sg.Graph() as graph, sg.device("/cpu:0"), sg.device(choose):
        a = sg.constant([[1.0]])
        a @ a
    assert devices(graph) == {"Const": "/device:CPU:0", "MatMul": "/device:GPU:1"}


def test_default_graph_takes_what_is_recorded_outside_of_any_block() -> None:
    with sg.device("/gpu:7"):  # which does not exist, and need not until it is run
        a = sg.constant([1.0, 2.0])
        b = a * 2
    assert names(sg.get_default_graph()) == ["Const", "Mul"]
    assert devices(sg.get_default_graph())["Mul"] == "/device:GPU:7"
    assert b.shape == (2,)


def test_in_place_change_is_seen_by_parts_that_were_taken_before() -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2, 2])
        y = x * 1
        row = y[0]
        y.add_(10)
        result = row + 0
    with sg.Session(graph) as session:
        assert session.run(result, {x: [[1.0, 2.0], [3.0, 4.0]]}).tolist() == [11.0, 12.0]


def test_shapes_that_do_not_fit_are_refused_where_they_are_written() -> None:
    with sg.Graph() as graph:
        a = sg.placeholder(torch.float32, [2, 3])
        with pytest.raises(GraphError, match=r"MatMul cannot be recorded for \(2, 3\) float32, \(2, 3\) float32"):
            a @ a
        with pytest.raises(
            GraphError, match=r"add_n takes tensors of one shape and type, got \(2, 3\) float32 and \(3, 2\)"
        ):
            sg.add_n([a, a.T])
    assert "MatMul" not in names(graph)


@pytest.mark.parametrize(
    "needs_a_value",
    [bool, float, lambda x: x.item(), lambda x: x.numpy(), lambda x: x.tolist(), lambda x: torch.equal(x, x)],
)
def test_code_that_needs_a_value_is_told_to_run_a_session(needs_a_value: object) -> None:
    with sg.Graph():
        x = sg.placeholder(torch.float32, [])
        with pytest.raises(
            GraphError, match="needs the value of 'Placeholder', which is computed when the graph is run"
        ):
            needs_a_value(x)  # type: ignore[operator]


def test_shape_that_depends_on_values_is_refused() -> None:
    with sg.Graph():
        x = sg.placeholder(torch.float32, [3])
        with pytest.raises(GraphError, match="its shape depends on values"):
            x[x > 0]


def test_change_of_a_part_is_refused_by_name() -> None:
    with sg.Graph():
        x = sg.placeholder(torch.float32, [3, 3])
        y = x + 1
        with pytest.raises(GraphError, match="in place, which is part of 'Add:0'"):
            y[0] = 2.0


def test_changes_of_parts_without_gradients_change_the_whole_and_all_other_parts() -> None:
    def change(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 1
        row, column = y[1], y.T[2]
        y[0] = 5.0
        y[1:, 1:3].mul_(10)
        row.add_(1)
        column.fill_(-1)
        y.view(12)[11] = 99.0
        y.permute(1, 0).unsqueeze(0)[0, 0, 2] = 77.0
        return [y, row, column]

    value = torch.arange(12.0).view(3, 4)
    with sg.Graph() as graph, torch.no_grad():
        x = sg.placeholder(torch.float32, [3, 4])
        changed = change(x)
        w = sg.get_variable("w", initializer=torch.zeros(2, 4))
        w[0] = x[1]
        with pytest.raises(GraphError, match=r"Diagonal changes .* in place, which is part of"):
            (x * 1).diagonal().mul_(2)
    with sg.Session(graph) as session:
        torch.testing.assert_close(session.run(changed, {x: value}), change(value))
        session.run(graph.updates, {x: value})
        assert session.run(w).tolist() == [[4.0, 5.0, 6.0, 7.0], [0.0] * 4]


def test_tensors_of_the_program_are_changed_whole_or_not_at_all() -> None:
    parameter, buffer = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, 2)
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2])
        inside = torch.zeros(2)
        inside += x  # is new in every run
        parameter.data.add_(inside)
        with pytest.raises(
            GraphError, match=r"a part \(2,\) float32 of a tensor of the program would be changed in place"
        ):
            buffer[0] += x
    with sg.Session(graph) as session:
        for _ in range(3):
            session.run(graph.updates, {x: [1.0, 2.0]})
    assert parameter.tolist() == [3.0, 6.0]
    assert buffer.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def linear_loss() -> tuple[Any, Any, Any]:
    """A placeholder, a variable and a loss of both."""
    x = sg.placeholder(torch.float32, [None, 3])
    w = sg.get_variable("w", [3, 1], initializer=torch.nn.init.ones_)
    return x, w, (x @ w).square().mean()


def test_step_of_an_optimizer_is_fetched_as_updates_of_the_graph_and_never_as_none() -> None:
    with sg.Graph() as graph:
        x, w, loss = linear_loss()
        optimizer = torch.optim.SGD([w], lr=0.1)
        loss.backward()
        train = optimizer.step()  # type: ignore[func-returns-value]
    with sg.Session(graph) as session:
        for fetch in (train, [loss, train], {"train": train}):
            with pytest.raises(
                GraphTypeError, match=r"None cannot be fetched\. .* session\.run\(\[loss, graph\.updates"
            ):
                session.run(fetch, {x: torch.ones(4, 3)})
        losses = [session.run([loss, graph.updates], {x: torch.ones(4, 3)})[0].item() for _ in range(3)]
    torch.testing.assert_close(losses, [9.0, 1.44, 0.2304])


def test_session_that_never_takes_a_recorded_step_says_so_when_it_ends() -> None:
    with sg.Graph() as graph:
        x, w, loss = linear_loss()
        loss.backward()
        torch.optim.SGD([w], lr=0.1).step()
    fed = {x: torch.ones(4, 3)}
    session = sg.Session(graph)
    session.run(loss, fed)
    session.run(loss, fed)
    with pytest.warns(StratagemWarning, match=r"recorded a step of SGD at .*test_graph.*2 runs.*graph\.updates"):
        session.close()
    for fetches in ([loss], [loss, [loss, graph.updates]]):  # one look at the loss, or a training: no word
        with sg.Session(graph) as session:
            for fetch in fetches:
                session.run(fetch, fed)
    with sg.Session(graph) as session:  # which only evaluates what another one has trained
        session.run(loss, fed)
        session.run(loss, fed)


@pytest.mark.parametrize("of_module", [False, True])
@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.Adagrad,
    ],
)
def test_optimizer_whose_state_a_graph_would_forget_is_refused(make: Any, in_block: bool, of_module: bool) -> None:
    sg.reset_default_graph()
    try:
        with sg.Graph() if in_block else contextlib.nullcontext():
            x, w, loss = linear_loss()
            model = torch.nn.Linear(3, 1)
            loss = model(x).square().mean() if of_module else loss
            optimizer = make(model.parameters() if of_module else [w])
            loss.backward()
            with pytest.raises(GraphError, match=r"keeps state from step to step.*sg\.trace.*torch\.autograd\.grad"):
                optimizer.step()
    finally:
        sg.reset_default_graph()


def test_optimizer_of_the_program_steps_while_a_graph_is_open() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    before = model.weight.detach().clone()
    with sg.Graph():
        linear_loss()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_two_graphs_do_not_mix() -> None:
    with sg.Graph():
        a = sg.constant(1.0)
    with sg.Graph():
        b = sg.constant(2.0)
    with pytest.raises(GraphError, match="two graphs"):
        a + b
    with sg.Graph(), pytest.raises(GraphError, match="'Const' belongs to another graph than the one that is open"):
        a + 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: sg.placeholder("float31", [2]), "a tensor of a graph has a type of torch"),  # type: ignore[arg-type]
        (lambda: sg.placeholder(torch.float32, [None, -3]), "a shape is a list of whole numbers from 0 up"),  # type: ignore[list-item]
        (lambda: sg.constant(object()), "numbers, lists of them, arrays and tensors can be in a graph"),
        (
            lambda: sg.constant([1.0, 2.0, 3.0], shape=[2, 2]),
            r"a constant of shape \(2, 2\) cannot hold \(3,\) float32",
        ),
        (lambda: sg.get_variable("v"), "variable 'v' needs a shape, or a value"),
        (lambda: sg.get_variable("v", [2], initializer="ones"), "is a function that fills a tensor"),  # type: ignore[arg-type]
        (lambda: sg.get_variable("v:0", [2]), "a name is a text without colons"),
        (lambda: sg.assign(sg.constant(1.0), 2.0), "only a variable can be assigned"),
        (lambda: sg.assign(sg.get_variable("v", [2]), [1.0, 2.0, 3.0]), r"it cannot become \(3,\) float32"),  # type: ignore[arg-type]
        (lambda: sg.add_n([]), "a list of one tensor or more"),
        (lambda: sg.add_n(None), "a list of one tensor or more, got None"),  # type: ignore[arg-type]
        (lambda: sg.constant(nested()), r"can be in a graph, got \[\[\["),
        (lambda: [sg.get_variable("v", [2]) for _ in range(2)], "has a variable 'v' already"),
        (lambda: sg.trace(3), "a function is traced, got 3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(wrong: object, message: str) -> None:
    with sg.Graph(), pytest.raises((GraphError, GraphTypeError), match=message):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    "shape", [(2**62,), (2**40, 2**40), (2**70,), (2**62, None), "x", "", (-5,), (2.5,), (True,), [[1]], {1: 2}, None]
)
def test_shapes_that_are_none(shape: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: sg.placeholder(torch.float32, shape),
        lambda: sg.TensorSpec(shape),
        lambda: sg.get_variable("v", shape),
    ]
    for call in calls:
        with (
            sg.Graph(),
            pytest.raises(GraphTypeError, match=r"a shape is a list|at most 2\*\*58 elements|needs a shape"),
        ):
            call()


@pytest.mark.parametrize("dtype", ["x", "nn", "float31", None, 3, float, torch.Tensor, np.str_, np.datetime64])
def test_types_that_are_none(dtype: Any) -> None:
    calls: list[Callable[[], object]] = [lambda: sg.placeholder(dtype, [2]), lambda: sg.TensorSpec([2], dtype)]
    for call in calls:
        with sg.Graph(), pytest.raises(GraphTypeError, match=r"has a type of torch, such as torch\.float32, got"):
            call()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float", torch.float32),
        ("int64", torch.int64),
        (np.float32, torch.float32),
        (np.dtype("float64"), torch.float64),
        (np.bool_, torch.bool),
    ],
)
def test_types_may_be_names_and_those_of_numpy(given: Any, expected: torch.dtype) -> None:
    with sg.Graph():
        made = [sg.placeholder(given, [2]), sg.get_variable("w", [2], given), sg.constant(1, given)]
    assert [each.dtype for each in made] == [expected] * 3
    assert sg.TensorSpec([2], given).dtype is expected


def test_nestings_without_end_are_refused() -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2])
    with sg.Session(graph) as session:
        with pytest.raises(FeedError, match=r"it was fed \[\[\[.*, which is not a tensor"):
            session.run(x, {x: nested()})
        with pytest.raises(StrategyError, match="a nesting of values is at most 200 deep"):
            session.run(nested())


def nested() -> list[Any]:
    made: list[Any] = []
    for _ in range(10_000):
        made = [made]
    return made


def test_block_left_by_an_error_records_no_longer() -> None:
    graph = sg.Graph()
    with pytest.raises(ZeroDivisionError), graph:
        raise ZeroDivisionError
    sg.constant(1.0)
    assert names(graph) == []
    assert names(sg.get_default_graph()) == ["Const"]
