"""Workers compute at the same time: in a loop that looks at its losses, in Keras' `fit`, and as well as one device."""

import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import StrategyError
from tests.steps import plain_step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras' own, of numpy

NUM_WORKERS = 2
PATIENCE_S = 30.0
DIGITS = Path(__file__).parents[2] / "examples" / "data" / "digits.npz"


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(NUM_WORKERS) as made:
        made.run(int).wait()  # its workers are there before the first test
        yield made


def meet(folder: str) -> None:
    """Returns when all workers have come here, which they can only if they compute at the same time."""
    (Path(folder) / str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE_S
    while len(list(Path(folder).iterdir())) < NUM_WORKERS:
        if time.monotonic() > deadline:
            raise TimeoutError("the other worker never came: steps run one after the other")
        time.sleep(0.002)


def wait_for(path: str) -> torch.Tensor:
    while not Path(path).exists():
        time.sleep(0.002)
    return torch.tensor(3.0)


def fail() -> None:
    raise ValueError("bad row 812")


def test_first_program_keeps_all_workers_busy(strategy: sg.ParameterServerStrategy, tmp_path: Path) -> None:
    with strategy.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        meet(str(tmp_path))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    data, shown, total = (torch.ones(40, 4), torch.zeros(40, 1)), [], 0.0
    for number, batch in enumerate(strategy.distribute(data, global_batch_size=4)):
        loss = strategy.reduce("mean", strategy.run(step, args=batch))
        total += loss
        if number % 4 == 3:
            shown.append(f"{loss:.3f}")
    assert len(list(tmp_path.iterdir())) == NUM_WORKERS
    assert len(shown) == 2
    assert isinstance(total, torch.Tensor)
    assert float(total) > float(loss) > 0


def test_result_that_is_not_there_yet_behaves_as_what_it_will_be(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    result = strategy.run(lambda path: {"loss": wait_for(path), "name": "x"}, args=(str(tmp_path / "go"),))
    loss, everything = strategy.reduce("mean", result["loss"]), strategy.local_results(result)
    sums = [loss + 1, 1 - loss, 2 * loss, loss / 2, -loss, loss**2]
    long = sum([loss] * 40)
    assert not loss.is_done
    assert not strategy.is_ready(loss)
    assert not long.is_done
    (tmp_path / "go").touch()
    assert [each.item() for each in sums] == [4.0, -2.0, 6.0, 1.5, -3.0, 9.0]
    assert everything == ({"loss": torch.tensor(3.0), "name": "x"},)
    assert strategy.is_ready(loss)
    assert isinstance(loss, torch.Tensor)
    assert isinstance(everything, tuple)
    assert torch.stack([loss, loss]).tolist() == [3.0, 3.0]
    assert np.mean([loss, loss]) == 3.0
    with pytest.raises(TypeError, match=r"use torch.stack\(results\)"):
        torch.tensor([loss, loss])
    assert (float(loss), int(loss), bool(loss), f"{loss:.1f}", str(loss)) == (3.0, 3, True, "3.0", "tensor(3.)")
    assert loss < 4 <= loss + 1 == 4
    assert copy.deepcopy(loss).dtype == loss.dtype == torch.float32
    assert strategy.local_results(strategy.run(lambda x: x + 1, args=(loss,)))[0].item() == 4.0
    assert long.item() == 120.0
    assert strategy.gather(strategy.run(lambda: torch.ones(2))).shape == (2,)


def test_result_of_one_worker_is_a_number_without_reduce(strategy: sg.ParameterServerStrategy) -> None:
    loss = strategy.run(lambda: torch.tensor(3.0))
    named = strategy.run(lambda: {"loss": torch.tensor(3.0)})["loss"]
    for each in (loss, named):
        assert (float(each), int(each), bool(each), f"{each:.1f}", each.item()) == (3.0, 3, True, "3.0", 3.0)
        assert each == 3 < each + 1
        assert (1 - each, 2 * each) == (-2, 6)
        assert torch.stack([each, each]).tolist() == [3.0, 3.0]
        assert np.mean([each, each]) == 3.0
        assert strategy.reduce("mean", each) == 3
        assert [float(value) for value in each.values] == [3.0]
        assert len(each) == 1
    assert float(strategy.run(lambda: 2.5)) == 2.5


def test_result_is_computed_with_what_tensors_were_when_it_was_written_down(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    loss = strategy.reduce("mean", strategy.run(wait_for, args=(str(tmp_path / "go"),)))
    weight, array, trained = torch.tensor(2.0), np.array(4.0), nn.Parameter(torch.tensor(1.0))
    products = [loss * weight, loss * array, loss * trained]
    weight.mul_(10)
    array *= 10
    (tmp_path / "go").touch()
    assert [each.item() for each in products] == [6.0, 12.0, 3.0]
    products[2].backward()
    assert trained.grad == 3.0


def test_results_can_be_unpacked_before_they_are_there_once_their_number_is_known(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    def step(path: str, number: int) -> tuple[Any, ...]:
        return (wait_for(path), *range(number))

    (tmp_path / "first").touch()
    loss, zero = strategy.run(step, args=(str(tmp_path / "first"), 1))
    loss, zero = strategy.run(step, args=(str(tmp_path / "go"), 1))
    assert not loss.is_done
    more = strategy.run(step, args=(str(tmp_path / "first"), 2))
    _, wrong = more
    (tmp_path / "go").touch()
    assert strategy.reduce("mean", loss).item() == 3.0
    assert strategy.local_results(zero) == (0,)
    with pytest.raises(
        StrategyError, match="a step returned 3 values, but an earlier step of the same function returned 2"
    ):
        strategy.local_results(wrong)[0]
    assert len(list(more)) == 3


def test_lists_may_have_another_length_in_each_step(strategy: sg.ParameterServerStrategy) -> None:
    def step(number: int) -> list[int]:
        return list(range(number))

    results = [[strategy.local_results(each)[0] for each in strategy.run(step, args=(size,))] for size in (4, 4, 2)]
    assert results == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]


def test_sum_of_very_many_results_can_be_computed(strategy: sg.ParameterServerStrategy) -> None:
    total = 0
    for number in range(1200):  # more than functions can be inside each other
        total += strategy.reduce("sum", strategy.run(int, args=(number,)))
    assert total == 1199 * 600


def test_error_is_raised_where_a_result_is_read_or_by_the_next_run(strategy: sg.ParameterServerStrategy) -> None:
    loss = strategy.reduce("mean", strategy.run(fail))
    with pytest.raises(ValueError, match="bad row 812"):
        float(loss)
    assert strategy.run(int).wait()[0] == 0  # it was told once
    strategy.reduce("mean", strategy.run(fail))
    with pytest.raises(ValueError, match="bad row 812"):
        run_for_a_while(strategy)
    with pytest.raises(StrategyError, match="no reduction named 'avg'"):
        strategy.reduce("avg", strategy.run(int))


def run_for_a_while(strategy: sg.ParameterServerStrategy) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        strategy.reduce("mean", strategy.run(int))


def test_asynchronous_training_is_as_accurate_as_one_device(strategy: sg.ParameterServerStrategy) -> None:
    """Both see the 1400 digits ten times, 14000 samples in batches of 28."""
    with np.load(DIGITS) as arrays:
        images = torch.from_numpy(arrays["images"]).float().div(16).flatten(1)
        labels = torch.from_numpy(arrays["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]

    def accuracy(chosen: sg.Strategy) -> float:
        torch.manual_seed(1)
        with chosen.scope():
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        step = plain_step(model, optimizer)
        for _ in range(10):
            for batch in chosen.distribute((images[train], labels[train]), global_batch_size=28):
                loss = chosen.reduce("mean", chosen.run(step, args=batch))
        assert float(loss) < 1
        with torch.no_grad():
            return (model(images[test]).argmax(1) == labels[test]).float().mean().item()

    with sg.OneDeviceStrategy("cpu:0") as one_device:
        expected = accuracy(one_device)
    assert expected > 0.93
    assert accuracy(strategy) > expected - 0.02
    used = strategy.staleness()
    assert len(used) == NUM_WORKERS
    assert max(max(counts) for counts in used.values()) > 0  # it was not one worker after the other


# Keras


def make_keras(learning_rate: float = 0.125) -> Any:
    """A model whose bias falls by the learning rate in every step, with a metric that no update changes."""
    import keras  # only here: it takes seconds

    keras.utils.set_random_seed(1)

    def mean_of_targets(targets: Any, _: Any) -> Any:
        return targets

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    loss, sgd = (lambda _, outputs: outputs.mean()), keras.optimizers.SGD(learning_rate)
    model.compile(loss=loss, optimizer=sgd, metrics=[mean_of_targets])
    return model


def test_keras_fit_keeps_all_workers_busy_and_counts_each_step_and_example_once(
    strategy: sg.ParameterServerStrategy, tmp_path: Path
) -> None:
    import keras

    class Meeting(keras.layers.Layer):  # type: ignore[misc, name-defined]
        """Where workers meet; not in the first step of an epoch, whose logs are waited for."""

        def call(self, x: torch.Tensor) -> torch.Tensor:
            if x.device.type != "meta" and x[0, 0] >= 4:
                meet(str(tmp_path))
            return x

    class Record(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.logs: list[dict[str, float]] = []
            self.biases: list[float] = []

        def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
            self.logs.append(dict(logs))

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            self.biases.append(self.model.layers[-1].bias.value.item())

    with strategy.scope():
        model = make_keras()
        meeting = keras.Sequential([keras.layers.Input((4,)), Meeting(), *model.layers])
        meeting.compile(loss=model.loss, optimizer=keras.optimizers.SGD(0.125), metrics=[lambda y, _: y])
    record, data = Record(), np.zeros((42, 4), "float32")
    data[:, 0], targets = np.arange(42), np.arange(42.0)
    history = meeting.fit(
        data,
        targets,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[record],
        validation_data=(data, targets),
    ).history
    assert len(list(tmp_path.iterdir())) == NUM_WORKERS
    metrics = [name for name in history if name != "loss" and not name.startswith("val_")]
    for name in (*metrics, *(f"val_{name}" for name in metrics)):
        assert [float(each) for each in history[name]] == pytest.approx([targets.mean()] * 2), name
    assert record.biases == [-0.125 * 11, -0.125 * 22]
    assert meeting.optimizer.iterations.value.item() == 22
    assert len(record.logs) == 22
    assert all("loss" in logs for logs in record.logs)


def test_keras_steps_one_after_the_other_equal_one_device(strategy: sg.ParameterServerStrategy) -> None:
    import keras

    def make() -> Any:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential([layers.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(1)])
        model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.01), metrics=["mae"])
        return model

    data = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)).numpy()
    expected = make()
    with strategy.scope():
        model = make()
    for each in np.split(data, 5):  # each is waited for
        assert model.train_on_batch(each, each.sum(1)) == expected.train_on_batch(each, each.sum(1))
    found, wanted = (each.evaluate(data, data.sum(1), verbose=0) for each in (model, expected))
    assert list(map(float, found)) == pytest.approx(list(map(float, wanted)), rel=1e-6)
    assert np.array_equal(model.predict(data, verbose=0), expected.predict(data, verbose=0))


def test_error_in_keras_fit_is_raised_and_the_model_can_be_used(strategy: sg.ParameterServerStrategy) -> None:
    with strategy.scope():
        model = make_keras()
    data, targets = np.ones((40, 4), "float32"), np.ones(40)
    model.fit(data, targets, batch_size=4, verbose=0)
    bias = model.layers[0].bias
    assert bias.value.item() == -10 * 0.125

    def batches() -> Iterator[Any]:
        for width in (4, 4, 4, 7):
            yield np.ones((4, width), "float32"), targets[:4]

    with pytest.raises(ValueError, match=r"expected shape=\(None, 4\)|incompatible"):
        model.fit(batches(), steps_per_epoch=4, verbose=0, shuffle=False)
    assert bias.value.item() == -13 * 0.125
    model.fit(data, targets, batch_size=4, verbose=0)
    assert bias.value.item() == -23 * 0.125


def test_updates_without_an_optimizer_are_made_one_after_the_other(
    strategy: sg.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    def add() -> None:
        with torch.no_grad():
            model.weight.add_(1.0)

    with torch.no_grad():
        model.weight.zero_()
    results = [strategy.run(lambda: sg.get_replica_context().update(add)) for _ in range(20)]  # type: ignore[union-attr]
    for each in results:
        each.wait()
    assert model.state_dict()["weight"].item() == 20.0
