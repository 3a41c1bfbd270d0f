"""LocalSGDStrategy: what replicas that train alone come to, against the same done by hand with plain torch."""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import StratagemWarning, StrategyError

pytestmark = pytest.mark.usefixtures("four_cpus")

DROPPED_IN_A_STEP: list[nn.Module] = []
Batches = list[tuple[torch.Tensor, torch.Tensor]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def outer_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def make_net(*, with_norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if with_norm else nn.Tanh(), nn.Linear(8, 2))


def make_batches(*sizes: int) -> Batches:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)) for size in sizes]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


class ByHand:
    """The same training with plain torch: a model for each replica, and a mean by the rows that each has seen."""

    def __init__(
        self, num_replicas: int, make_optimizer: MakeOptimizer = sgd, outer: MakeOptimizer | None = None, **net: bool
    ) -> None:
        self.agreed = make_net(**net)
        self.models = [copy.deepcopy(self.agreed) for _ in range(num_replicas)]
        self._optimizers = [make_optimizer(each.parameters()) for each in self.models]
        self._outer = outer(self.agreed.parameters()) if outer else None
        self._rows = [0] * num_replicas

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        for number, slices in enumerate(
            zip(*(torch.tensor_split(each, len(self.models)) for each in batch), strict=True)
        ):
            if len(slices[0]):
                make_step(self.models[number], self._optimizers[number])(*slices)
                self._rows[number] += len(slices[0])

    @torch.no_grad()
    def agree(self) -> None:
        shares = [rows / sum(self._rows) for rows in self._rows]
        pairs = zip(
            self.agreed.parameters(), zip(*(each.parameters() for each in self.models), strict=True), strict=True
        )
        for agreed, owns in pairs:
            change = sum(share * (own - agreed) for share, own in zip(shares, owns, strict=True))
            if self._outer is None:
                agreed.add_(change)
            else:
                agreed.grad = -change
        if self._outer is not None:
            self._outer.step()
        buffers = dict(self.agreed.named_buffers())
        for name, agreed in buffers.items():
            owns = [dict(each.named_buffers())[name] for each in self.models]
            mean = sum(share * own.double() for share, own in zip(shares, owns, strict=True))
            agreed.copy_(mean if agreed.is_floating_point() else owns[0])
        for model in self.models:
            model.load_state_dict(self.agreed.state_dict())
        self._rows = [0] * len(self.models)


@pytest.fixture
def opened(fork_server: None) -> Iterator[Callable[..., sg.LocalSGDStrategy]]:
    made: list[sg.LocalSGDStrategy] = []

    def make(sync_every: int, num_replicas: int = 2, **options: Any) -> sg.LocalSGDStrategy:
        devices = [f"cpu:{number}" for number in range(num_replicas)]
        made.append(sg.LocalSGDStrategy(sync_every, devices=devices, **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


def build(strategy: sg.Strategy, make_optimizer: MakeOptimizer = sgd, **net: bool) -> tuple[Any, Any]:
    with strategy.scope():
        model = make_net(**net)
        optimizer = make_optimizer(model.parameters())
    return model, make_step(model, optimizer)


def assert_same(model: nn.Module, other: nn.Module, *, tolerance: float = 2e-6) -> None:
    ours = [*model.named_parameters(), *model.named_buffers()]
    for (name, own), theirs in zip(ours, [*other.parameters(), *other.buffers()], strict=True):
        torch.testing.assert_close(
            own, theirs, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# Sizes of batches with uneven slices, and one that leaves a replica of three without rows.
UNEVEN = make_batches(8, 7, 9, 2, 5, 8, 7)


@pytest.mark.parametrize(
    ("num_replicas", "outer", "make_optimizer"),
    [(2, None, sgd), (3, outer_sgd, sgd), (2, outer_sgd, lambda params: torch.optim.Adam(params, lr=0.01))],
    ids=["mean of 2", "outer optimizer of 3", "Adam inside"],
)
def test_replicas_come_to_what_training_by_hand_comes_to(
    opened: Any, num_replicas: int, outer: MakeOptimizer | None, make_optimizer: MakeOptimizer
) -> None:
    strategy = opened(3, num_replicas, outer_optimizer=outer)
    model, step = build(strategy, make_optimizer)
    by_hand = ByHand(num_replicas, make_optimizer, outer)
    for number, (batch, plain) in enumerate(zip(strategy.distribute(UNEVEN), UNEVEN, strict=True), start=1):
        strategy.run(step, args=batch)
        by_hand.step(plain)
        if number % 3 == 0:
            by_hand.agree()
            assert_same(model, by_hand.agreed)
    assert_same(model, by_hand.models[0])  # between synchronisations the main program sees replica 0
    strategy.synchronize()
    by_hand.agree()
    assert_same(model, by_hand.agreed)
    strategy.synchronize()  # nothing to do
    assert_same(model, by_hand.agreed)


def test_buffers_are_averaged_by_rows_when_weights_are(opened: Any) -> None:
    strategy = opened(2)
    model, step = build(strategy, with_norm=True)
    by_hand, batches = ByHand(2, with_norm=True), make_batches(8, 7, 9, 5)
    for number, (batch, plain) in enumerate(zip(strategy.distribute(batches), batches, strict=True), start=1):
        strategy.run(step, args=batch)
        by_hand.step(plain)
        if number % 2 == 0:
            by_hand.agree()
    assert_same(model, by_hand.agreed, tolerance=2e-5)  # a norm over few rows magnifies rounding


def weight_sums(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: sum(each.detach().sum() for each in model.parameters())


def test_step_without_examples_changes_nothing_in_its_replica(opened: Any) -> None:
    class Following(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean += 0.5 * (x.mean(dim=0) - self.mean)
            return super().forward(x)

    strategy = opened(2)
    with strategy.scope():
        torch.manual_seed(1)
        model = Following()
        optimizer = sgd(model.parameters())
    agreed, batches = copy.deepcopy(model), make_batches(4, 1)
    for batch in strategy.distribute(batches):
        strategy.run(make_step(model, optimizer), args=batch)
    own = [copy.deepcopy(agreed) for _ in range(2)]
    steps = [make_step(each, sgd(each.parameters())) for each in own]
    steps[0](batches[0][0][:2], batches[0][1][:2])
    steps[1](batches[0][0][2:], batches[0][1][2:])
    steps[0](*batches[1])
    for name, value in model.state_dict().items():
        expected = own[0].state_dict()[name] * 3 / 5 + own[1].state_dict()[name] * 2 / 5
        torch.testing.assert_close(value, expected)


def test_runs_that_do_not_update_are_no_steps_and_see_the_weights_of_their_replica(opened: Any) -> None:
    strategy = opened(2)
    model, step = build(strategy)
    (first, second) = strategy.distribute(make_batches(8, 8))
    strategy.run(step, args=first)
    one, other = strategy.local_results(strategy.run(weight_sums(model)))
    assert one != other
    strategy.run(step, args=second)
    one, other = strategy.local_results(strategy.run(weight_sums(model)))
    assert one == other


@pytest.mark.parametrize(
    "read",
    [
        lambda strategy, model: model.state_dict(),
        lambda strategy, model: model(torch.ones(1, 4)),
        lambda strategy, model: strategy.synchronize(),
    ],
    ids=["state_dict", "call", "synchronize"],
)
def test_reading_the_model_brings_replicas_together(opened: Any, read: Callable[..., Any]) -> None:
    strategy = opened(100)
    model, step = build(strategy)
    by_hand = ByHand(2)
    (batch,) = strategy.distribute(UNEVEN[:1])
    strategy.run(step, args=batch)
    by_hand.step(UNEVEN[0])
    by_hand.agree()
    read(strategy, model)
    assert_same(model, by_hand.agreed)
    one, other = strategy.local_results(strategy.run(weight_sums(model)))
    assert one == other


def test_close_leaves_the_weights_of_all(opened: Any) -> None:
    strategy = opened(100)
    model, step = build(strategy)
    by_hand = ByHand(2)
    (batch,) = strategy.distribute(UNEVEN[1:2])
    strategy.run(step, args=batch)
    by_hand.step(UNEVEN[1])
    by_hand.agree()
    strategy.close()
    assert_same(model, by_hand.agreed)


def test_what_the_main_program_writes_replaces_weights_everywhere(opened: Any) -> None:
    strategy = opened(100)
    model, step = build(strategy)
    (batch,) = strategy.distribute(make_batches(8))
    strategy.run(step, args=batch)
    model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()})
    number = sum(each.numel() for each in model.parameters())
    assert strategy.local_results(strategy.run(weight_sums(model))) == (number, number)


@pytest.mark.parametrize("outer", [None, outer_sgd])
def test_weights_written_between_runs_are_not_mixed_with_those_before(opened: Any, outer: MakeOptimizer | None) -> None:
    strategy = opened(100, outer_optimizer=outer)
    model, step = build(strategy)
    (batch,) = strategy.distribute(UNEVEN[:1])
    strategy.run(step, args=batch)
    written = {name: torch.full_like(each, 2.0) for name, each in model.named_parameters()}
    model.load_state_dict(written)
    strategy.synchronize()
    assert all(bool((each == 2.0).all()) for each in model.parameters())
    assert strategy.local_results(strategy.run(weight_sums(model)))[1] == weight_sums(model)()


def test_parameters_of_any_kind_come_to_their_mean(opened: Any) -> None:
    strategy = opened(1, outer_optimizer=lambda params: torch.optim.SGD(params, lr=1.0, weight_decay=0.5))
    with strategy.scope():
        turning = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        single = nn.Parameter(torch.tensor(1.0))
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        holder = nn.ParameterList([turning, single, frozen])
        optimizer = torch.optim.SGD([turning, single], lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        rank = sg.get_replica_context().replica_id_in_sync_group
        ((rank + 1) * (turning.imag.sum() + single) + 0.0 * frozen.sum()).backward()
        optimizer.step()

    strategy.run(step)
    # The mean of the gradients is 1.5, and the outer optimizer takes half of what there was.
    torch.testing.assert_close(holder[0].detach(), torch.full((3,), 0.5 - 1.5j))
    assert holder[1].item() == pytest.approx(0.5 - 1.5)
    assert holder[2].tolist() == [1.0, 1.0]  # not its to decay


def test_outer_optimizer_works_for_one_replica_and_inside_a_scope(opened: Any) -> None:
    strategy = opened(1, 1, outer_optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        step = make_step(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(2):
            strategy.run(step, args=(torch.ones(2, 1), torch.zeros(2, 1)))
    # A step of 2 w from w, of which the outer optimizer takes half: 1 -> 0 -> 0.
    assert model.weight.item() == pytest.approx(0.0)


def test_step_without_a_backward_pass_is_averaged_too(opened: Any) -> None:
    strategy = opened(1)
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)

    def step() -> None:
        rank = sg.get_replica_context().replica_id_in_sync_group
        (weight.grad,) = torch.autograd.grad((rank + 1) * weight.sum(), [weight])
        optimizer.step()

    strategy.run(step)
    assert strategy.local_results(strategy.run(weight.item)) == (-1.5, -1.5)


def test_failed_run_lets_all_go_on_from_replica_0(opened: Any) -> None:
    strategy = opened(100)
    model, step = build(strategy)
    (batch,) = strategy.distribute(make_batches(8))
    strategy.run(step, args=batch)

    def fail() -> None:
        if sg.get_replica_context().replica_id_in_sync_group == 1:
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        strategy.run(fail)
    one, other = strategy.local_results(strategy.run(weight_sums(model)))
    assert one == other == weight_sums(model)()


def test_model_that_goes_in_a_step_after_a_failed_run_is_counted_alike_by_all(opened: Any) -> None:
    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # whose state a failed run does not touch

    strategy = opened(1)
    model, train = build(strategy, plain)
    with strategy.scope():
        DROPPED_IN_A_STEP.append(nn.Linear(2, 1))

    def fail() -> None:
        raise ValueError("no luck")

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        getattr(sys.modules.get(name), "DROPPED_IN_A_STEP", []).clear()  # as the collector may do at any time
        return train(inputs, targets)

    name, by_hand = __name__, ByHand(2, plain)
    for number, batch in enumerate(make_batches(8, 8, 8, 8)):
        if number == 3:  # the library itself holds for two runs what is new
            with pytest.raises(ValueError, match="no luck"):
                strategy.run(fail)
        strategy.run(step if number == 3 else train, args=next(iter(strategy.distribute([batch]))))
        by_hand.step(batch)
        by_hand.agree()
    assert not DROPPED_IN_A_STEP
    assert_same(model, by_hand.agreed)


def test_replica_with_bad_gradients_skips_its_step_alone(opened: Any) -> None:
    strategy = opened(2)
    model, step = build(strategy)
    by_hand = ByHand(2)
    inputs, targets = make_batches(8)[0]
    bad = inputs.clone()
    bad[-1] = torch.nan
    with pytest.warns(StratagemWarning, match="replica 1"):
        strategy.run(step, args=next(iter(strategy.distribute([(bad, targets)]))))
    make_step(by_hand.models[0], by_hand._optimizers[0])(inputs[:4], targets[:4])
    by_hand._rows[0] = 4
    (batch,) = strategy.distribute(UNEVEN[:1])
    strategy.run(step, args=batch)
    by_hand.step(UNEVEN[0])
    by_hand.agree()
    assert_same(model, by_hand.agreed)


def test_keras_fit_trains_and_epochs_end_in_agreement(opened: Any) -> None:
    strategy = opened(3)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1))
    inputs = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    targets = inputs.sum(axis=1, keepdims=True)
    seen: list[tuple[Any, ...]] = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            tensors = [each.value for each in model.trainable_variables]
            seen.append(strategy.local_results(strategy.run(lambda: sum(each.detach().sum() for each in tensors))))

    history = model.fit(inputs, targets, batch_size=8, epochs=4, verbose=0, callbacks=[Look()])
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    assert all(one == other for one, other in seen)
    assert len(seen) == 4


def test_one_replica_is_plain_training(opened: Any) -> None:
    strategy = opened(2, 1)
    model, step = build(strategy)
    plain = make_net()
    plain_step = make_step(plain, sgd(plain.parameters()))
    for batch, own in zip(strategy.distribute(UNEVEN), UNEVEN, strict=True):
        strategy.run(step, args=batch)
        plain_step(*own)
    assert_same(model, plain)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 0}, "from 1 up, got 0"),
        ({"sync_every": 2.5}, "from 1 up, got 2.5"),
        ({"sync_every": True}, "from 1 up, got True"),
        ({"outer_optimizer": "sgd"}, "makes an optimizer of parameters, got 'sgd'"),
        ({"on_nonfinite": "ignore"}, "got 'ignore'"),
        ({"stall_timeout_s": -1}, "above 0, got -1"),
        ({"heartbeat_timeout_s": float("inf")}, "above 0, got inf"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        sg.LocalSGDStrategy(**options)


def test_weights_that_are_only_read_through_data_stay_those_of_their_replica(four_cpus: None) -> None:
    with sg.LocalSGDStrategy(sync_every=10, devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            return model.weight.detach().clone()

        (batch,) = strategy.distribute([torch.tensor([[1.0], [2.0]])])
        seen = [strategy.run(step, args=(batch,))]
        model.weight.data.norm()
        seen.append(strategy.run(step, args=(batch,)))
        moved = [float(two - one) for one, two in zip(*(each.values for each in seen), strict=True)]
        assert moved == pytest.approx([-1.0, -2.0])  # of random weights
