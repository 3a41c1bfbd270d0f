"""State that programs change themselves: parameters given other memory, optimizers' state, buffers, odd modules."""

import collections
import copy
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import observer
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.optim import swa_utils

import stratagem as sg
from tests.contracts.strategies_under_test import CPU_ROWS, alone, opened_row
from tests.foreign.programs import ROWS, Program, Programs, Runner

programs = Programs()
# On strategies in which replicas do not sum gradients too.
everywhere = Programs()
# Which connect anew after a step that fails, and the guards take that for something left behind.
CONNECTED = ("mirrored 2 torch", "mirrored 3 torch")
OTHERS = ("local sgd 2", "parameter server 2")


def batch(num_rows: int = 7, width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, width, generator=numbers), torch.randn(num_rows, 1, generator=numbers)


def linear(
    on: Runner, kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A small model with its optimizer, from the same weights each time."""
    with on.scope():
        torch.manual_seed(3)
        model = nn.Linear(3, 1)
        return model, kind(model.parameters(), **{"lr": 0.1, **options})


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


# Parameters that are given other memory


@programs()
@everywhere()
def moving_averages_swapped_in_for_a_test(on: Runner) -> Any:
    """The usual class `EMA`, whose `apply_shadow` and `restore` assign `.data`."""
    model, optimizer = linear(on)
    step = training(model, optimizer)
    shadow = {name: each.data.clone() for name, each in model.named_parameters()}
    found = []
    for _ in range(2):
        on(step, *batch())
        for name, each in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * each.data
        backup = {}
        for name, each in model.named_parameters():
            backup[name] = each.data
            each.data = shadow[name]
        found.append(on.rows(on(model, batch()[0])))
        for name, each in model.named_parameters():
            each.data = backup[name]
        found.append(on.rows(on(model, batch()[0])))
    return found, values(model), shadow


@programs()
@everywhere()
def backup_of_values_stays_what_it_was(on: Runner) -> Any:
    model, optimizer = linear(on)
    on(training(model, optimizer), *batch())
    backup, row = model.weight.data, model.weight.data[0]
    model.weight.data = torch.full((1, 3), 9.0, device=backup.device)
    found = [on.rows(on(model, batch()[0]))]
    backup[0, 0] = 5.0  # what shares memory still does
    on(training(model, optimizer), *batch())
    return found, backup, row, values(model)


@programs()
@everywhere()
def adversarial_training(on: Runner) -> Any:
    """FGM: weights are moved along the gradient for a second pass, and assigned back before the update."""
    model, optimizer = linear(on)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        backup = {}
        for name, each in model.named_parameters():
            if each.grad is not None:
                backup[name] = each.data.clone()
                each.data.add_(0.5 * torch.sign(backup[name]))
        functional.mse_loss(model(x), y).backward()
        for name, each in model.named_parameters():
            each.data = backup[name]
        optimizer.step()

    for _ in range(2):
        on(step, *batch())
    return values(model)


@programs()
@everywhere()
def vectors_become_parameters_in_a_step(on: Runner) -> Any:
    model, _ = linear(on)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(0.5 * vector + 1.0, model.parameters())
        return functional.mse_loss(model(x), y)

    losses = [on.mean(on(step, *batch())) for _ in range(2)]
    return losses, values(model)


@programs()
@everywhere()
def own_update_assigns_data(on: Runner) -> Any:
    model, _ = linear(on)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        functional.mse_loss(model(x), y).backward()
        for each in model.parameters():
            each.data = each.data - 0.1 * each.grad  # type: ignore[operator]

    for _ in range(2):
        on(step, *batch())
    return values(model)


@programs()
def assigned_after_the_update_of_a_step(on: Runner) -> Any:
    model, optimizer = linear(on, torch.optim.Adam)
    train = training(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(x, y)
        for each in model.parameters():
            each.data = each.data.clamp(-0.2, 0.2)

    for _ in range(3):
        on(step, *batch())
    return values(model)


@programs()
@everywhere()
def buffer_assigned_through_data(on: Runner) -> Any:
    with on.scope():
        model = nn.Linear(3, 1)
        model.register_buffer("count", torch.zeros(2))

    def step(x: torch.Tensor) -> None:
        model.count.data = model.count + 1.0

    for _ in range(3):
        on(step, batch()[0])
    return model.count


# The state of optimizers


class Whole(torch.optim.Adam):
    """An optimizer of the user's own, which every replica runs whole."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: torch.as_tensor(value).clone() for key, value in optimizer.state[each].items()}
        for each in model.parameters()
    ]


def cleared(optimizer: Any, model: nn.Linear) -> None:
    optimizer.state.clear()


def made_anew(optimizer: Any, model: nn.Linear) -> None:
    optimizer.state = collections.defaultdict(dict)


def of_one_parameter_replaced(optimizer: Any, model: nn.Linear) -> None:
    like, step = torch.ones_like(model.weight.detach()), torch.tensor(7.0)  # which torch keeps on the host
    optimizer.state[model.weight] = {"exp_avg": 0.5 * like, "exp_avg_sq": like, "step": step}


def one_value_replaced(optimizer: Any, model: nn.Linear) -> None:
    optimizer.state[model.weight]["exp_avg"] = torch.arange(3.0, device=model.weight.device).view(1, 3)


def written_in_place(optimizer: Any, model: nn.Linear) -> None:
    for each in model.parameters():
        optimizer.state[each]["exp_avg"].mul_(0.5)
        optimizer.state[each]["step"] += 3.0


def loaded_from_another(optimizer: Any, model: nn.Linear) -> None:
    state = optimizer.state_dict()
    halved = {
        number: {key: value * 0.5 if key != "step" else value + 2.0 for key, value in own.items()}
        for number, own in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": halved})


def one_parameter_forgotten(optimizer: Any, model: nn.Linear) -> None:
    del optimizer.state[model.weight]


def groups_replaced(optimizer: Any, model: nn.Linear) -> None:
    (first, *others) = optimizer.param_groups
    if others:
        optimizer.param_groups = [{**first, "lr": 0.02, "params": [model.weight, model.bias]}]
    else:
        optimizer.param_groups = [{**first, "params": [each], "lr": 0.05} for each in model.parameters()]


CHANGES = (
    *(cleared, made_anew, of_one_parameter_replaced, one_value_replaced, written_in_place),
    *(loaded_from_another, one_parameter_forgotten, groups_replaced),
)


def changed_between_runs(on: Runner, kind: Callable[..., torch.optim.Optimizer]) -> Any:
    model, optimizer = linear(on, kind)
    step, found = training(model, optimizer), []
    on(step, *batch())
    for change in (*CHANGES, groups_replaced):
        change(optimizer, model)
        found += [dict(each) for each in state_of(model, optimizer)]
        on(step, *batch())
        found += state_of(model, optimizer)
    return found, values(model)


def changed_in_a_step(on: Runner, kind: Callable[..., torch.optim.Optimizer]) -> Any:
    model, optimizer = linear(on, kind)
    train, found = training(model, optimizer), []

    def step(x: torch.Tensor, y: torch.Tensor, change: Callable[..., None]) -> Any:
        train(x, y)
        change(optimizer, model)
        train(x, y)
        change(optimizer, model)
        return [dict(each) for each in state_of(model, optimizer)]

    for change in CHANGES:
        found.append(on.first(on(step, *batch(), change=change)))
        on(train, *batch())
        found.append(state_of(model, optimizer))
    return found, values(model)


@programs()
def state_of_a_split_optimizer_changed_between_runs(on: Runner) -> Any:
    return changed_between_runs(on, torch.optim.Adam)


@programs()
def state_of_a_whole_optimizer_changed_between_runs(on: Runner) -> Any:
    return changed_between_runs(on, Whole)


@programs()
def state_of_a_split_optimizer_changed_in_a_step(on: Runner) -> Any:
    return changed_in_a_step(on, torch.optim.Adam)


@programs(without=["central storage 3"])
def state_of_a_whole_optimizer_changed_in_a_step(on: Runner) -> Any:
    return changed_in_a_step(on, Whole)


@programs(refused="only it has the state of this Whole", without=set(ROWS) - {"central storage 3"})
def state_that_replica_0_alone_has(on: Runner) -> Any:
    return changed_in_a_step(on, Whole)


@programs(refused="a new state that a step gives a Adam must have all", without=CONNECTED)
def state_of_another_form_in_a_step(on: Runner) -> Any:
    model, optimizer = linear(on, torch.optim.Adam)
    train = training(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(x, y)
        optimizer.state[model.weight] = {"exp_avg": torch.ones(1, 3)}
        train(x, y)

    on(step, *batch())


@programs()
def state_dict_in_a_step(on: Runner) -> Any:
    model, optimizer = linear(on, torch.optim.Adam)
    train = training(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        train(x, y)
        return [own["exp_avg"].clone() for own in optimizer.state_dict()["state"].values()]

    return [on.first(on(step, *batch())) for _ in range(2)]


# Buffers, and parameters that steps write to


def normalizing(on: Runner, make: Callable[[], nn.Module]) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), make(), nn.Linear(4, 1))
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [on.mean(on(training(model, optimizer), *batch())) for _ in range(2)]
    assert isinstance(model[1], nn.SyncBatchNorm)
    model.eval()
    return losses, values(model), on.rows(on(model, batch()[0])), model(batch()[0].to(model[0].weight.device))


@programs()
def sync_batch_norm_of_torch(on: Runner) -> Any:
    return normalizing(on, lambda: nn.SyncBatchNorm(4))


@programs()
def batch_norm_converted_by_torch(on: Runner) -> Any:
    return normalizing(on, lambda: nn.BatchNorm1d(4, momentum=None))


class Statistics(nn.Module):
    """Counts rows, and keeps the smallest and largest value of each column."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.tensor(0))
        self.register_buffer("weight", torch.tensor(1.5))
        self.register_buffer("smallest", torch.full((3,), float("inf")))
        self.register_buffer("largest", torch.full((3,), -float("inf")))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf"), float("nan")]))
        self.register_buffer("mean", torch.zeros(3))
        for name, how in (("num_rows", "sum"), ("weight", "sum"), ("smallest", "min"), ("largest", "max")):
            sg.aggregate(self, name, how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_rows += len(x)
        self.weight += 0.25 * len(x)
        if len(x):
            torch.minimum(self.smallest, x.amin(dim=0), out=self.smallest)
            torch.maximum(self.largest, x.amax(dim=0), out=self.largest)
            self.mean += x.mean(dim=0)
        return self.num_rows.clone()


@programs()
@everywhere()
def buffers_with_an_aggregation_of_their_own(on: Runner) -> Any:
    model, optimizer = linear(on)
    train = training(model, optimizer)
    with on.scope():
        statistics = Statistics()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(x, y)
        statistics(x)

    for num_rows in (7, 1, 5):
        on(step, *batch(num_rows))
    return values(statistics)


@programs()
def aggregation_that_is_chosen_later(on: Runner) -> Any:
    with on.scope():
        model = nn.Linear(3, 1)
        model.register_buffer("num_rows", torch.zeros(()))

    def step(x: torch.Tensor) -> None:
        model.num_rows += len(x)

    on(step, batch()[0])
    model.num_rows.zero_()
    sg.aggregate(nn.Sequential(model), "0.num_rows", "sum")
    for _ in range(2):
        on(step, batch(5)[0])
    return model.num_rows


@programs()
@everywhere()
def smallest_value_without_an_aggregation_is_a_number(on: Runner) -> Any:
    with on.scope():
        model = nn.Linear(3, 1)
        model.register_buffer("smallest", torch.tensor(float("inf")))

    def step(x: torch.Tensor) -> None:
        if len(x):
            model.smallest.copy_(torch.minimum(model.smallest, x.abs().sum() * 0.0 + 2.0))

    for num_rows in (1, 7):  # not all replicas have one at first
        on(step, batch(num_rows)[0])
    return model.smallest


@programs()
@everywhere()
def observers_of_quantization(on: Runner) -> Any:
    with on.scope():
        smallest, moving = observer.MinMaxObserver(), observer.MovingAverageMinMaxObserver()

    def step(x: torch.Tensor) -> None:
        smallest(x)
        moving(x)

    for num_rows in (7, 5):
        on(step, batch(num_rows)[0])
    return values(smallest), values(moving)


@programs()
@everywhere()
def same_values_written_in_all_replicas(on: Runner) -> Any:
    model, _ = linear(on)

    @torch.no_grad()
    def step(x: torch.Tensor) -> None:
        model.weight.copy_(torch.ones(1, 3))
        model.weight[0, 1] = float("nan")

    on(step, batch()[0])
    return values(model)


@programs(without=["mirrored 2 torch", "mirrored 3 torch", "2 workers of 1"])
def different_elements_written_by_replicas(on: Runner) -> Any:
    with on.scope():
        model = nn.Embedding(8, 1000)
        nn.init.zeros_(model.weight)
        model.register_buffer("others", torch.zeros(1))

    @torch.no_grad()
    def step(rows: torch.Tensor) -> None:
        model.weight[rows] += rows[:, None] + 1.0

    for _ in range(2):
        on(step, torch.arange(7))
    return values(model)


@programs(refused="wrote different values to 'weight'", without=CONNECTED)
def different_values_written_by_replicas(on: Runner) -> Any:
    model, _ = linear(on)

    @torch.no_grad()
    def step(x: torch.Tensor) -> None:
        model.weight.fill_(float(x.sum()))

    on(step, batch()[0])


@programs(
    refused="replicas 0 and 1 wrote different values to 'weight'", without=["mirrored 2 torch", "mirrored 3 torch"]
)
def different_values_written_before_an_update(on: Runner) -> Any:
    model, optimizer = linear(on)
    train = training(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.weight.data[0, 2] = float(x.sum())
        train(x, y)

    on(step, *batch())


# Modules that are not made by a constructor, or compute their parameters


class Graph(nn.Module):
    """Has a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("edges", torch.eye(3).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.sparse.mm(self.edges, x.t()).t())


def train_each(on: Runner, makers: Sequence[Callable[[], nn.Module]]) -> Any:
    found = []
    for make in makers:
        with on.scope():
            torch.manual_seed(3)
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = training(model, optimizer)
        found.append([on.mean(on(step, *batch())) for _ in range(2)])
        found.append({name: each.to_dense().clone() for name, each in model.state_dict().items()})
    return found


@programs()
def parametrizations_and_prunings(on: Runner) -> Any:
    def pruned() -> nn.Module:
        return prune.l1_unstructured(nn.Linear(3, 1), "weight", 1)

    def no_longer_pruned() -> nn.Module:
        return prune.remove(pruned(), "weight")

    return train_each(
        on,
        [
            lambda: parametrizations.weight_norm(nn.Linear(3, 1)),
            lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1)),
            lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 1)),
            lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1)),
            *(pruned, no_longer_pruned),
        ],
    )


@programs()
def modules_without_a_constructor(on: Runner) -> Any:
    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def loaded() -> nn.Module:
        file = io.BytesIO()
        torch.save(small(), file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return train_each(on, [loaded, lambda: copy.deepcopy(small())])


@programs()
def sparse_buffer(on: Runner) -> Any:
    return train_each(on, [Graph])


@programs()
def sparse_buffer_replaced_between_runs(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = Graph()
    found = [on.rows(on(model, batch()[0]))]
    model.edges = torch.diag(torch.tensor([1.0, 0.0, 2.0])).to_sparse()
    return found, on.rows(on(model, batch()[0]))


@programs()
def pruned_after_the_first_run_and_averaged(on: Runner) -> Any:
    model, optimizer = linear(on)
    with on.scope():
        averaged = swa_utils.AveragedModel(model)
    step = training(model, optimizer)
    on(step, *batch())
    averaged.update_parameters(model)
    prune.l1_unstructured(model, "weight", 1)
    on(step, *batch())
    prune.remove(model, "weight")
    return on.rows(on(averaged, batch()[0])), on.rows(on(model, batch()[0])), values(averaged)


@programs(refused=r"the step gave Growing a new Linear 'last'.*\n    with strategy.scope\(\):", without=CONNECTED)
def layer_made_in_a_step(on: Runner) -> Any:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "last"):
                self.last = nn.Linear(3, 1)
            return self.last(self.first(x))

    with on.scope():
        model = Growing()
    on(model, batch()[0])


@programs(refused=r"the step gave Sequential a new Linear 'late'.*\n    with strategy.scope\(\):", without=CONNECTED)
def layer_made_in_a_late_step(on: Runner) -> Any:
    model, optimizer = linear(on)
    with on.scope():
        model = nn.Sequential(model)
    step = training(model, optimizer)
    for _ in range(4):
        on(step, *batch())
    on(lambda x: setattr(model, "late", nn.Linear(3, 3)), batch()[0])


@programs(
    refused="an optimizer holds a parameter of shape \\(4,\\) that this strategy does not manage", without=CONNECTED
)
def parameter_that_a_step_gives_its_optimizer(on: Runner) -> Any:
    model, optimizer = linear(on)
    train = training(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        return train(x, y)

    on(train, *batch())
    on(step, *batch())


@programs(refused="a scripted Linear cannot be copied to the replicas; make the module itself")
def scripted_module(on: Runner) -> Any:
    with on.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Linear(3, 1))
    on(model, batch()[0])


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)


@pytest.fixture(scope="module", params=OTHERS)
def other(
    request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sg.Strategy]:
    """A strategy of another kind, for all programs."""
    with opened_row(CPU_ROWS[request.param], request, tmp_path_factory.mktemp("row")) as made:
        yield made


@pytest.mark.parametrize("program", list(everywhere), ids=repr)
def test_equals_plain_torch_without_sums(program: Program, other: sg.Strategy) -> None:
    program.check(other)


@pytest.fixture(scope="module")
def asynchronous(
    request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sg.Strategy]:
    make = alone(lambda: sg.ParameterServerStrategy(1))
    with opened_row(make, request, tmp_path_factory.mktemp("row")) as made:
        yield made


def test_asynchronous_worker_and_its_program_assign_data(asynchronous: sg.Strategy) -> None:
    with asynchronous.scope():
        model = nn.Linear(3, 1, bias=False)
        model.register_buffer("count", torch.zeros(2))

    def step() -> None:
        model.weight.data = model.weight.data + 1.0
        model.count.data = model.count + 1.0

    nn.init.zeros_(model.weight)
    for _ in range(2):
        asynchronous.run(step)
    assert model.state_dict()["count"].tolist() == [2.0, 2.0]  # when the steps are done
    backup = model.weight.data
    model.weight.data = torch.full((1, 3), 9.0)
    assert asynchronous.local_results(asynchronous.run(lambda: 2 * model.weight.sum()))[0] == 54.0
    assert backup.tolist() == [[2.0, 2.0, 2.0]]
    model.weight.data = backup
    assert asynchronous.local_results(asynchronous.run(lambda: 2 * model.weight.sum()))[0] == 12.0


def test_asynchronous_workers_join_buffers(asynchronous: sg.Strategy) -> None:
    with asynchronous.scope():
        model = Statistics()
    for num_rows in (7, 5):
        asynchronous.run(model, args=(batch(num_rows)[0],))
    plain = Statistics()
    for num_rows in (7, 5):
        plain(batch(num_rows)[0])
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), equal_nan=True)


def test_state_that_asynchronous_workers_share_is_read_and_loaded_as_a_whole(asynchronous: sg.Strategy) -> None:
    with asynchronous.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    asynchronous.run(training(model, optimizer), args=batch())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state = collections.defaultdict(dict)
    asynchronous.run(training(model, optimizer), args=batch())
    assert {float(own["step"]) for own in optimizer.state_dict()["state"].values()} == {1.0}
    uses: list[Callable[[], Any]] = [
        lambda: optimizer.state[model.weight],
        lambda: optimizer.state.pop(model.weight),
        lambda: optimizer.load_state_dict({}),
    ]
    for use in uses[:2]:
        with pytest.raises(sg.errors.StrategyError, match=r"workers share the state.*optimizer.state_dict\(\)"):
            use()
    for use in uses:
        pending: Any = asynchronous.run(use)
        with pytest.raises(sg.errors.StrategyError, match="workers share the state"):
            pending.wait()
