"""Placeholders whose sizes are not known are fed with batches of any size, and give what torch gives."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import stratagem as sg
from stratagem.devices.inventory import Inventory
from stratagem.errors import FeedError, GraphError


@pytest.fixture(autouse=True)
def two_gpus(inventory: Inventory) -> Iterator[None]:
    inventory.simulate("GPU", 2)
    torch.manual_seed(0)
    yield
    sg.reset_default_graph()


def batch(*sizes: int | None) -> torch.Tensor:
    return sg.placeholder(torch.float32, sizes, name="x")


def last_state(layer: nn.LSTM, x: torch.Tensor) -> torch.Tensor:
    state: torch.Tensor = layer(x)[0][:, -1]
    return state


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return step


def with_gradients(model: nn.Module) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        y = last_state(model, x) if isinstance(model, nn.LSTM) else model(x)
        return [y, *torch.autograd.grad(y.sin().mean(), list(model.parameters()))]

    return compute


@pytest.mark.parametrize(
    ("compute", "shape"),
    [
        (with_gradients(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))), (1, 8, 8)),
        pytest.param(
            with_gradients(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)),
            (3, 8),
            marks=pytest.mark.xfail(
                torch.__version__ < "2.13", reason="its linear layers ask for numbers", strict=True
            ),
        ),
        (with_gradients(nn.LSTM(4, 3, batch_first=True)), (5, 4)),
        (lambda x: [x.reshape(-1, 2), x * x.shape[0], x + torch.ones(x.shape[0], 1), x[1:], x.T @ x], (4,)),
        (lambda x: [x + torch.arange(x.shape[0])[:, None], x.mean(0), torch.cat([x, x]), x.argmax(1)], (4,)),
    ],
    ids=["cnn", "transformer", "lstm", "shapes", "numbers"],
)
def test_batches_of_any_size_give_what_torch_gives(compute: Any, shape: tuple[int, ...]) -> None:
    with sg.Graph() as graph:
        x = batch(None, *shape)
        results = compute(x)
    with sg.Session(graph) as session:
        for size in (1, 2, 33):
            value = torch.randn(size, *shape)
            expected = pytree.tree_map(torch.Tensor.detach, compute(value))
            torch.testing.assert_close(session.run(results, {x: value}), expected)


def test_unknown_size_is_none_in_messages_and_any_number_in_feeds() -> None:
    with sg.Graph() as graph:
        x = batch(None, 3)
        y = x * 2
    assert repr(y) == "<GraphTensor 'Mul' (None, 3) float32>"
    with sg.Session(graph) as session:
        assert session.run(y, {x: torch.ones(0, 3)}).shape == (0, 3)
        for value in (torch.ones(2, 4), torch.ones(3)):
            with pytest.raises(FeedError, match=r"'x' takes shape \(None, 3\), it was fed one of shape"):
                session.run(y, {x: value})
        assert session.run(y + 1, {y: torch.ones(5, 3)}).shape == (5, 3)  # in place of a result


def test_towers_halve_what_comes() -> None:
    with sg.Graph() as graph:
        x = batch(None, 3)
        half = x.shape[0] // 2
        parts = []
        for index, rows in enumerate((slice(None, half), slice(half, None))):
            with sg.device(f"/gpu:{index}"):
                parts.append(x[rows].sum())
    with sg.Session(graph) as session:
        for size in (2, 5):
            assert [each.item() for each in session.run(parts, {x: torch.ones(size, 3)})] == [
                3.0 * (size // 2),
                3.0 * (size - size // 2),
            ]


def test_slices_end_where_computed_sizes_say() -> None:
    def cut(x: torch.Tensor) -> list[torch.Tensor]:
        third, half = x.shape[0] // 3, x.shape[0] // 2
        written = x + 0
        with torch.no_grad():
            written[:half] += 1
        return [x[third:half], x[half:-1], x[-half:], x[:half:2], x[100:], x[1:100], x.T[:, third:], written]

    with sg.Graph() as graph:
        x = batch(None, 3)
        results = cut(x)
    with sg.Session(graph) as session:
        for size in (2, 3, 7, 120):
            value = torch.randn(size, 3)
            torch.testing.assert_close(session.run(results, {x: value}), cut(value), rtol=0, atol=0)
        with pytest.raises(FeedError, match=r"gives \(1, 3\) for size 0 of .* = 1, where \(0, 3\)"):
            session.run(results[2], {x: torch.ones(1, 3)})  # -0 is no index from the end


@pytest.mark.parametrize("compute", [torch.nonzero, lambda x: x[x > 0], lambda x: x.unique()])
def test_sizes_that_depend_on_values_are_refused(compute: Any) -> None:
    with sg.Graph(), pytest.raises(GraphError, match="its shape depends on values"):
        compute(batch(None, 3))


def test_traced_step_trains_on_an_uneven_last_batch() -> None:
    data = [(torch.randn(size, 4), torch.randint(3, (size,))) for size in (8, 8, 3, 1)]
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [clipped_step(each, torch.optim.Adam(each.parameters(), lr=0.1)) for each in models]
    traced = sg.trace(steps[1], sg.TensorSpec([None, 4]), sg.TensorSpec([None], torch.int64))
    with sg.Session(traced.graph) as session:
        for rows in data:
            torch.testing.assert_close(session.run(traced, traced.feed(*rows)), steps[0](*rows).detach())
    torch.testing.assert_close(models[1].weight, models[0].weight, rtol=1e-4, atol=1e-5)


def test_dropout_draws_the_numbers_of_torch() -> None:
    with sg.Graph() as graph:
        x = batch(None, 4)
        y = nn.functional.dropout(x.T, 0.5)
    value = torch.ones(3, 4)
    with sg.Session(graph) as session:
        torch.manual_seed(1)
        found = session.run(y, {x: value})
    torch.manual_seed(1)
    torch.testing.assert_close(found, nn.functional.dropout(value.T, 0.5))


@pytest.mark.parametrize(
    "needs_the_number",
    [
        lambda x: [x[index] for index in range(x.shape[0])],
        lambda x: x if x.shape[0] > 3 else -x,
        lambda x: x * len(x),
        lambda x: sg.assign(sg.get_variable("w", [12, 3]), x),
        lambda x: x.split(2),
        lambda x: x + torch.ones(12, 3),
        lambda x: x + torch.ones(5, 3),
        lambda x: torch.linalg.inv(x.T @ x) if x.shape[0] == 3 else x,
    ],
)
def test_what_needs_the_number_is_refused_where_it_is_written(needs_the_number: Any) -> None:
    with sg.Graph() as graph:
        x = batch(None, 3)
        with pytest.raises(GraphError, match=r"needs the number of an unknown size|must match|cannot become"):
            needs_the_number(x)
        y = x + 1  # and the graph goes on
    with sg.Session(graph) as session:
        assert session.run(y, {x: torch.zeros(2, 3)}).tolist() == [[1.0] * 3] * 2


def test_numbers_that_do_not_fit_are_refused_when_they_are_fed() -> None:
    normalization = nn.BatchNorm1d(3)
    with sg.Graph() as graph:
        x = batch(None, 3)
        other = sg.placeholder(torch.float32, [None, 3], name="other")
        added = x + other
        pairs = x.view(x.shape[0] // 2, 2, 3)
        squeezed = x.squeeze()
        normal = normalization(x)
    two, three, one = torch.ones(2, 3), torch.ones(3, 3), torch.ones(1, 3)
    with sg.Session(graph) as session:
        for fetched, feeds, message in (
            (
                added,
                {x: two, other: three},
                r"Add \(made at test_symbolic_sizes.py:\d+\) cannot be computed for \(2, 3\) float32",
            ),
            (pairs, {x: three}, r"Reshape \(made at .*\) cannot be computed for \(3, 3\) float32: shape '\[1, 2, 3\]'"),
            (squeezed, {x: one}, r"Squeeze \(made at .*\) gives \(3,\) for size 0 of 'x' = 1, where \(1, 3\) was"),
            (normal, {x: one}, r"test_symbolic_sizes.py:\d+ takes sizes with s0 != 1 only \(s0 is size 0 of 'x'"),
        ):
            with pytest.raises(FeedError, match=message):
                session.run(fetched, feeds)
        assert session.run([added, pairs], {x: two, other: two})[1].shape == (1, 2, 3)


def test_size_of_something_that_is_not_fed_is_named() -> None:
    with sg.Graph() as graph:
        x = batch(None, 3)
        total = x.sum()
        mean = total / x.shape[0]
    with (
        sg.Session(graph) as session,
        pytest.raises(FeedError, match=r"size 0 of 'x' is needed by RealDiv .*; feed that"),
    ):
        session.run(mean, {total: 6.0})
