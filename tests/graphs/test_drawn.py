"""Random numbers of a graph's block: drawn anew in each run, as in TensorFlow; values for the program besides."""

from collections.abc import Callable

import pytest
import torch

import stratagem as sg
from stratagem.errors import GraphError
from stratagem.graphs.nodes import NodeKind


def twice(graph: sg.Graph, fetch: torch.Tensor) -> list[torch.Tensor]:
    with sg.Session(graph) as session:
        return [session.run(fetch), session.run(fetch)]


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(40),
    "randn": lambda: torch.randn(4, 10),
    "randint": lambda: torch.randint(1000, (40,)),
    "randperm": lambda: torch.randperm(40),
    "normal": lambda: torch.normal(0.0, 1.0, (40,)),
    "like": lambda: torch.rand_like(torch.zeros(40)),
    "of constants": lambda: torch.bernoulli(torch.full((100,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(40), 40),
    "of numbers": lambda: (torch.rand(40) * 2 - 1).abs().reshape(4, 10),
    "one of several": lambda: torch.rand(40).split(20)[1],
    "in place": lambda: torch.empty(40).normal_(),
    "changed in place": lambda: torch.rand(40).mul_(2).add_(torch.rand(40)),
    "copied": lambda: torch.zeros(40).copy_(torch.rand(40)),
    "filled": lambda: torch.nn.init.uniform_(torch.empty(40)),
    "dropped": lambda: torch.nn.functional.dropout(torch.ones(100)),
    "detached": lambda: torch.rand(40).detach(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_are_drawn_in_each_run(draw: Callable[[], torch.Tensor]) -> None:
    with sg.Graph() as graph:
        numbers = draw()
        used = numbers + sg.constant(0)
    first, second = twice(graph, used)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    expected = draw()
    torch.manual_seed(7)
    torch.testing.assert_close(twice(graph, used)[0], expected)
    one, two = twice(graph, numbers)  # fetched as it is
    assert one.shape == numbers.shape
    assert not torch.equal(one, two)


def test_one_draw_is_one_in_a_run_and_order_is_that_of_the_program() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch.rand(5), torch.rand(5)
        return x * second - second, x * second + first

    with sg.Graph() as graph:
        outputs = program(sg.constant(1.0))
    with sg.Session(graph) as session:
        torch.manual_seed(3)
        found = session.run(outputs)
    torch.manual_seed(3)
    torch.testing.assert_close(found, program(torch.tensor(1.0)))


@pytest.mark.usefixtures("gpus")
def test_what_is_made_without_inputs_is_placed_by_the_scope_around_it() -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [3])
        with sg.device("/gpu:1"):
            noise, ones, doubled = torch.rand(3), torch.ones(3), torch.arange(3.0) * 2
        with sg.device("/gpu:0"):
            total = x + noise + ones + doubled
    made = {node.type: str(node.spec) for node in graph.nodes if node.kind is not NodeKind.PLACEHOLDER}
    assert made == {"RandomUniform": "/device:GPU:1", "Const": "/device:GPU:1", "Add": "/device:GPU:0"}
    with sg.Session(graph) as session:
        found = session.run(total, {x: torch.zeros(3)})
    assert ((found >= torch.arange(3) * 2 + 1) & (found < torch.arange(3) * 2 + 2)).all()


def test_log_says_where_numbers_were_drawn() -> None:
    with sg.Graph() as graph:
        numbers = torch.rand(3)
        later = numbers + sg.constant(1.0)
    (node,) = [each for each in graph.nodes if each.type == "RandomUniform"]
    assert node.line.startswith("test_drawn.py:")
    assert node.number < later.node.number  # type: ignore[attr-defined]


def test_program_has_the_numbers_as_values_too() -> None:
    with sg.Graph() as graph:
        x = sg.placeholder(torch.float32, [2])
        y = x * 2
        order = torch.randperm(5)
        assert sorted(order.tolist()) == [0, 1, 2, 3, 4]
        with sg.Session(graph) as session:
            fed = torch.rand(2)
            torch.testing.assert_close(session.run(y, {x: fed}), fed * 2)
    assert [node.name for node in graph.nodes] == ["Placeholder", "Mul"]


def test_weights_buffers_and_constants_keep_their_numbers() -> None:
    class Features(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(3))
            self.register_buffer("phase", torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.phase

    with sg.Graph() as graph:
        features = Features()
        kept = sg.constant(torch.rand(3))
        started = sg.get_variable("started", initializer=torch.rand(3))
        total = features(kept) + started
    first, second = twice(graph, total)
    torch.testing.assert_close(first, second)


def test_assigned_numbers_are_drawn_in_each_run() -> None:
    with sg.Graph() as graph:
        w = sg.get_variable("w", [4])
        update = sg.assign(w, torch.rand(4))
    first, second = twice(graph, update)
    assert not torch.equal(first, second)


def test_gradients_meet_the_numbers_of_their_run() -> None:
    with sg.Graph() as graph:
        w = sg.get_variable("w", initializer=torch.ones(4))
        noise = torch.rand(4)
        (gradient,) = torch.autograd.grad((w * noise).sum(), [w])
    with sg.Session(graph) as session:
        found, drawn = session.run([gradient, noise])
    torch.testing.assert_close(found, drawn)


def test_traced_function_draws_in_each_run() -> None:
    traced = sg.trace(lambda x: (x + torch.rand(3), torch.rand(3)), torch.zeros(3))
    with sg.Session(traced.graph) as session:
        first, second = (session.run(traced, traced.feed(torch.zeros(3))) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_a_generator_goes_on_from_run_to_run() -> None:
    generator = torch.Generator().manual_seed(5)
    with sg.Graph() as graph:
        numbers = torch.rand(3, generator=generator) + sg.constant(0.0)
    generator.manual_seed(5)
    found = twice(graph, numbers)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(torch.cat(found), expected)


def written_in_part() -> torch.Tensor:
    numbers = torch.zeros(3, 3)
    numbers[0] = torch.rand(3)
    return numbers


def written_into_another() -> torch.Tensor:
    return torch.rand(3, out=torch.empty(3))


def made_of_what_changed() -> torch.Tensor:
    scale = torch.ones(3)
    numbers = torch.rand(3) * scale
    scale.zero_()
    return numbers


def of_unknown_shape() -> torch.Tensor:
    numbers = torch.rand(30)
    return numbers[numbers > 0.5]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (written_in_part, "random numbers were written into it in a way that a graph does not record"),
        (written_into_another, "random numbers were written into it in a way that a graph does not record"),
        (made_of_what_changed, "the tensor that it was computed from was changed in place later"),
        (of_unknown_shape, "its shape depends on values"),
    ],
)
def test_numbers_that_cannot_be_drawn_again_are_refused(draw: Callable[[], torch.Tensor], message: str) -> None:
    with sg.Graph():
        numbers = draw()
        with pytest.raises(GraphError, match=message):
            numbers.sum() + sg.constant(0.0)
