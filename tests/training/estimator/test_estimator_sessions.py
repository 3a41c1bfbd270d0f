"""What a session keeps, whom it tells and what it leaves, however it ends."""

import copy
import functools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem import estimator as sge
from stratagem.errors import StratagemWarning
from stratagem.training.checkpoints import all_checkpoints, load_checkpoint, step_of
from tests.training.estimators import FailAt, Record, X, Y, accuracy, batches, make, one_pass, weights

MAIN = os.getpid()


@pytest.fixture(scope="module")
def mirrored(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=20.0) as strategy:
        strategy.run(int)
        yield strategy


def of(model_fn: Callable[..., sge.EstimatorSpec], folder: Path, **settings: Any) -> sge.Estimator:
    config = sge.RunConfig(**{"random_seed": 3, "save_summary_steps": 0, "save_checkpoints_steps": 2} | settings)
    return sge.Estimator(model_fn, folder, config)


# Where a training goes on


@pytest.mark.parametrize("moment", ["created", "before", "after"])
def test_checkpoint_of_a_hook_goes_on_with_the_very_next_batch(tmp_path: Path, moment: str) -> None:
    class SaveAndFail(sge.SessionRunHook):
        def after_create_session(self, run_context: sge.RunContext) -> None:
            if moment == "created":
                self._save_and_fail(run_context)

        def before_run(self, run_context: sge.RunContext) -> None:
            if moment == "before" and run_context.global_step == 3:
                self._save_and_fail(run_context)

        def after_run(self, run_context: sge.RunContext, run_values: sge.RunValues) -> None:
            if moment == "after" and run_context.global_step == 3:
                self._save_and_fail(run_context)

        def _save_and_fail(self, run_context: sge.RunContext) -> None:
            run_context.save(finished=False)
            raise ZeroDivisionError

    whole, rest = Record(), Record()
    make(tmp_path / "a").train(batches, hooks=[whole], max_steps=8)
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "b").train(batches, hooks=[SaveAndFail()], max_steps=8)
    make(tmp_path / "b").train(batches, hooks=[rest], max_steps=8)
    assert rest.losses == pytest.approx(whole.losses[0 if moment == "created" else 3 :], abs=1e-6)


class Counted(Dataset[Any]):
    """Draws random numbers with every example, as images do that are turned and cut."""

    def __init__(self, loaded: list[int]) -> None:
        self._loaded = loaded

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        self._loaded.append(index)
        return X[index] + torch.rand(6), Y[index]


def test_examples_that_were_used_are_not_loaded_again(tmp_path: Path) -> None:
    loaded: list[int] = []

    def loader() -> sge.Input:
        return sge.Input(Counted(loaded), global_batch_size=10, shuffle=True, num_epochs=3)

    whole, rest = Record(), Record()
    make(tmp_path / "a", save_checkpoints_steps=7).train(loader, hooks=[whole])
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "b", save_checkpoints_steps=7).train(loader, hooks=[FailAt(7)])
    loaded.clear()
    make(tmp_path / "b", save_checkpoints_steps=7).train(loader, hooks=[rest])
    assert rest.losses == whole.losses[7:]
    assert len(loaded) == 80


def test_each_training_has_an_order_of_its_own_that_can_be_had_again(tmp_path: Path) -> None:
    records = [Record(), Record(), Record(), Record()]
    for name in "ab":
        estimator = make(tmp_path / name)
        for _ in range(2):
            estimator.train(batches, hooks=[records[0]], steps=4)
            records.append(records.pop(0))
    first, second, *again = (record.losses for record in records)
    assert [first, second] == again
    seen: list[torch.Tensor] = []

    class Seen(sge.SessionRunHook):
        def after_create_session(self, run_context: sge.RunContext) -> None:
            run_context.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))

    for _ in range(2):
        make(tmp_path / "c").train(batches, hooks=[Seen()], steps=1)
    assert not torch.equal(*seen)


def test_ctrl_c_inside_a_step_leaves_the_last_checkpoint_and_a_strategy_that_works(
    tmp_path: Path, mirrored: sg.MirroredStrategy
) -> None:
    steps: list[int] = []

    def interrupted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if os.getpid() == MAIN:
            steps.append(1)
            if len(steps) == 6:
                signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(outputs, labels)

    def model_fn(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
        module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        return sge.EstimatorSpec(mode, module, interrupted, optimizer=optimizer)

    with pytest.raises(KeyboardInterrupt):
        of(model_fn, tmp_path / "a", train_distribute=mirrored).train(batches, max_steps=9)
    assert len(steps) == 6
    assert [step_of(path) for path in all_checkpoints(tmp_path / "a")] == [2, 4]
    for name in "ab":
        of(model_fn, tmp_path / name, train_distribute=mirrored).train(batches, max_steps=9)
    resumed, whole = (weights(of(model_fn, tmp_path / name)) for name in "ab")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_failures_of_the_users_functions_leave_a_strategy_that_works(
    tmp_path: Path, mirrored: sg.MirroredStrategy
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    def in_loss(mode: str) -> sge.EstimatorSpec:
        module = nn.Linear(6, 2)
        return sge.EstimatorSpec(mode, module, fail, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))

    def in_model_fn(features: Any) -> sge.EstimatorSpec:
        nn.Linear(6, 2)
        return fail()  # type: ignore[no-any-return]

    def failing_stream() -> Iterator[Any]:
        yield X[:4], Y[:4]
        fail()

    class FailAtEnd(sge.SessionRunHook):
        def end(self, run_context: sge.RunContext) -> None:
            fail()

    good = make(tmp_path / "good", mirrored)
    calls: list[Callable[[], Any]] = [
        lambda: of(in_loss, tmp_path / "a", train_distribute=mirrored).train(batches),
        lambda: of(in_model_fn, tmp_path / "a", train_distribute=mirrored).train(batches),
        lambda: good.train(fail),
        lambda: good.train(failing_stream),
        lambda: good.train(batches, hooks=[FailAtEnd()], steps=1),
    ]
    for call in calls:
        with pytest.raises(ZeroDivisionError):
            call()
    assert all_checkpoints(tmp_path / "a") == all_checkpoints(tmp_path / "good") == []
    good.train(batches, steps=2)
    predictions = good.predict(one_pass)
    next(predictions)
    good.train(batches, steps=1)  # while a prediction is under way
    assert sum(1 for _ in predictions) == 49
    assert step_of(good.latest_checkpoint() or "") == 3


# What a checkpoint holds


@pytest.mark.parametrize("kind", ["milestones", "warm-up", "chain", "one cycle"])
def test_schedulers_go_on_where_they_were(tmp_path: Path, kind: str) -> None:
    schedulers = torch.optim.lr_scheduler

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "milestones":
            return schedulers.MultiStepLR(optimizer, [2, 5, 6])
        if kind == "warm-up":
            return sg.WarmUp(optimizer, 5, after=schedulers.ExponentialLR(optimizer, 0.5))
        if kind == "chain":
            parts = [schedulers.ConstantLR(optimizer, 0.1), schedulers.CosineAnnealingLR(optimizer, 4)]
            return schedulers.SequentialLR(optimizer, parts, milestones=[4])
        return schedulers.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)

    def model_fn(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
        module = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.8, momentum=0.5)
        loss = nn.functional.cross_entropy
        return sge.EstimatorSpec(mode, module, loss, optimizer=optimizer, scheduler=scheduler(optimizer))

    whole, rest = Record(), Record()
    of(model_fn, tmp_path / "a", save_checkpoints_steps=3).train(batches, hooks=[whole], max_steps=8)
    with pytest.raises(KeyboardInterrupt):
        of(model_fn, tmp_path / "b", save_checkpoints_steps=3).train(batches, hooks=[FailAt(4)], max_steps=8)
    of(model_fn, tmp_path / "b", save_checkpoints_steps=3).train(batches, hooks=[rest], max_steps=8)
    assert len(set(whole.rates)) > 2
    assert rest.rates == whole.rates[3:]
    assert rest.losses == pytest.approx(whole.losses[3:], abs=1e-6)


def averaging(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
    """A model whose averages are kept, and evaluated with."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    ema = sg.ExponentialMovingAverage(0.7).track(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def update(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.apply()

    class Swap(sge.SessionRunHook):
        def after_create_session(self, run_context: sge.RunContext) -> None:
            self._swapped = ema.swapped(run_context.module)
            self._swapped.__enter__()

    return sge.EstimatorSpec(
        mode,
        module,
        nn.functional.cross_entropy,
        optimizer=optimizer,
        train_op=update,
        extra_state={"ema": ema, "scaler": scaler} if mode == "train" else {"ema": ema},
        evaluation_hooks=[Swap()],
    )


def test_averages_and_scalers_are_kept_and_evaluated_with(tmp_path: Path, mirrored: sg.MirroredStrategy) -> None:
    states = []
    for name, strategy in (("one", None), ("many", mirrored)):
        estimator = of(averaging, tmp_path / name, train_distribute=strategy, eval_distribute=strategy)
        with pytest.raises(KeyboardInterrupt):
            estimator.train(one_pass, hooks=[FailAt(3)])
        estimator.train(one_pass)
        state = load_checkpoint(estimator.latest_checkpoint() or "")
        assert state["extra_state"]["scaler"]["scale"] == 32.0
        assert state["global_step"] == 4
        averages = {
            key.removesuffix("/ExponentialMovingAverage"): value
            for key, value in state["extra_state"]["ema"].items()
            if key != "unfilled"
        }
        assert not torch.equal(averages["0.weight"], state["module"]["0.weight"])
        module = averaging(None, None, "eval").module
        module.load_state_dict(averages)
        with torch.no_grad():
            expected = nn.functional.cross_entropy(module(X), Y).item()
        assert estimator.evaluate(one_pass)["loss"] == pytest.approx(expected, abs=1e-5)
        states.append(averages)
    for name, average in states[0].items():
        torch.testing.assert_close(average, states[1][name], atol=1e-5, rtol=1e-4)


def test_other_extra_state_is_named(tmp_path: Path) -> None:
    def without(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        return sge.EstimatorSpec(mode, module, nn.functional.cross_entropy, optimizer=optimizer)

    of(averaging, tmp_path).train(one_pass)
    with pytest.raises(sge.CheckpointMismatchError, match=r"extra_state of \['ema', 'scaler'\], .* gave none"):
        of(without, tmp_path).train(one_pass)
    assert of(without, tmp_path).evaluate(one_pass)["global_step"] == 4


def test_evaluation_needs_only_a_part_of_what_was_trained(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> sge.EstimatorSpec:
        parts = {"body": nn.Linear(6, 2)}
        if mode == sge.ModeKeys.TRAIN:
            parts["auxiliary"] = nn.Linear(6, 2)
        elif params:
            parts["missing"] = nn.Linear(6, 2)
        module = nn.ModuleDict(parts)
        module.forward = parts["body"].forward  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return sge.EstimatorSpec(mode, module, nn.functional.cross_entropy, optimizer=optimizer)

    sge.Estimator(model_fn, tmp_path, params={}).train(one_pass)
    assert sge.Estimator(model_fn, tmp_path, params={}).evaluate(one_pass)["global_step"] == 4
    with pytest.raises(sge.CheckpointMismatchError, match=r"missing 'missing\.weight'"):
        sge.Estimator(model_fn, tmp_path, params={"more": 1}).evaluate(one_pass)


# Hooks and listeners


def test_saver_of_the_user_takes_the_place_of_the_default_one(tmp_path: Path) -> None:
    told: list[int] = []

    class Told(sge.CheckpointSaverListener):
        def after_save(self, run_context: sge.RunContext, global_step: int) -> None:
            told.append(global_step)

    saver = sge.CheckpointSaverHook(save_steps=3)
    estimator = make(tmp_path, save_checkpoints_steps=1)
    for steps, expected in ((4, [3, 4]), (2, [3, 4, 6])):
        estimator.train(batches, hooks=[saver], steps=steps, saving_listeners=[Told()] if steps == 4 else ())
        assert told == expected
    assert [step_of(path) for path in all_checkpoints(tmp_path)] == [3, 4, 6]
    assert load_checkpoint(estimator.latest_checkpoint() or "")["input"] is None


def test_hooks_can_be_used_for_several_trainings(tmp_path: Path) -> None:
    @dataclass  # so that it has no hash
    class Plain(sge.SessionRunHook):
        num_begun: int = 0

        def begin(self) -> None:
            self.num_begun += 1

    plain, stop = Plain(), sge.StopAtStepHook(num_steps=3)
    for steps in (3, 6):
        make(tmp_path).train(batches, hooks=[plain, stop])
        assert step_of(make(tmp_path).latest_checkpoint() or "") == steps
    assert plain.num_begun == 2


def test_checkpoint_that_cannot_be_written_may_be_a_warning(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class FullDisk(sge.SessionRunHook):
        """Lets no file grow beyond some bytes after steps 2 and 6; the hooks that save come after this one."""

        def before_run(self, run_context: sge.RunContext) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        def after_run(self, run_context: sge.RunContext, run_values: sge.RunValues) -> None:
            if run_context.global_step in (2, 6):
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))

    try:
        estimator = make(tmp_path, save_checkpoints_steps=2, on_save_error="warn")
        with pytest.warns(StratagemWarning, match=r"ckpt-2' could not be written.*goes on without this checkpoint"):
            estimator.train(batches, hooks=[FullDisk()], max_steps=5)
        assert [step_of(path) for path in all_checkpoints(tmp_path)] == [4, 5]
        with pytest.raises(sge.CheckpointWriteError, match=r"ckpt-6' could not be written"):  # nothing more would come
            estimator.train(batches, hooks=[FullDisk()], max_steps=6)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(sge.CheckpointWriteError, match=r"ckpt-6' could not be written"):
            make(tmp_path, save_checkpoints_steps=1).train(batches, hooks=[FullDisk()], max_steps=9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# Functions and metrics of the user's


def test_arguments_that_the_user_has_bound_stay(tmp_path: Path) -> None:
    seen: list[Any] = []

    def input_fn(mode: str, params: dict[str, Any]) -> Any:
        seen.append((str(mode), params))
        return one_pass()

    make(tmp_path, params={"width": 8}).train(functools.partial(input_fn, mode="own"), steps=1)
    assert seen == [("own", {"width": 8})]


class NumSeen:
    def __init__(self) -> None:
        self._total = 0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self._total += len(outputs)

    def compute(self) -> int:
        return self._total


def test_metric_objects_start_anew_with_each_evaluation(tmp_path: Path) -> None:
    estimator = sge.model_to_estimator(
        nn.Linear(6, 2),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        metrics={"seen": NumSeen(), "accuracy": accuracy},
        model_dir=tmp_path,
        config=sge.RunConfig(save_summary_steps=0),
    )
    estimator.train(one_pass)
    assert [estimator.evaluate(one_pass)["seen"] for _ in range(2)] == [50, 50]


def test_warm_start_from_a_path_of_a_module_of_the_users(tmp_path: Path) -> None:
    module = nn.Linear(6, 2)
    given = copy.deepcopy(module.state_dict())
    convert = functools.partial(
        sge.model_to_estimator,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        config=sge.RunConfig(save_summary_steps=0),
    )
    nn.init.zeros_(module.weight)
    convert(module, model_dir=tmp_path / "zeros").train(lambda: DataLoader([(X[0], Y[0])]))
    module.load_state_dict(given)
    chosen = sge.WarmStartSettings(tmp_path / "zeros", "weight")
    warm = convert(module, model_dir=tmp_path / "warm", warm_start_from=chosen)
    warm.train(lambda: DataLoader([(X[0], Y[0])]))
    assert not warm.get_variable_value("weight").any()
    assert torch.equal(warm.get_variable_value("bias"), given["bias"])
