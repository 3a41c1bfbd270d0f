"""Metrics that a step of one's own updates, as TensorFlow's guides on custom training do.

Compared with the same metric on one device, where each step has the whole batch. Numbers of TensorFlow are those of the
examples in the documents of its version 2.15.
"""

import copy
from collections.abc import Callable
from typing import Any

import keras
import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from tests.foreign.parts import made, mlp, vectors
from tests.foreign.programs import SELDOM, Distributed, Plain, Program, Programs, Runner

# The joining of buffers over workers is shown elsewhere.
programs = Programs(seldom=(*SELDOM, "mirrored 3 torch", "2 workers of 1"))
# Even, uneven, and fewer rows than there are replicas.
SIZES = (6, 7, 1)


def batches(sizes: tuple[int, ...] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(5)
    return [(torch.rand(size, 3, generator=numbers), torch.arange(size) % 3) for size in sizes]


def family() -> dict[str, Any]:
    return {
        "mean": sg.metrics.Mean(),
        "weighted": sg.metrics.Mean(),
        "column": sg.metrics.Mean(),
        "loss": sg.metrics.Mean(),
        "sum": sg.metrics.Sum(),
        "accuracy": sg.metrics.Accuracy(),
        "binary": sg.metrics.BinaryAccuracy(threshold=0.4),
        "categorical": sg.metrics.CategoricalAccuracy(),
        "sparse": sg.metrics.SparseCategoricalAccuracy(),
        "mse": sg.metrics.MeanSquaredError(),
        "mae": sg.metrics.MeanAbsoluteError(),
        "rmse": sg.metrics.RootMeanSquaredError(),
    }


def update_all(metrics: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> None:
    one_hot = functional.one_hot(y, 3)
    metrics["mean"].update_state(x)
    metrics["weighted"].update_state(x.sum(1), sample_weight=x[:, 0])
    metrics["column"].update_state(x.sum(1), sample_weight=x[:, :1])
    metrics["loss"].update_state(functional.cross_entropy(x, y))
    metrics["sum"].update_state(x)
    metrics["accuracy"].update_state(y, x.argmax(1))
    metrics["binary"].update_state(one_hot, x)
    metrics["categorical"].update_state(one_hot, x)
    metrics["sparse"].update_state(y[:, None], x)
    for name in ("mse", "mae", "rmse"):
        metrics[name].update_state(one_hot, x)


def results(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(metric.result()) for name, metric in metrics.items()}


@programs(linear=True)
def metrics_over_epochs(on: Runner) -> Any:
    with on.scope():
        metrics = family()
    found = []
    for _ in range(2):
        for x, y in batches():
            on(lambda x, y: update_all(metrics, x, y), x, y)
        found.append(results(metrics))
        for metric in metrics.values():
            metric.reset_state()
    return found, results(metrics)


@programs()
def losses_and_accuracy_of_the_custom_training_guide(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    with on.scope():
        loss_of_epoch, accuracy = sg.metrics.Mean(name="loss"), sg.metrics.SparseCategoricalAccuracy()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = model(x)
        loss = functional.cross_entropy(found, y)
        loss.backward()
        optimizer.step()
        loss_of_epoch.update_state(loss)
        accuracy.update_state(y, found)
        return loss

    told = []
    for size in (8, 7, 1):
        on(step, *vectors(size))
        told.append((loss_of_epoch.result(), accuracy.result()))
    return told, loss_of_epoch.state_dict(), dict(model.named_parameters())


@programs(linear=True)
def a_metric_as_a_part_of_a_model(on: Runner) -> Any:
    """Saved and restored with it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.seen = sg.metrics.Sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.update_state(torch.ones(len(x)))
            return self.inner(x)

    (net,) = made(on, Net)[:1]
    for x, _ in batches():
        on(net, x)
    saved = {name: each.clone() for name, each in net.state_dict().items() if "seen" in name}
    net.seen.reset_state()
    on(net, batches()[0][0])
    after = net.seen.result()
    net.load_state_dict(saved, strict=False)
    on(net, batches()[0][0])
    return saved, after, net.seen.result()


@programs(linear=True)
def a_metric_of_a_class_of_ones_own(on: Runner) -> Any:
    class Largest(sg.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", float("-inf"), "max")

        def update_state(self, values: torch.Tensor) -> None:
            self.value = torch.maximum(self.value, values.max())

        def compute(self) -> torch.Tensor:
            return self.value

    with on.scope():
        largest = Largest()
    found = []
    for x, _ in batches():
        on(largest.update_state, x)
        found.append(float(largest.result()))
    return found


# Keras' metrics


class TruePositives(keras.metrics.Metric):
    """That of Keras' guide on metrics of one's own."""

    def __init__(self, name: str = "true_positives") -> None:
        super().__init__(name=name)
        self.found = self.add_variable(shape=(), name="found", initializer="zeros")
        self.last = self.add_variable(shape=(), name="last", initializer="zeros", aggregation="only_first_replica")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.found.assign(self.found + keras.ops.sum(keras.ops.cast(y_true == y_pred, "float32")))
        self.last.assign(7.0)

    def result(self) -> Any:
        return self.found + self.last


def kerases() -> dict[str, Any]:
    return {
        "mean": keras.metrics.Mean(),
        "loss": keras.metrics.Mean(),
        "sum": keras.metrics.Sum(),
        "sparse": keras.metrics.SparseCategoricalAccuracy(),
        "mse": keras.metrics.MeanSquaredError(),
        "precision": keras.metrics.Precision(),
        "auc": keras.metrics.AUC(num_thresholds=9),
        "iou": keras.metrics.MeanIoU(3),
        "own": TruePositives(),
    }


def update_kerases(metrics: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> None:
    one_hot = functional.one_hot(y, 3)
    metrics["mean"].update_state(x)
    metrics["loss"].update_state(functional.cross_entropy(x, y))
    metrics["sum"](x)
    metrics["sparse"].update_state(y, x)
    for name in ("mse", "precision", "auc"):
        metrics[name].update_state(one_hot, x)
    for name in ("iou", "own"):
        metrics[name].update_state(y, x.argmax(1))


@programs(linear=True, tolerance=1e-5)
def metrics_of_keras_over_epochs(on: Runner) -> Any:
    with on.scope():
        metrics = kerases()
    found = []
    for _ in range(2):
        for x, y in batches():
            on(lambda x, y: update_kerases(metrics, x, y), x, y)
            found.append(results(metrics))
        for metric in metrics.values():
            metric.reset_state()
    return found, results(metrics)


@programs(without=("2 workers of 1",))
def a_metric_of_keras_in_a_step_and_in_fit(on: Runner) -> Any:
    x, y = torch.linspace(0, 1, 14).reshape(7, 2), torch.arange(7.0)
    with on.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        error = keras.metrics.MeanAbsoluteError()
        model.compile(loss="mse", optimizer="sgd", metrics=[error])
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    found = [float(error.result())]
    on(lambda x, y: error.update_state(y, x.sum(1)), x, y)
    found.append(float(error.result()))
    model.evaluate(x, y, batch_size=4, verbose=0)
    return [*found, float(error.result())]


def test_a_metric_of_keras_is_not_reset_in_a_step(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            mean = keras.metrics.Mean()
        with pytest.raises(sg.errors.StratagemError, match=r"Mean\.reset_state\(\) was called inside replica"):
            strategy.run(mean.reset_state)


# torchmetrics: its documented interface, for machines without it


def dim_zero_sum(value: torch.Tensor) -> torch.Tensor:
    return value.sum(0)


def dim_zero_max(value: torch.Tensor) -> torch.Tensor:
    return value.amax(0)


class LikeTorchmetrics(nn.Module):
    """As `torchmetrics.Metric` keeps its state: attributes that `reset` replaces, methods that are wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.sync_on_compute = self._to_sync = True
        self._defaults: dict[str, Any] = {}
        self._reductions: dict[str, Any] = {}
        self._wrap()
        self._computed: Any = None
        self._update_count = 0

    def _wrap(self) -> None:
        update, compute = self.update, self.compute

        def counted(*args: Any) -> None:
            self._computed, self._update_count = None, self._update_count + 1
            update(*args)

        def cached() -> Any:
            assert not self._to_sync
            assert self._update_count
            if self._computed is None:
                self._computed = compute()
            return self._computed

        self.update, self.compute = counted, cached  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name not in ("update", "compute")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._wrap()

    def add_state(self, name: str, default: Any, dist_reduce_fx: Any = None) -> None:
        setattr(self, name, default)
        self._defaults[name] = copy.deepcopy(default)
        self._reductions[name] = {"sum": dim_zero_sum, "max": dim_zero_max}.get(dist_reduce_fx, dist_reduce_fx)

    def reset(self) -> None:
        self._computed, self._update_count = None, 0
        for name, default in self._defaults.items():
            setattr(self, name, default.detach().clone())

    def update(self, *args: Any) -> None:
        raise NotImplementedError

    def compute(self) -> Any:
        raise NotImplementedError


class Hits(LikeTorchmetrics):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-1.0), dist_reduce_fx="max")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.correct += (preds.argmax(1) == target).sum()
        self.total = self.total + target.numel()
        self.largest = torch.maximum(self.largest, preds.max())

    def compute(self) -> Any:
        return self.correct / self.total, self.largest


class Rows(LikeTorchmetrics):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")


@programs(linear=True)
def a_metric_with_the_interface_of_torchmetrics(on: Runner) -> Any:
    with on.scope():
        hits = Hits()
        hits.sync_on_compute = hits._to_sync = False  # as it is without torch.distributed

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        hits.update(x, y)

    found = []
    for _ in range(2):
        for x, y in batches():
            on(step, x, y)
            found.append(hits.compute())
        hits.reset()
    return found


@programs(linear=True)
def metrics_of_torchmetrics(on: Runner) -> Any:
    torchmetrics = pytest.importorskip("torchmetrics")
    with on.scope():
        accuracy, mean = torchmetrics.classification.MulticlassAccuracy(3, average="micro"), torchmetrics.MeanMetric()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        accuracy(x, y)
        mean.update(x)

    found = []
    for _ in range(2):
        for x, y in batches():
            on(step, x, y)
            found.append((accuracy.compute(), mean.compute()))
        accuracy.reset()
        mean.reset()
    return found


@programs(linear=True)
def a_collection_of_torchmetrics(on: Runner) -> Any:
    torchmetrics = pytest.importorskip("torchmetrics")
    with on.scope():
        of_classes = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.classification.MulticlassAccuracy(3),
                "f1": torchmetrics.classification.MulticlassF1Score(3),
                "confusion": torchmetrics.classification.MulticlassConfusionMatrix(3),
                "area": torchmetrics.classification.MulticlassAUROC(3, thresholds=20),
            }
        )
        largest, smallest, total = torchmetrics.MaxMetric(), torchmetrics.MinMetric(), torchmetrics.SumMetric()
        error, explained = torchmetrics.MeanSquaredError(), torchmetrics.R2Score()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        of_classes.update(x, y)
        for metric in (largest, smallest, total):
            metric.update(x)
        for metric in (error, explained):
            metric.update(x[:, 0], y.float())

    found = []
    for _ in range(2):
        for x, y in batches():
            on(step, x, y)
            found.append(
                (of_classes.compute(), *(each.compute() for each in (largest, smallest, total, error, explained)))
            )
        for metric in (of_classes, largest, smallest, total, error, explained):
            metric.reset()
    return found


def test_states_that_are_lists_are_refused(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        outside = Hits()
        with pytest.raises(sg.errors.StrategyError, match=r"Hits .* created outside strategy\.scope\(\)"):
            strategy.run(lambda: outside.update(*batches()[0]))
        with strategy.scope():
            rows = Rows()
        with pytest.raises(sg.errors.StrategyError, match="Rows keeps 'rows' with dist_reduce_fx='cat'"):
            strategy.run(rows.update)


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_metrics_are_those_of_the_global_data(program: Program, row: sg.Strategy) -> None:
    program.check(row)


MAKERS: dict[str, Callable[[], sg.Strategy]] = {
    "mirrored 1": lambda: sg.MirroredStrategy(["cpu:0"]),
    "mirrored 4": lambda: sg.MirroredStrategy([f"cpu:{number}" for number in range(4)]),
    "local sgd": lambda: sg.LocalSGDStrategy(3, devices=["cpu:0", "cpu:1", "cpu:2"]),
    "asynchronous": lambda: sg.ParameterServerStrategy(2),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_metrics_are_global_between_any_two_runs(maker: str, four_cpus: None) -> None:
    with MAKERS[maker]() as strategy:
        found, expected = (read_after_each_step(on) for on in (Distributed(strategy), Plain()))
    torch.testing.assert_close(found, expected)


def read_after_each_step(on: Runner) -> Any:
    with on.scope():
        metrics, kinds, hits = family(), kerases(), Hits()
        hits.sync_on_compute = hits._to_sync = False

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        update_all(metrics, x, y)
        update_kerases(kinds, x, y)
        hits.update(x, y)

    found = []
    for _ in range(2):
        for x, y in batches():
            on(step, x, y)
            found.append((results(metrics), results(kinds), hits.compute()))
        for metric in (*metrics.values(), *kinds.values()):
            metric.reset_state()
        hits.reset()
    return found


def test_reading_a_metric_lets_replicas_that_train_alone_go_on_alone(four_cpus: None) -> None:
    with sg.LocalSGDStrategy(4, devices=["cpu:0", "cpu:1"]) as strategy:
        on = Distributed(strategy)
        model, optimizer = made(on, lambda: nn.Linear(4, 1))
        with strategy.scope():
            loss_so_far = sg.metrics.Mean()

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            loss_so_far.update_state(loss)
            return model.weight.detach().clone()

        weights = on(step, vectors(4)[0])
        assert float(loss_so_far.result()) > 0
        assert float(loss_so_far.count) == 1
        assert not torch.equal(weights[0], weights[1])
        again = on(lambda: model.weight.detach().clone())
        assert not torch.equal(again[0], again[1])


def test_metrics_are_those_of_tensorflow() -> None:
    """The examples of its documents."""
    mean, total, accuracy = sg.metrics.Mean(), sg.metrics.Sum(), sg.metrics.Accuracy()
    mean.update_state([1, 3, 5, 7])
    assert float(mean.result()) == 4.0
    mean.reset_state()
    mean.update_state([1, 3, 5, 7], sample_weight=[1, 1, 0, 0])
    assert float(mean.result()) == 2.0
    total.update_state([1, 3, 5, 7])
    assert float(total.result()) == 16.0
    accuracy.update_state([[1], [2], [3], [4]], [[0], [2], [3], [4]], sample_weight=[1, 1, 0, 0])
    assert float(accuracy.result()) == 0.5
    binary, sparse, squared = (
        sg.metrics.BinaryAccuracy(),
        sg.metrics.SparseCategoricalAccuracy(),
        sg.metrics.MeanSquaredError(),
    )
    binary.update_state([[1], [1], [0], [0]], [[0.98], [1], [0], [0.6]], sample_weight=[1, 0, 0, 1])
    assert float(binary.result()) == 0.5
    sparse.update_state([[2], [1]], [[0.1, 0.6, 0.3], [0.05, 0.95, 0]], sample_weight=[0.7, 0.3])
    assert float(sparse.result()) == pytest.approx(0.3)
    squared.update_state([[0, 1], [0, 0]], [[1, 1], [0, 0]], sample_weight=[1, 0])
    assert float(squared.result()) == 0.5


def test_a_metric_with_nothing_in_it_is_zero() -> None:
    assert all(value == 0 for value in results(family()).values())


def test_a_metric_says_what_is_wrong(four_cpus: None) -> None:
    mean, sparse = sg.metrics.Mean(), sg.metrics.SparseCategoricalAccuracy()
    with pytest.raises(sg.errors.StrategyError, match=r"shape \(2,\) for values of shape \(3,\)"):
        mean.update_state([1, 2, 3], sample_weight=[1, 2])
    with pytest.raises(sg.errors.StrategyError, match=r"y_true of shape \(3,\) and y_pred of shape \(2, 4\)"):
        sparse.update_state([1, 2, 3], torch.zeros(2, 4))
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with pytest.raises(sg.errors.StrategyError, match=r"Mean .* created outside strategy\.scope\(\)"):
            strategy.run(lambda: mean.update_state(1.0))
        with strategy.scope():
            inside = sg.metrics.Mean()
        with pytest.raises(sg.errors.StratagemError, match=r"Mean\.reset_state\(\) was called inside replica"):
            strategy.run(inside.reset_state)


def test_one_number_in_a_sum_is_the_part_of_its_replica(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            own, of_keras, lists, loss = sg.metrics.Sum(), keras.metrics.Sum(), keras.metrics.Mean(), sg.metrics.Mean()

        def step(x: torch.Tensor) -> None:
            own.update_state(x.sum())
            of_keras.update_state(float(len(x)))
            lists.update_state(x.tolist())
            loss.update_state(x.mean(), sample_weight=1.0)

        for batch in strategy.distribute([torch.arange(3.0), torch.arange(1.0) + 7]):
            strategy.run(step, args=(batch,))
        assert float(own.result()) == 10.0
        assert float(of_keras.result()) == 4.0
        assert float(lists.result()) == 2.5
        assert float(loss.result()) == 4.0  # of 1 and 7: each batch counts once


def test_metrics_that_are_built_in_a_step_are_refused(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            score = keras.metrics.F1Score(average="macro")

        def step(y: torch.Tensor) -> torch.Tensor:
            score.update_state(y, y)
            return keras.metrics.Mean()(y)  # one of its own may do as it likes

        labels = torch.eye(4)
        with pytest.raises(sg.errors.StrategyError, match="F1Score 'f1_score' makes its variables in its first update"):
            float(strategy.reduce("mean", strategy.run(step, args=(labels,))))


def test_a_metric_that_is_built_in_the_scope_works(four_cpus: None) -> None:
    labels, found = torch.eye(3)[[0, 1, 2, 0, 1]], torch.eye(3)[[0, 1, 1, 2, 1]]
    plain = keras.metrics.F1Score(average="macro")
    plain.update_state(labels, found)
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            score = keras.metrics.F1Score(average="macro")
            score.update_state(labels, found)
            score.reset_state()
        for batch in strategy.distribute([(labels, found)]):
            strategy.run(score.update_state, args=batch)
        assert float(score.result()) == pytest.approx(float(plain.result()))


class Forgetful(sg.metrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def update_state(self, values: torch.Tensor) -> None:
        self.total += values.sum()

    def compute(self) -> torch.Tensor:
        return self.total


def test_state_that_was_not_declared_is_refused(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            metric = Forgetful()
        with pytest.raises(sg.errors.StrategyError, match="Forgetful sets 'total' in a step"):
            strategy.run(metric.update_state, args=(torch.ones(2),))
    with pytest.raises(sg.errors.StrategyError, match="keeps 'seen' in a buffer"):
        Forgetful().register_buffer("seen", torch.zeros(1))
    with pytest.raises(sg.errors.StrategyError, match=r"got shapes \(3, 2\) and \(2, 3\)"):
        sg.metrics.MeanSquaredError().update_state(torch.ones(3, 2), torch.ones(2, 3))


def test_compile_takes_metrics_of_keras_and_steps_do_not_fit(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            with pytest.raises(sg.errors.StrategyError, match=r"write keras\.metrics\.MeanAbsoluteError"):
                model.compile(loss="mse", metrics=[sg.metrics.MeanAbsoluteError()])
            model.compile(loss="mse")
        with pytest.raises(sg.errors.StrategyError, match=r"fit\(\) was (called|used) inside"):
            strategy.run(lambda: model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0) and None)
