"""An Estimator gives on every strategy what it gives on one device, and goes on where it was stopped."""

import functools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem import estimator as sge
from stratagem.errors import StratagemWarning
from stratagem.training.checkpoints import all_checkpoints, load_checkpoint, step_of
from tests.training.estimators import FailAt, Record, X, Y, accuracy, batches, make, model_fn, one_pass, weights


@pytest.fixture(scope="module")
def mirrored(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=20.0) as strategy:
        with strategy.scope():
            pass
        strategy.run(int)
        yield strategy


@pytest.fixture(params=["default", pytest.param("one_device", marks=pytest.mark.soak), "mirrored"])
def strategy(request: pytest.FixtureRequest, mirrored: sg.MirroredStrategy) -> sg.Strategy | None:
    return {"default": None, "one_device": sg.OneDeviceStrategy("cpu:0"), "mirrored": mirrored}[request.param]


def plain_torch() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The training that all strategies must equal, without stratagem: one pass, in order."""
    torch.manual_seed(3)
    spec = model_fn(X[:16], Y[:16], "train", {})
    assert spec.optimizer is not None
    assert spec.scheduler is not None
    losses = []
    for features, labels in one_pass():
        spec.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(spec.module(features), labels)
        loss.backward()
        spec.optimizer.step()
        spec.scheduler.step()
        losses.append(loss.item())
    return losses, spec.module.state_dict()


# Training


def test_train_equals_plain_torch(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    record = Record()
    estimator = make(tmp_path, strategy)
    assert estimator.train(one_pass, hooks=[record]) is estimator
    losses, expected = plain_torch()
    assert record.losses == pytest.approx(losses, abs=1e-5)
    assert record.rates == pytest.approx([0.05, 0.05, 0.05, 0.025])
    for name, value in weights(estimator).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)


def test_training_with_gradients_that_travel_as_bf16_is_close_to_plain_torch(tmp_path: Path, four_cpus: None) -> None:
    record = Record()
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], exchange_dtype="bf16") as strategy:
        make(tmp_path, strategy).train(one_pass, hooks=[record])
    losses, _ = plain_torch()
    assert record.losses == pytest.approx(losses, abs=0.01)
    assert record.losses != pytest.approx(losses, abs=1e-6)


def test_losses_of_a_shuffled_input_are_those_of_one_device(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    records = [Record(), Record()]
    for record, strategy, name in zip(records, (sg.OneDeviceStrategy(), mirrored), "ab", strict=True):
        make(tmp_path / name, strategy).train(batches, hooks=[record])
    assert len(records[0].losses) == 28
    assert records[0].losses == pytest.approx(records[1].losses, abs=1e-4)
    assert records[0].losses[-1] < records[0].losses[0]


@pytest.mark.parametrize(("kind", "dropout"), [("one_device", 0.3), ("mirrored", 0.3)])
def test_resumed_training_equals_an_uninterrupted_one(
    tmp_path: Path, mirrored: sg.MirroredStrategy, kind: str, dropout: float
) -> None:
    strategy = mirrored if kind == "mirrored" else sg.OneDeviceStrategy()
    settings: dict[str, Any] = {"params": {"dropout": dropout}, "save_checkpoints_steps": 3}
    whole, first, second = Record(), Record(), Record()
    uninterrupted = make(tmp_path / "a", strategy, **settings)
    uninterrupted.train(batches, hooks=[whole], max_steps=14)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "b", strategy, **settings).train(batches, hooks=[first, FailAt(8)], max_steps=14)
    resumed = make(tmp_path / "b", strategy, **settings)
    resumed.train(batches, hooks=[second], max_steps=14)
    assert first.losses == whole.losses[:8]
    assert second.losses == whole.losses[6:]
    assert second.rates == whole.rates[6:]
    expected = weights(uninterrupted)
    for name, value in weights(resumed).items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("kind", ["one_device", "mirrored"])
def test_losses_do_not_depend_on_how_often_a_training_is_saved(
    tmp_path: Path, mirrored: sg.MirroredStrategy, kind: str
) -> None:
    strategy = mirrored if kind == "mirrored" else sg.OneDeviceStrategy()
    records = {every: Record() for every in (1, 3, 100)}
    for every, record in records.items():
        estimator = make(tmp_path / str(every), strategy, params={"dropout": 0.3}, save_checkpoints_steps=every)
        estimator.train(batches, hooks=[record], max_steps=7)
    assert records[1].losses == records[3].losses == records[100].losses


def test_input_that_ends_before_the_steps_is_told(tmp_path: Path) -> None:
    estimator = make(tmp_path / "a")
    with pytest.warns(
        StratagemWarning, match=r"the input ended at step 4, and training was to go on to step 100\. .*num_"
    ):
        estimator.train(one_pass, max_steps=100)
    with pytest.warns(StratagemWarning, match="ended at step 8, and training was to go on to step 14"):
        estimator.train(one_pass, steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.train(one_pass)
        estimator.train(one_pass, steps=4)
        estimator.train(batches, max_steps=100, hooks=[sge.StopAtStepHook(num_steps=2)])


# At the end of a pass and within one; then the same elsewhere.
@pytest.mark.parametrize("at", [4, 5, *(pytest.param(each, marks=pytest.mark.soak) for each in (1, 8))])
def test_training_goes_on_with_the_very_next_batch(tmp_path: Path, at: int) -> None:
    generator = functools.partial(torch.Generator().manual_seed, 5)

    def loader() -> sge.Input:
        return sge.Input(
            DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True, generator=generator()), num_epochs=3
        )

    whole, rest = Record(), Record()
    make(tmp_path / "a").train(loader, hooks=[whole])
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "b", save_checkpoints_steps=1).train(loader, hooks=[FailAt(at, ZeroDivisionError)])
    make(tmp_path / "b").train(loader, hooks=[rest])
    assert rest.losses == pytest.approx(whole.losses[at:], abs=1e-6)


def test_training_goes_on_with_another_number_of_replicas(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    whole, rest = Record(), Record()
    make(tmp_path / "a", save_checkpoints_steps=2).train(batches, hooks=[whole], max_steps=12)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "b", mirrored, save_checkpoints_steps=2).train(batches, hooks=[FailAt(7)], max_steps=12)
    make(tmp_path / "b").train(batches, hooks=[rest], max_steps=12)
    assert rest.losses == pytest.approx(whole.losses[6:], abs=1e-4)


def test_training_cut_short_after_its_last_batch_is_only_brought_to_its_end(tmp_path: Path) -> None:
    class FailAfterLast(sge.CheckpointSaverListener):
        def after_save(self, run_context: sge.RunContext, global_step: int) -> None:
            if global_step == 4:
                raise KeyboardInterrupt

    estimator = make(tmp_path, save_checkpoints_steps=1)
    with pytest.raises(KeyboardInterrupt):
        estimator.train(one_pass, saving_listeners=[FailAfterLast()])
    for steps in (4, 8):  # as if it had not been cut short; then another training
        estimator.train(one_pass)
        assert step_of(estimator.latest_checkpoint() or "") == steps


def test_finished_training_starts_its_input_anew(tmp_path: Path) -> None:
    for steps in (4, 8):
        make(tmp_path, save_checkpoints_steps=4).train(one_pass)
        assert step_of(make(tmp_path).latest_checkpoint() or "") == steps


def test_steps_count_from_the_checkpoint_and_max_steps_from_zero(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted() -> sge.Input:
        calls.append(1)
        return batches()

    estimator = make(tmp_path)
    estimator.train(counted, steps=3).train(counted, steps=2)
    assert step_of(estimator.latest_checkpoint() or "") == 5
    estimator.train(counted, max_steps=5)
    assert len(calls) == 2
    estimator.train(counted, max_steps=7)
    assert step_of(estimator.latest_checkpoint() or "") == 7
    with pytest.warns(StratagemWarning, match="the input ended at step 11"):
        estimator.train(one_pass, max_steps=100)
    assert step_of(estimator.latest_checkpoint() or "") == 11


def test_checkpoints_are_written_every_so_many_steps_and_the_oldest_dropped(tmp_path: Path) -> None:
    make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=3).train(batches, steps=9)
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [6, 8, 9]


def test_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    estimator = make(tmp_path, save_checkpoints_steps=2)
    estimator.train(batches, steps=6)
    (tmp_path / "model.ckpt-6" / "tensors.safetensors").write_bytes(b"torn")
    with pytest.warns(StratagemWarning, match=r"model\.ckpt-6"):
        estimator.train(batches, steps=1)
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [2, 4, 5, 6]


def test_train_op_takes_the_place_of_the_update(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    def clipping(features: torch.Tensor, labels: torch.Tensor, mode: str) -> sge.EstimatorSpec:
        module = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

        def update(loss: torch.Tensor) -> None:
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            optimizer.step()

        loss = nn.functional.cross_entropy
        return sge.EstimatorSpec(mode, module, loss, optimizer=optimizer, train_op=update)

    config = sge.RunConfig(random_seed=0, train_distribute=strategy, save_summary_steps=0)
    estimator = sge.Estimator(clipping, tmp_path, config)
    estimator.train(one_pass, steps=1)
    torch.manual_seed(0)
    start = nn.Linear(6, 2).state_dict()
    moved = torch.stack([(weights(estimator)[name] - start[name]).norm() for name in start]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


def test_adam_state_of_replicas_is_restored(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    estimator = make(tmp_path, mirrored)
    estimator.train(batches, steps=3)
    state = load_checkpoint(estimator.latest_checkpoint() or "")["optimizer"]["state"]
    assert [moments["step"].item() for moments in state.values()] == [3, 3, 3, 3]
    estimator.train(batches, steps=1)
    state = load_checkpoint(estimator.latest_checkpoint() or "")["optimizer"]["state"]
    assert [moments["step"].item() for moments in state.values()] == [4, 4, 4, 4]


# Evaluation and prediction


def test_evaluation_is_that_of_all_examples_at_once(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    estimator = make(tmp_path, strategy)
    estimator.train(batches, steps=10)
    module = model_fn(X, Y, "eval", {}).module
    module.load_state_dict(weights(estimator))
    with torch.no_grad():
        outputs = module(X)
    result = estimator.evaluate(one_pass)
    assert sorted(result) == ["accuracy", "global_step", "loss"]
    assert result["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, Y).item(), abs=1e-5)
    assert result["accuracy"] == pytest.approx(accuracy(outputs, Y).item(), abs=1e-6)
    assert result["global_step"] == 10
    partial = estimator.evaluate(one_pass, steps=2)
    assert partial["loss"] == pytest.approx(nn.functional.cross_entropy(outputs[:32], Y[:32]).item(), abs=1e-5)


class MedianScore:
    def __init__(self) -> None:
        self._seen: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        assert len(outputs) == len(labels)
        self._seen.append(outputs[:, 0])

    def compute(self) -> torch.Tensor:
        return torch.cat(self._seen).median()


def test_metric_object_sees_whole_batches(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    def with_median(features: torch.Tensor, labels: torch.Tensor, mode: str) -> sge.EstimatorSpec:
        torch.manual_seed(0)
        metrics = {"median": MedianScore()}
        return sge.EstimatorSpec(mode, nn.Linear(6, 2), nn.functional.cross_entropy, eval_metric_ops=metrics)

    config = sge.RunConfig(eval_distribute=strategy, save_summary_steps=0)
    estimator = sge.Estimator(with_median, tmp_path, config)
    with pytest.warns(StratagemWarning, match="has no checkpoint"):
        result = estimator.evaluate(one_pass)
    torch.manual_seed(0)
    assert result["median"] == pytest.approx(nn.Linear(6, 2)(X)[:, 0].median().item(), abs=1e-6)


def test_predictions_come_one_by_one_in_order(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    estimator = make(tmp_path, strategy)
    estimator.train(batches, steps=5)
    module = model_fn(X, Y, "infer", {}).module
    module.load_state_dict(weights(estimator))
    with torch.no_grad():
        expected = module(X)
    predictions = list(estimator.predict(one_pass))
    torch.testing.assert_close(torch.stack([each["scores"] for each in predictions]), expected)
    assert [each["class"].item() for each in predictions] == expected.argmax(dim=1).tolist()
    only = next(estimator.predict(lambda: [X[:3]], predict_keys=["class"]))
    assert list(only) == ["class"]
    (batch,) = estimator.predict(lambda: [X[:3]], yield_single_examples=False)
    assert batch["scores"].shape == (3, 2)


def test_predict_is_lazy_and_can_be_left(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    estimator = make(tmp_path, mirrored)
    estimator.train(batches, steps=1)
    given: list[int] = []

    def stream() -> Iterator[torch.Tensor]:
        for start in range(0, 48, 8):
            given.append(start)
            yield X[start : start + 8]

    predictions = estimator.predict(stream)
    assert given == []
    next(predictions)
    predictions.close()  # type: ignore[attr-defined]
    assert len(given) <= 2


def test_evaluating_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    estimator = make(tmp_path)
    estimator.train(batches, steps=1)
    before = torch.get_rng_state()
    estimator.evaluate(lambda: sge.Input((X, Y), global_batch_size=16, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoint_can_be_chosen(tmp_path: Path) -> None:
    estimator = make(tmp_path, save_checkpoints_steps=2)
    estimator.train(batches, steps=6)
    old = str(tmp_path / "model.ckpt-2")
    assert estimator.evaluate(one_pass, checkpoint_path=old)["global_step"] == 2
    assert estimator.evaluate(one_pass)["global_step"] == 6
    first, second = (next(estimator.predict(one_pass, checkpoint_path=path)) for path in (old, None))
    assert not torch.equal(first["scores"], second["scores"])


# train_and_evaluate


def test_train_and_evaluate_evaluates_every_checkpoint(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    whole, beside = Record(), Record()
    make(tmp_path / "alone", strategy, save_checkpoints_steps=4).train(batches, hooks=[whole], max_steps=10)
    seen: list[int] = []

    class Seen(sge.SessionRunHook):
        def end(self, run_context: sge.RunContext) -> None:
            seen.append(run_context.global_step)

    estimator = make(tmp_path / "both", strategy, save_checkpoints_steps=4)
    result = sge.train_and_evaluate(
        estimator,
        sge.TrainSpec(batches, max_steps=10, hooks=[beside]),
        sge.EvalSpec(one_pass, steps=None, hooks=[Seen()], throttle_secs=0),
    )
    assert seen == [4, 8, 10]
    assert result == estimator.evaluate(one_pass)
    assert beside.losses == whole.losses


def test_train_and_evaluate_holds_back_by_throttle(tmp_path: Path) -> None:
    seen: list[int] = []

    class Seen(sge.SessionRunHook):
        def end(self, run_context: sge.RunContext) -> None:
            seen.append(run_context.global_step)

    estimator = make(tmp_path, save_checkpoints_steps=2)
    specs = sge.TrainSpec(batches, max_steps=9), sge.EvalSpec(one_pass, hooks=[Seen()], throttle_secs=3600)
    assert sge.train_and_evaluate(estimator, *specs)["global_step"] == 9
    assert seen == [2, 9]
    assert sge.train_and_evaluate(estimator, *specs)["global_step"] == 9  # nothing left to train


# Hooks, log and summaries


def test_hooks_are_called_at_their_moments(tmp_path: Path) -> None:
    moments: list[str] = []

    class Moments(sge.SessionRunHook):
        def begin(self) -> None:
            moments.append("begin")

        def after_create_session(self, run_context: sge.RunContext) -> None:
            moments.append(f"created in {run_context.mode} at {run_context.global_step}")

        def before_run(self, run_context: sge.RunContext) -> None:
            moments.append("before")

        def after_run(self, run_context: sge.RunContext, run_values: sge.RunValues) -> None:
            moments.append(f"after {run_context.global_step}")
            if run_context.global_step == 2:
                run_context.request_stop()

        def end(self, run_context: sge.RunContext) -> None:
            moments.append("end")

    estimator = make(tmp_path)
    estimator.train(batches, hooks=[Moments()])
    assert moments == ["begin", "created in train at 0", "before", "after 1", "before", "after 2", "end"]
    moments.clear()
    estimator.evaluate(lambda: [(X, Y)], hooks=[Moments()])
    assert moments == ["begin", "created in eval at 2", "before", "after 2", "end"]


def test_stop_at_step_and_logging_hooks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stratagem")
    hooks = [sge.StopAtStepHook(last_step=5), sge.LoggingTensorHook(["loss", "learning_rate"], every_n_iter=2)]
    make(tmp_path, log_step_count_steps=3).train(batches, hooks=hooks)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("(")[1] for line in lines if "learning_rate" in line] == ["step 1)", "step 3)", "step 5)"]
    assert len([line for line in lines if line.startswith("global_step/sec")]) == 1
    assert any(line.endswith("model.ckpt-5") for line in lines)


def test_error_ends_a_training_without_end_and_without_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, save_checkpoints_steps=2).train(batches, hooks=[FailAt(3)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.ckpt-2"]


def test_summaries_can_be_read_by_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = Record()
    estimator = make(tmp_path, save_summary_steps=2)
    estimator.train(batches, hooks=[record], steps=4)
    result = estimator.evaluate(one_pass, name="test")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 4]
    assert events.Scalars("loss")[-1].value == pytest.approx(record.losses[-1], abs=1e-5)
    events = EventAccumulator(str(tmp_path / "eval_test")).Reload()
    assert events.Scalars("accuracy")[0].value == pytest.approx(result["accuracy"], abs=1e-5)


# Warm start, export, conversion


def test_warm_start_takes_chosen_weights(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    old = make(tmp_path / "old", strategy)
    old.train(batches, steps=5)
    chosen = sge.WarmStartSettings(str(tmp_path / "old"), vars_to_warm_start=r"^0\.")
    new = make(tmp_path / "new", strategy, warm_start_from=chosen, random_seed=4)
    taken: dict[str, torch.Tensor] = {}

    class Look(sge.SessionRunHook):
        def after_create_session(self, run_context: sge.RunContext) -> None:
            taken.update({name: each.clone() for name, each in run_context.module.state_dict().items()})

    new.train(batches, hooks=[Look()], steps=1)
    assert torch.equal(taken["0.weight"], weights(old)["0.weight"])
    assert not torch.equal(taken["3.weight"], weights(old)["3.weight"])
    resumed = dict(weights(new))
    new.train(batches, hooks=[Look()], steps=1)  # from its own checkpoint now
    assert torch.equal(taken["0.weight"], resumed["0.weight"])


def test_warm_start_with_other_names(tmp_path: Path) -> None:
    make(tmp_path / "old").train(batches, steps=1)
    renamed = sge.WarmStartSettings(str(tmp_path / "old" / "model.ckpt-1"), "0.bias", {"0.bias": "gone"})
    with pytest.raises(sge.CheckpointMismatchError, match=r"missing '0\.bias'"):
        make(tmp_path / "new", warm_start_from=renamed).train(batches, steps=1)
    with pytest.raises(sge.CheckpointMismatchError, match="fits no weight of the model"):
        make(tmp_path / "new", warm_start_from=sge.WarmStartSettings(str(tmp_path / "old"), "conv")).train(batches)
    with pytest.raises(sge.CheckpointError, match="folder with checkpoints"):
        make(tmp_path / "new", warm_start_from=str(tmp_path / "none")).train(batches)


def test_export_holds_weights_and_signature(tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file

    estimator = make(tmp_path / "model")
    estimator.train(batches, steps=2)
    folder = Path(estimator.export(tmp_path / "exported"))
    exported = load_file(folder / "weights.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in weights(estimator).items())
    signature = json.loads((folder / "signature.json").read_text())
    assert signature["inputs"] == {"dtype": "float32", "shape": [None, 6]}
    assert signature["signatures"]["serving_default"]["class"] == {"dtype": "int64", "shape": [None]}
    assert signature["global_step"] == 2
    with pytest.raises(sge.EstimatorError, match="new or empty"):
        estimator.export(folder)


def test_model_to_estimator_trains_a_copy(tmp_path: Path, strategy: sg.Strategy | None) -> None:
    torch.manual_seed(0)
    module = nn.Linear(6, 2)
    start = {name: each.clone() for name, each in module.state_dict().items()}
    estimator = sge.model_to_estimator(
        module,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
        metrics={"accuracy": accuracy},
        model_dir=tmp_path,
        config=sge.RunConfig(train_distribute=strategy, eval_distribute=strategy, save_summary_steps=0),
    )
    with pytest.warns(StratagemWarning, match="has no checkpoint"):
        before = estimator.evaluate(one_pass)
    with torch.no_grad():
        assert before["loss"] == pytest.approx(nn.functional.cross_entropy(module(X), Y).item(), abs=1e-5)
    estimator.train(batches)
    assert estimator.evaluate(one_pass)["loss"] < before["loss"]
    assert all(torch.equal(start[name], each) for name, each in module.state_dict().items())
