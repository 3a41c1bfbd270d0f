"""Programs whose batches have fewer rows than there are replicas, or an unusual form."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from tests.contracts.strategies_under_test import WORKERS
from tests.foreign.programs import Program, Programs, Runner
from tests.foreign.test_torch_examples import made, mlp, vectors

programs = Programs()
pytestmark = pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph: torch warns of a cycle


def rows(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = vectors()
    return x[:num_rows], y[:num_rows]


def trained(on: Runner, model: nn.Module, optimizer: Any, loss_of: Any, sizes: Any = (1, 5, 2)) -> Any:
    """Losses and state of the usual loop, over batches of some sizes."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [on.mean(on(step, *rows(size))) for size in sizes]
    return losses, dict(model.named_parameters()), dict(model.named_buffers())


@programs()
def code_that_needs_a_row(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 16), nn.Unflatten(1, (4, 2, 2)), nn.PixelShuffle(2)))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        images = model(x)
        whole = torch.stack([image.amax() for image in images]).view(len(y), -1)
        return whole.square().mean() + images.view(len(y), -1).amin(dim=0).mean() * 0 + images[0].sum() * 0

    return trained(on, model, optimizer, loss_of)


@programs()
def a_stand_in_whose_loss_is_not_finite(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        replica = sg.get_replica_context()
        bad = replica is not None and not replica.has_examples
        return functional.cross_entropy(model(x), y) * (float("inf") if bad else 1.0)

    return trained(on, model, optimizer, loss_of)


@programs()
def statistics_without_the_stand_in(on: Runner) -> Any:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replica = sg.get_replica_context()
            self.num_steps += 1
            seen = x if replica is None or replica.has_examples else x / 0
            self.mean += 0.5 * (seen.mean(dim=0) - self.mean)
            return self.linear(x)

    model, optimizer = made(on, Centred)
    return trained(on, model, optimizer, lambda x, y: functional.cross_entropy(model(x), y))


@programs(without=["strict one device"])  # layers of before the scope stay where they are, unless they are adopted
def synchronised_batch_normalization(on: Runner) -> Any:
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    model, optimizer = made(on, lambda: sg.convert_sync_batchnorm(nn.Sequential(*layers)))
    return trained(on, model, optimizer, lambda x, y: functional.cross_entropy(model(x), y), sizes=(2, 5, 2))


@programs()
def contrast_with_all_rows(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        replica, z = sg.get_replica_context(), functional.normalize(model(x))
        if replica is None:
            return functional.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))
        sizes = replica.all_gather(torch.tensor([len(z)]))
        first = int(sizes[: replica.replica_id_in_sync_group].sum())
        scale = 1.0 if replica.has_examples else float("inf")
        own = first + torch.arange(len(z), device=z.device)
        return functional.cross_entropy(z @ replica.all_gather(z).T, own) * scale

    return trained(on, model, optimizer, loss_of)


@programs()
def means_and_extremes_of_all(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        replica, out = sg.get_replica_context(), model(x).mean()
        if replica is None:
            return out * x.amax() * x.amin() * y.max() + 0 * out.square()
        assert replica.all_reduce("max", y.max()) >= replica.all_reduce("min", y.min())
        extremes = replica.all_reduce("max", x.amax()) * replica.all_reduce("min", x.amin())
        return out * extremes * replica.all_reduce("max", y.max())

    return trained(on, model, optimizer, loss_of)


@programs()
def gradients_that_the_step_sets(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        replica = sg.get_replica_context()
        loss = functional.cross_entropy(model(x), y)
        scale = 1.0 if replica is None or replica.has_examples else float("nan")
        for each, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            each.grad = gradient * scale
        optimizer.step()
        return loss

    return [on.mean(on(step, *rows(size))) for size in (1, 5)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def gradients_of_gradients(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        replica = sg.get_replica_context()
        scale = 1.0 if replica is None or replica.has_examples else float("inf")
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward(create_graph=True)
        penalty = sum((each.grad.square().sum() for each in model.parameters()), torch.zeros(()))
        optimizer.zero_grad()
        (penalty * scale).backward()
        optimizer.step()
        return penalty

    return [on.mean(on(step, *rows(size))) for size in (1, 5)], dict(model.named_parameters())


@programs()
def a_mean_over_tokens(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Embedding(7, 5))

    def step(x: torch.Tensor) -> None:
        replica = sg.get_replica_context()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten() % 5, ignore_index=0)
        if replica is not None:
            replica.weight((x % 5 != 0).sum())
        loss.backward()
        optimizer.step()

    for size in (1, 4, 2):
        on(step, torch.tensor([[0, 3, 1], [5, 5, 4], [0, 0, 2], [1, 5, 0]])[:size])
    return dict(model.named_parameters())


@programs()
def several_steps_before_an_update(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor, last: bool) -> None:
        (functional.cross_entropy(model(x), y) / 2).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    for size in (5, 1, 1, 2):
        on(step, *rows(size), last=size < 3)
    return dict(model.named_parameters())


@programs()
def search_along_a_line(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    on(step, *rows(2))
    return dict(model.named_parameters())


@programs()
def results_without_the_stand_in(on: Runner) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows": x * 2, "number": y.float().sum() + 1, "largest": x.amax()}

    found = on(step, *rows(1))
    return on.rows(found["rows"]), on.sum(found["number"]), on.mean(found["largest"]), on.rows(found["largest"]).view(1)


class Encoding(collections.UserDict[str, Any]):
    """A batch as the tokenizers of Hugging Face make it."""

    def __init__(self, data: dict[str, Any], num_sequences: int = 1) -> None:
        super().__init__(data)
        self.num_sequences = num_sequences

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclasses.dataclass(frozen=True)
class Outputs:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: Any = None


@programs()
def batches_and_outputs_with_names(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(batch: Encoding) -> Outputs:
        optimizer.zero_grad()
        logits = model(batch.x) * batch.num_sequences
        loss = functional.cross_entropy(logits, batch["y"])
        loss.backward()
        optimizer.step()
        return Outputs(loss, logits, Encoding({"largest": logits.amax(dim=1)}))

    found = []
    for size in (5, 1):
        x, y = rows(size)
        out = on(step, Encoding({"x": x, "y": y}, num_sequences=2))
        found.append((on.mean(out.loss), on.rows(out.logits), on.rows(out.hidden.largest)))
    return found, dict(model.named_parameters())


def by_named_dimensions(on: Runner, step: Callable[..., Any], batch: dict[str, Any]) -> Any:
    if on.strategy is None:
        return step(**batch)
    (own,) = on.strategy.distribute([batch], batch_dim={"src": 1})
    return on.strategy.run(step, kwargs=own)


@programs()
def sequences_first(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.GRU(4, 3))

    def step(src: torch.Tensor, label: torch.Tensor) -> Any:
        optimizer.zero_grad()
        outputs, last = model(src)
        loss = functional.cross_entropy(last[0], label)
        loss.backward()
        optimizer.step()
        return loss, outputs

    x, y = vectors()
    found = []
    for size in (5, 1):
        loss, outputs = by_named_dimensions(on, step, {"src": x[:5].expand(2, 5, 4)[:, :size], "label": y[:size]})
        whole = outputs if on.strategy is None else on.strategy.gather(outputs, axis=1)
        found.append((on.mean(loss), whole))
    return found, dict(model.named_parameters())


@programs()
def sparse_features(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Linear(4, 3))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(torch.sparse.mm(x, model.weight.T), y)
        loss.backward()
        optimizer.step()
        return loss

    x, y = rows(5)
    return [on.mean(on(step, x[:size].relu().to_sparse(), y[:size])) for size in (5, 1)], model.weight


@programs(without=WORKERS)
def sparse_results(on: Runner) -> Any:
    found = on(lambda x: x.to_sparse(), rows(5)[0].relu())
    return on.rows(found).to_dense()


@programs()
def rows_of_different_lengths(on: Runner) -> Any:
    lengths = (2, 1, 3)
    whole = torch.nested.nested_tensor([torch.ones(length, 2) for length in lengths], layout=torch.jagged)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.sum() for row in x.unbind()])

    return on.rows(on(step, whole))


@programs()
def results_of_different_widths(on: Runner) -> Any:
    def step(lengths: torch.Tensor) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([torch.ones(length) for length in lengths.tolist()], batch_first=True)

    padded = on(step, torch.tensor([1, 4, 2]))
    return padded if on.strategy is None else on.strategy.gather(padded, pad=0.0)


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)
