"""One suite for every synchronous strategy: it must equal one device on the same global batches."""

import contextlib
import copy
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem.errors import StratagemWarning
from tests.contracts.strategies_under_test import CONNECTED, ONE_PROGRAM, PRIVATE, ROWS, SELDOM, WORKERS, opened
from tests.steps import plain_step

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.soak if name in SELDOM else ()) for name in ROWS],
)
def strategy(
    request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sg.Strategy]:
    with opened(request, tmp_path_factory.mktemp("workers")) as made:
        yield made


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def make_batches(sizes: list[int], seed: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)) for size in sizes
    ]


# Parts of different sizes, of the same size, replicas without a part.
UNEVEN = make_batches([7, 8, 1, 3])


Build = Callable[[], tuple[Any, Callable[..., torch.Tensor]]]


def assert_equal_to_one_device(
    strategy: sg.Strategy, build: Build, batches: Batches = UNEVEN, *, tolerance: float = 2e-6
) -> None:
    """Trains twice, plainly and with the strategy, and compares every loss and the final weights."""
    model, step = build()
    expected = [step(*batch).item() for batch in batches]
    with strategy.scope():
        distributed, distributed_step = build()
    losses = [
        strategy.reduce("mean", strategy.run(distributed_step, args=batch)).item()
        for batch in strategy.distribute(batches)
    ]
    assert losses == pytest.approx(expected, abs=tolerance)
    for (name, ours), theirs in zip(distributed.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(
            ours.cpu(), theirs, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "whole: adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_one_device_with_uneven_batches(strategy: sg.Strategy, name: str) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        return model, plain_step(model, OPTIMIZERS[name](model.parameters()))

    assert_equal_to_one_device(strategy, build, tolerance=2e-5)


class Compilable(nn.Module):
    """A module of the program's own, which `compile()` compiles: of one of torch's it compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net(inputs)
        return output


@pytest.mark.filterwarnings("ignore")  # torch's compiler uses what torch warns of
def test_compiled_step_equals_one_device_with_uneven_batches(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = Compilable()
        step = plain_step(model, OPTIMIZERS["sgd"](model.parameters()))
        if next(is_plain):
            return model, step
        model.compile(backend="eager")
        return model, torch.compile(step, backend="eager")

    is_plain = iter([True, False])
    assert_equal_to_one_device(strategy, build, tolerance=2e-5)


def build_eventful() -> tuple[Any, Callable[..., tuple[torch.Tensor, float]], sg.metrics.Mean]:
    """A step with all that replicas keep from step to step, and that they must do alike."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loss_of_all = sg.metrics.Mean()
    seen = {"rows": 0}

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
        optimizer.zero_grad()
        # Statistics of a single row are none.
        model.train(len(inputs) > 1 and sg.get_replica_context().num_replicas_in_sync == 1)
        model[2].train()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model[3].weight.clamp_(-0.3, 0.3)
        model[1].running_mean += inputs.mean()
        loss_of_all.update_state(loss)
        seen["rows"] += len(inputs)
        return loss, seen["rows"] + scheduler.get_last_lr()[0]

    return model, step, loss_of_all


def train_eventful(strategy: sg.Strategy, num_steps: int | None) -> list[Any]:
    """All that training comes to: losses, results, weights, statistics, the metric, the next random numbers."""
    with strategy.scope():
        model, step, loss_of_all = build_eventful()
    batches = iter(strategy.distribute(make_batches([7, 8, 1, 3, 8, 6, 8])))
    torch.manual_seed(5)
    results: list[Any] = []
    if num_steps is None:
        results = [strategy.run(step, args=batch) for batch in batches]
    else:
        while done := strategy.run(step, args=batches, num_steps=num_steps):
            results += done
    strategy.synchronize()
    losses = [strategy.reduce("mean", loss).item() for loss, _ in results]
    own = [strategy.local_results(each) for _, each in results]
    state = {name: each.tolist() for name, each in model.state_dict().items()}
    drawn = strategy.gather(strategy.run(lambda: torch.rand(1))).tolist()
    return [losses, own, state, loss_of_all.result().item(), drawn]


@pytest.mark.parametrize("num_steps", [3, 16])
def test_several_steps_in_one_call_equal_single_ones(strategy: sg.Strategy, num_steps: int) -> None:
    assert train_eventful(strategy, num_steps) == train_eventful(strategy, None)


def test_parameters_written_after_the_last_update_are_everyones_in_the_next_step(strategy: sg.Strategy) -> None:
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1.0)
        return before

    results = strategy.run(step, args=(iter(strategy.distribute([torch.ones(4)] * 3)),), num_steps=3)
    assert [strategy.reduce("max", each).tolist() for each in results] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert weight.tolist() == [3.0, 3.0]


def test_arguments_without_an_iterator_are_the_same_in_all_steps(strategy: sg.Strategy) -> None:
    calls: list[int] = []

    def step(x: int, *, y: int) -> int:
        calls.append(x)
        return len(calls) + y

    results = strategy.run(step, args=(1,), kwargs={"y": 10}, num_steps=3)
    assert [set(strategy.local_results(each)) for each in results] == [{11}, {12}, {13}]


def test_programs_that_train_together_may_divide_their_steps_into_calls_differently(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(model, optimizer)
    batches = iter(strategy.distribute(make_batches([7, 8, 1, 3, 8, 6])))
    calls = [2, 1, 3] if strategy.is_chief else [6]
    losses = [each for number in calls for each in strategy.run(step, args=batches, num_steps=number)]
    plain = make_net()
    plain_loss = plain_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    expected = [plain_loss(*batch).item() for batch in make_batches([7, 8, 1, 3, 8, 6])]
    assert [strategy.reduce("mean", each).item() for each in losses] == pytest.approx(expected, abs=2e-6)


def test_several_steps_on_data_of_ones_own_end_when_all_have_ended(strategy: sg.Strategy) -> None:
    number = 3 if strategy.is_chief else 5
    batches = iter(strategy.distribute([torch.full((4,), each) for each in range(number)], auto_shard="off"))
    is_several = strategy.input_pipeline[0] > 1
    results = [strategy.run(lambda x: x.sum(), args=(batches,), num_steps=4) for _ in range(3)]
    assert list(map(len, results)) == ([4, 1, 0] if is_several else [3, 0, 0])
    sums = [int(strategy.reduce("sum", each)) for call in results for each in call]
    assert sums == ([0, 8, 16, 12, 16] if is_several else [0, 4, 8])


def test_failing_step_of_several_leaves_the_state_of_the_one_before(
    request: pytest.FixtureRequest, strategy: sg.Strategy
) -> None:
    if request.node.callspec.params["strategy"] in CONNECTED:
        pytest.skip("it connects anew, which the guards take for something left behind; tests/engine has it")
    if request.node.callspec.params["strategy"] in WORKERS:
        pytest.skip("a run that fails ends the strategy in all workers")
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train = plain_step(model, optimizer)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 1:
            raise ValueError("one row")
        return train(inputs, targets)

    batches = make_batches([8, 8, 8, 1, 8])
    before = copy.deepcopy(model.state_dict())
    for batch in strategy.distribute(batches[:3]):
        strategy.run(step, args=batch)
    expected = copy.deepcopy(model.state_dict())
    with strategy.scope():
        model.load_state_dict(before)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    iterator = iter(strategy.distribute(batches))
    with pytest.raises(ValueError, match="one row") as caught:
        strategy.run(step, args=iterator, num_steps=5)
    assert "in step 4 of the 5 of this run" in " ".join(caught.value.__notes__)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert len(strategy.run(train, args=iter(strategy.distribute(batches)), num_steps=5)) == 5


def test_programs_that_train_together_meet_at_a_barrier(strategy: sg.Strategy) -> None:
    strategy.barrier()
    strategy.run(int)
    strategy.barrier()


def test_closure_optimizer_equals_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                return sg.get_replica_context().all_reduce("mean", loss.detach()) if sg.get_replica_context() else loss

            optimizer.step(closure)
            with torch.no_grad():
                return nn.functional.cross_entropy(model(inputs), targets)

        return model, step

    assert_equal_to_one_device(strategy, build, make_batches([8, 8, 8]), tolerance=1e-4)


def test_parameter_groups_and_schedulers_equal_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters(), "momentum": 0.9}], lr=0.05
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


def test_clipping_equals_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


def test_several_backwards_in_one_step_add_up(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            (0.5 * nn.functional.cross_entropy(model(inputs * 2), targets)).backward()
            optimizer.step()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


def test_accumulation_without_sync_equals_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            if not sg.has_strategy():
                nn.functional.cross_entropy(model(inputs * 3), targets).backward()
            else:
                with sg.get_strategy().no_sync():
                    nn.functional.cross_entropy(model(inputs * 3), targets).backward()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


def _held(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Looks at the gradients of one loss after those of another have been made."""
    nn.functional.cross_entropy(model(inputs), targets).backward()
    held = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    (100 * nn.functional.cross_entropy(model(inputs), targets)).backward()
    for parameter, gradient in zip(model.parameters(), held, strict=True):
        parameter.grad = gradient


def _replaced(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(inputs), targets).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clamp(-0.1, 0.1)
    nn.functional.cross_entropy(model(2 * inputs), targets).backward()


def _preset(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = 0.01 * parameter.detach().sign()
    nn.functional.cross_entropy(model(inputs), targets).backward()


def _zeroed(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    model.zero_grad(set_to_none=False)
    _mixed(model, inputs, targets)


def _mixed(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """A pass without sync between two with it."""
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with contextlib.nullcontext() if not sg.has_strategy() else sg.get_strategy().no_sync():
        nn.functional.cross_entropy(model(3 * inputs), targets).backward()
    nn.functional.cross_entropy(model(2 * inputs), targets).backward()


@pytest.mark.parametrize("passes", [_held, _replaced, _preset, _zeroed, _mixed])
def test_gradients_of_several_passes_equal_one_device(strategy: sg.Strategy, passes: Callable[..., None]) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if passes is not _zeroed:
                optimizer.zero_grad()
            passes(model, inputs, targets)
            optimizer.step()
            return nn.functional.cross_entropy(model(inputs), targets)

        return model, step

    assert_equal_to_one_device(strategy, build, tolerance=2e-5)


# So large that a part of it is on its way when the pass comes back, and so small that it is not.
@pytest.mark.parametrize("width", [900, 300])
def test_parameters_that_a_pass_comes_back_to_equal_one_device(strategy: sg.Strategy, width: int) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            hidden = model[0](inputs)
            for _ in range(3):
                hidden = checkpoint(model[1], hidden, use_reentrant=True)
            loss = nn.functional.cross_entropy(model[2](hidden), targets)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


def test_gradients_dropped_between_runs_are_dropped_everywhere(strategy: sg.Strategy) -> None:
    def build() -> tuple[Any, nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        return optimizer, model, step

    optimizer, model, step = build()
    for batch in UNEVEN:
        optimizer.zero_grad()
        step(*batch)
    with strategy.scope():
        distributed_optimizer, distributed, distributed_step = build()
    for batch in strategy.distribute(UNEVEN):
        distributed_optimizer.zero_grad()
        strategy.run(distributed_step, args=batch)
    for ours, theirs in zip(distributed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-6, rtol=2e-6)


def test_unchanged_buffers_stay_as_they_are_beside_others(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = nn.BatchNorm1d(3)
        model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        model.register_buffer("nothing", torch.tensor([float("nan"), float("inf")]))
    for batch in strategy.distribute([torch.randn(8, 3)]):
        strategy.run(lambda inputs: model(inputs), args=(batch,))  # noqa: PLW0108  # a function of the test
    assert torch.equal(model.mask.cpu(), torch.full((3, 3), float("-inf")).triu(1))
    assert model.nothing.isnan().tolist() == [True, False]


def test_failed_run_leaves_nothing_that_overwrites_a_restored_model(
    strategy: sg.Strategy, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["strategy"] in CONNECTED:
        pytest.skip("it connects anew, which the guards take for something left behind")
    if request.node.callspec.params["strategy"] in WORKERS:
        pytest.skip("a run that fails ends the strategy in all workers")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail(inputs: torch.Tensor) -> None:
        with torch.no_grad():
            model[0].weight.mul_(1000)
        model(inputs)
        raise ValueError("boom")

    batches = [torch.randn(8, 3)]
    with pytest.raises(ValueError, match="boom"):
        strategy.run(fail, args=(next(iter(strategy.distribute(batches))),))
    model.load_state_dict(before)
    for seen in strategy.local_results(strategy.run(lambda: {**model.state_dict()})):
        for name, value in before.items():
            assert torch.equal(seen[name].cpu(), value.cpu()), name
    assert all(torch.equal(value.cpu(), before[name].cpu()) for name, value in model.state_dict().items())


def test_pass_that_fails_leaves_earlier_gradients_alone(strategy: sg.Strategy) -> None:
    if not isinstance(strategy, sg.MirroredStrategy | sg.MultiWorkerMirroredStrategy):
        pytest.skip("on one device a pass that fails has added a part of its gradients")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 900), nn.Linear(900, 900), nn.Linear(900, 1))

    def step(inputs: torch.Tensor) -> list[bool]:
        model(inputs).sum().backward()
        before = [each.grad.clone() for each in model.parameters()]
        hidden = model[0](inputs)
        hidden.register_hook(lambda _: 1 // 0)
        with contextlib.suppress(ZeroDivisionError):
            model[1:](hidden).sum().backward()
        return [torch.equal(each.grad, own) for each, own in zip(model.parameters(), before, strict=True)]

    for same in strategy.local_results(strategy.run(step, args=(torch.ones(2, 2),))):
        assert same == [True] * 6


def test_gradients_that_were_not_finite_in_an_earlier_pass_skip_the_update(
    strategy: sg.Strategy, request: pytest.FixtureRequest
) -> None:
    if isinstance(strategy, sg.OneDeviceStrategy) or request.node.callspec.params["strategy"] in ONE_PROGRAM:
        pytest.skip("one device applies what it is given, and so does one program on several")
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(inputs).sum() * float("inf")).backward()
        model(inputs).sum().backward()
        optimizer.step()

    with pytest.warns(StratagemWarning, match="update skipped"):
        strategy.run(step, args=(torch.ones(2, 2),))
    assert torch.equal(model.weight.cpu(), before.cpu())


def test_step_runs_its_hooks_and_autograd_notices_it(strategy: sg.Strategy, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["strategy"] == "strict central storage 2":
        pytest.skip("replica 0 updates for all, and alone runs the hooks of the update")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> int:
        calls: list[int] = []
        handle = optimizer.register_step_post_hook(lambda *_: calls.append(1))
        loss = model(inputs).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        handle.remove()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return len(calls)

    assert set(strategy.local_results(strategy.run(step, args=(torch.ones(2, 2),)))) == {1}


def test_gradient_scaler_equals_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


def test_mixed_precision_stays_close_to_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build, tolerance=2e-2)


class Branches(nn.Module):
    """Parameters that are shared, frozen, never used, or used for some examples only."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.one.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.never = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.tied(torch.tanh(self.frozen(self.one(inputs))))
        chosen = inputs[:, 0] > 0.8
        outputs = self.head(hidden)
        if chosen.any():
            outputs = outputs + torch.where(chosen[:, None], self.sometimes(hidden), torch.zeros(()))
        return outputs


def test_shared_frozen_and_unused_parameters_equal_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        torch.manual_seed(2)
        model = Branches()
        return model, plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))

    assert_equal_to_one_device(strategy, build, make_batches([8, 7, 5, 8, 3, 1, 9]))


def test_parameters_changed_in_place_by_the_step_equal_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)
            model[0].weight.data.clamp_(-0.3, 0.3)
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


def test_update_by_hand_equals_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad
            return loss

        return model, step

    assert_equal_to_one_device(strategy, build)


class Layouts(nn.Module):
    """Parameters whose memory is not row by row, and gradients that come in other layouts than their parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.permuted = nn.Parameter(torch.randn(2, 3, 5).permute(2, 0, 1))
        self.convolution = nn.Conv2d(1, 3, 2, bias=False).to(memory_format=torch.channels_last)
        with torch.no_grad():
            self.convolution.weight.copy_(torch.randn(3, 1, 2, 2))
        self.shift = nn.Parameter(torch.zeros(3, 4))  # its gradient is one number, expanded

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("ni,ij,jkl->nl", inputs, self.transposed, self.permuted)
        images = inputs.view(-1, 1, 2, 3).to(memory_format=torch.channels_last)
        return hidden + self.convolution(images).sum(dim=(2, 3)) + self.shift.sum() * inputs[:, :3]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_every_layout_of_memory_equals_one_device(strategy: sg.Strategy, name: str) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = Layouts()
        optimizer = OPTIMIZERS[name](model.parameters())
        built.append(optimizer)
        return model, plain_step(model, optimizer)

    built: list[torch.optim.Optimizer] = []
    assert_equal_to_one_device(strategy, build, tolerance=2e-5)
    theirs, ours = (each.state_dict()["state"] for each in built)
    for number, state in theirs.items():
        for key, value in state.items():
            torch.testing.assert_close(ours[number][key], value, atol=2e-5, rtol=2e-5, check_device=False)
    # State in another layout than the parameters, as a file may have it.
    loaded = built[1].state_dict()
    for state in loaded["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                state[key] = value.transpose(0, 1).contiguous().transpose(0, 1)
    built[1].load_state_dict(loaded)
    for number, state in built[1].state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(value, loaded["state"][number][key], check_device=False)


def test_parameter_that_is_one_number_keeps_its_state(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        model = make_net()
        model.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        built.append(optimizer)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model.scale * model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    built: list[torch.optim.Optimizer] = []
    model, step = build()
    with strategy.scope():
        distributed, distributed_step = build()
    for batch, own in zip(strategy.distribute(UNEVEN[:3]), UNEVEN, strict=False):
        strategy.run(distributed_step, args=batch)
        step(*own)
        for optimizer in built:
            optimizer.param_groups[0]["lr"] = 0.01  # a warm-up from nothing
            optimizer.load_state_dict(optimizer.state_dict())
    for ours, theirs in zip(distributed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-5, rtol=2e-5)


def test_two_dtypes_and_channels_last_equal_one_device(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        torch.manual_seed(4)
        model = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Linear(8, 3).double()])
        model[0].to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            hidden = model[0](inputs.to(memory_format=torch.channels_last)).mean(dim=(2, 3))
            loss = nn.functional.cross_entropy(model[1](hidden.double()), targets)
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    generator = torch.Generator().manual_seed(0)
    images = [(torch.randn(size, 3, 6, 6, generator=generator), torch.arange(size) % 3) for size in (6, 5, 8)]
    assert_equal_to_one_device(strategy, build, images)


def test_summed_gradients_of_averaged_losses_equal_one_device(four_cpus: None) -> None:
    batches = make_batches([8, 8, 6])
    model = make_net()
    step = plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = [step(*batch).item() for batch in batches]
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], gradients="sum") as strategy:
        with strategy.scope():
            distributed = make_net()
            optimizer = torch.optim.SGD(distributed.parameters(), lr=0.1)

        def scaled_step(inputs: torch.Tensor, targets: torch.Tensor, global_batch_size: int) -> torch.Tensor:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(distributed(inputs), targets, reduction="none")
            loss = sg.compute_average_loss(losses, global_batch_size=global_batch_size)
            loss.backward()
            optimizer.step()
            return loss

        losses = [
            strategy.reduce("sum", strategy.run(scaled_step, args=(*batch, len(targets)))).item()
            for batch, (_, targets) in zip(strategy.distribute(batches), batches, strict=True)
        ]
    assert losses == pytest.approx(expected, abs=1e-6)


# Between runs


def test_controller_changes_reach_the_replicas(strategy: sg.Strategy) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.0), nn.Linear(16, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def changes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        start = copy.deepcopy(model.state_dict())
        yield
        model.load_state_dict(start)
        yield
        optimizer.param_groups[0]["lr"] = 0.01
        model[0].bias.requires_grad_(False)
        yield
        with torch.no_grad():
            model[2].weight[0, 0] = 3.0
            model[2].bias[1] = -1.0
        yield
        model[0].bias.requires_grad_(True)
        model.eval()
        model[1].p = 0.9
        yield

    batch = make_batches([8])[0]
    plain = build()
    expected = [plain_step(*plain)(*batch).item() for _ in changes(*plain)]
    with strategy.scope():
        ours = build()
    step = plain_step(*ours)
    losses = []
    for _ in changes(*ours):
        (parts,) = strategy.distribute([batch])
        losses.append(strategy.reduce("mean", strategy.run(step, args=parts)).item())
    assert losses == pytest.approx(expected, abs=2e-6)


def test_weights_written_through_data_reach_the_replicas(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = make_net()
    for value in (-1.0, 3.0):
        model[4].bias.data[1] = value
        seen = strategy.local_results(strategy.run(lambda: model[4].bias[1].item()))  # noqa: PLW0108
        assert set(seen) == {value}


def test_state_dicts_are_whole_and_load_into_plain_torch_and_back(strategy: sg.Strategy) -> None:
    first, second = make_batches([8, 7, 5]), make_batches([4, 8, 7], seed=9)
    plain = make_net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.02)
    plain_losses = [plain_step(plain, optimizer)(*batch).item() for batch in first]
    with strategy.scope():
        model = make_net()
        ours = torch.optim.Adam(model.parameters(), lr=0.02)
    step = plain_step(model, ours)
    for batch in strategy.distribute(first):
        strategy.run(step, args=batch)
    for theirs, mine in zip(optimizer.state_dict()["state"].values(), ours.state_dict()["state"].values(), strict=True):
        for key in theirs:
            torch.testing.assert_close(mine[key].cpu(), theirs[key], atol=1e-6, rtol=1e-5)
    # On one device from here on, then back.
    alone = make_net()
    alone.load_state_dict(model.state_dict())
    alone_optimizer = torch.optim.Adam(alone.parameters(), lr=0.5)
    alone_optimizer.load_state_dict(copy.deepcopy(ours.state_dict()))
    expected = [plain_step(alone, alone_optimizer)(*batch).item() for batch in second]
    going_on = [strategy.reduce("mean", strategy.run(step, args=batch)).item() for batch in strategy.distribute(second)]
    assert going_on == pytest.approx(expected, abs=2e-6)
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = [strategy.reduce("mean", strategy.run(step, args=batch)).item() for batch in strategy.distribute(second)]
    assert again == pytest.approx(expected, abs=2e-6)
    assert len(plain_losses) == 3


def test_state_of_an_optimizer_is_read_and_written_where_it_lies(
    strategy: sg.Strategy, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["strategy"] in (*PRIVATE, "parameter server 2"):
        pytest.skip("each replica has a state of its own, or workers have it under locks")
    plain = nn.Linear(3, 40)
    with strategy.scope():
        model = nn.Linear(3, 40)
        model.weight = nn.Parameter(plain.weight.detach().t().contiguous().t())  # not row-major
        model.bias = nn.Parameter(plain.bias.detach().clone())
        ours = torch.optim.Adam(model.parameters(), lr=0.02)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.02)

    def step() -> None:
        ours.zero_grad()
        model(torch.tensor([[1.0, 2.0, 3.0]])).pow(2).sum().backward()
        ours.step()

    for _ in range(3):
        strategy.run(step)
        theirs.zero_grad()
        plain(torch.tensor([[1.0, 2.0, 3.0]])).pow(2).sum().backward()
        theirs.step()
        for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, own)
            for key, value in theirs.state[own].items():
                torch.testing.assert_close(ours.state[mine][key], value)
            for optimizer, parameter in ((ours, mine), (theirs, own)):
                optimizer.state[parameter]["exp_avg"].mul_(0.5)
    saved = io.BytesIO()
    torch.save(ours.state_dict(), saved)
    assert len(saved.getvalue()) < 12_000  # 2 * 160 numbers, and no memory beside them


def test_model_is_an_ordinary_one_between_runs(strategy: sg.Strategy) -> None:
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    for batch in strategy.distribute(make_batches([8, 8])):
        strategy.run(step, args=batch)
    assert not torch.equal(before["0.weight"].cpu(), model.state_dict()["0.weight"].cpu())
    with torch.no_grad():
        assert model(torch.ones(2, 6, device=model[0].weight.device)).shape == (2, 3)
    copied = copy.deepcopy(model)
    assert torch.equal(copied[0].weight, model[0].weight)


def test_same_seed_gives_the_same_result_to_the_last_bit(strategy: sg.Strategy) -> None:
    def train() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(11)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = plain_step(model, optimizer)
        losses = [strategy.reduce("mean", strategy.run(step, args=each)).item() for each in strategy.distribute(UNEVEN)]
        return losses, model[0].weight.detach().clone()

    (first, first_weight), (second, second_weight) = train(), train()
    assert first == second
    assert torch.equal(first_weight, second_weight)


def test_replicas_draw_different_random_numbers(strategy: sg.Strategy) -> None:
    torch.manual_seed(7)
    drawn = strategy.gather(strategy.run(lambda: torch.rand(1))).tolist()
    assert len(set(drawn)) == strategy.num_replicas_in_sync


def train_to(strategy: sg.Strategy, end: int, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loop of "Resuming a loop in the middle of an epoch" in docs/guides/saving_and_resuming.md, to a step."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    step, losses = plain_step(model, optimizer), []
    x, y = (torch.cat(each) for each in zip(*make_batches([22]), strict=True))
    num_steps = saved["num_steps"] if saved else 0
    while num_steps < end:
        epoch, num_done = divmod(num_steps, 6)
        torch.manual_seed(epoch)
        for batch in itertools.islice(strategy.distribute((x, y), global_batch_size=4, shuffle=True), num_done, None):
            torch.manual_seed(num_steps)
            losses.append(strategy.reduce("mean", strategy.run(step, args=batch)).item())
            num_steps += 1
            if num_steps == end:
                break
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**copy.deepcopy(state), "num_steps": num_steps, "losses": losses}


def test_loop_that_is_resumed_within_an_epoch_equals_the_uninterrupted_one(strategy: sg.Strategy) -> None:
    torch.manual_seed(0)
    first = train_to(strategy, 0)  # the same first weights
    whole = train_to(strategy, 14, first)
    cut = train_to(strategy, 8, first)
    strategy.run(lambda: torch.rand(3))  # another program has other random numbers in all replicas
    rest = train_to(strategy, 14, cut)
    assert cut["losses"] + rest["losses"] == whole["losses"]
    assert len(set(whole["losses"])) == 14
    for name, value in whole["model"].items():
        assert torch.equal(rest["model"][name], value)


def test_what_distribute_yields_can_be_read_like_results(strategy: sg.Strategy) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(5.0), torch.arange(5))
    for data in (torch.utils.data.DataLoader(dataset, batch_size=5), [(torch.arange(5.0), torch.arange(5))]):
        (batch,) = strategy.distribute(data)
        x, y = strategy.gather(batch)
        assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
        assert all(isinstance(each, torch.Tensor) for each in batch[0].values)
        own = strategy.local_results(batch)
        assert [len(each[0]) for each in own] == [count for count in batch[0].counts if count]
        smallest = strategy.run(lambda x, _: x.min(), args=batch)
        assert strategy.reduce("min", smallest) == 0
    (batch,) = strategy.distribute([torch.ones(strategy.num_replicas_in_sync)])
    assert strategy.reduce("sum", batch).tolist() == [strategy.num_replicas_in_sync]
