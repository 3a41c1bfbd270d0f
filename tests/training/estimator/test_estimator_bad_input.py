"""What is wrong is said at the earliest call, with the rule, what came and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem import estimator as sge
from stratagem.training.estimator import run_config

X, Y = torch.randn(8, 3), torch.randn(8, 1)
loss = nn.functional.mse_loss


def model_fn(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
    module = nn.Linear(3, 1)
    return sge.EstimatorSpec(mode, module, loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))


def data() -> list[Any]:
    return [(X, Y)]


@pytest.fixture
def estimator(tmp_path: Path) -> sge.Estimator:
    return sge.Estimator(model_fn, tmp_path / "model", sge.RunConfig(save_summary_steps=0))


LAYER = nn.Linear(3, 1)
SGD = torch.optim.SGD(LAYER.parameters(), lr=0.1)
OTHER = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(SGD)

SPECS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "training"}, r"mode is one of 'train', 'eval', 'infer', got 'training'"),
    ({"module": 3}, r"module is a torch module, got int 3"),
    ({"module": None, "loss": torch.ones(1), "train_op": torch.ones(1)}, r"returns the module, and functions for each"),
    ({"module": {"classes": 1}}, r"got dict .* EstimatorSpec\(mode, module, loss=lambda outputs, labels: ..., optim"),
    ({"loss": None}, r"mode 'train' needs loss="),
    ({"loss": torch.ones(1)}, r"loss is a function, got a tensor"),
    ({"loss": 3}, r"loss is a function, got int 3"),
    ({"optimizer": None}, r"needs optimizer=.* got nothing"),
    ({"optimizer": OTHER}, r"SGD has no parameter of module Linear"),
    ({"scheduler": PLATEAU}, r"ReduceLROnPlateau"),
    ({"scheduler": 1}, r"scheduler is a torch LRScheduler, got int 1"),
    ({"eval_metric_ops": [loss]}, r"eval_metric_ops is a dict"),
    ({"eval_metric_ops": {"a": 1}}, r"eval_metric_ops\['a'\] is a function, got int 1"),
    ({"eval_metric_ops": {"mse": sg.metrics.MeanSquaredError()}}, r"update_state takes labels first; write lambda"),
    ({"eval_metric_ops": {"loss": loss}}, r"adds 'loss' itself"),
    ({"extra_state": [SGD]}, r"extra_state is a dict from names to objects, got list"),
    ({"extra_state": {"a": 1}}, r"extra_state\['a'\] is an object with state_dict and load_state_dict, got int 1"),
    ({"training_hooks": [print]}, r"training_hooks is a list of SessionRunHook objects"),
]


@pytest.mark.parametrize(("changes", "message"), SPECS)
def test_spec_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(sge.EstimatorError, match=message):
        sge.EstimatorSpec(**{"mode": "train", "module": LAYER, "loss": loss, "optimizer": SGD, **changes})


CONFIGS: list[tuple[dict[str, Any], str]] = [
    (
        {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1},
        r"save_checkpoints_steps=1 and save_checkpoints_secs=1",
    ),
    ({"save_checkpoints_steps": 0}, r"save_checkpoints_steps is a positive int, got int 0"),
    ({"save_checkpoints_secs": -1}, r"above 0, got -1"),
    ({"save_checkpoints_secs": "9"}, r"save_checkpoints_secs is a number of seconds above 0, got '9'"),
    ({"random_seed": 1.5}, r"random_seed is an int, or None, got float 1.5"),
    ({"on_save_error": "ignore"}, r"on_save_error is one of 'raise', 'warn', got 'ignore'"),
    ({"restart": True}, r"restart is one of 'never', 'from_checkpoint', got True"),
    ({"max_restarts": 0}, r"max_restarts is a positive int, got int 0"),
    ({"keep_checkpoint_max": -1}, r"keep_checkpoint_max is an int, 0 or more, got int -1"),
    ({"log_step_count_steps": 1.5}, r"got float 1.5"),
    ({"train_distribute": "mirrored"}, r"train_distribute is a strategy .* got str 'mirrored'"),
]


@pytest.mark.parametrize(("arguments", "message"), CONFIGS)
def test_run_config_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sge.EstimatorError, match=message):
        sge.RunConfig(**arguments)


CALLS: list[tuple[Callable[[sge.Estimator], Any], str]] = [
    (lambda it: it.train(data, steps=1, max_steps=2), r"give steps or max_steps, got both: 1 and 2"),
    (lambda it: it.train(data, steps=-1), r"steps is a positive int, got int -1"),
    (lambda it: it.train(data, max_steps=0), r"max_steps is a positive int, got int 0"),
    (lambda it: it.train(data, steps=True), r"steps is a positive int, got bool True"),
    (lambda it: it.train((X, Y)), r"input_fn is a function that returns the data, got tuple; write input_fn=lambda"),
    (lambda it: it.train(data, hooks=[3]), r"list of SessionRunHook objects, got int 3"),
    (lambda it: it.train(data, saving_listeners=[3]), r"list of CheckpointSaverListener objects, got int 3"),
    (lambda it: it.train(data, saving_listeners=3), r"list of CheckpointSaverListener objects, got int 3"),
    (lambda it: it.evaluate(None), r"input_fn is a function"),
    (lambda it: it.evaluate(data, steps=0), r"steps is a positive int"),
    (lambda it: it.predict([X]), r"input_fn is a function"),
    (lambda it: it.train(lambda: None), r"input_fn returned nothing"),
    (lambda it: it.train(lambda: []), r"input_fn gave no batch"),
    (lambda it: it.train(lambda: [(X, Y, Y)]), r"features or \(features, labels\), got 3 parts"),
    (
        lambda it: it.train(lambda path: []),
        r"input_fn may take the arguments mode, params, config; it also has an argument 'path'",
    ),
    (lambda it: it.train(lambda: sge.Input([X], num_epochs=0)), r"num_epochs is a positive int, got int 0"),
    (lambda it: it.export("anywhere"), r"has no checkpoint; call train"),
    (lambda it: it.get_variable_names(), r"has no checkpoint; call train first"),
    (lambda it: sge.train_and_evaluate(it, data, data), r"train_spec is a TrainSpec"),  # type: ignore[arg-type]
    (lambda _: sge.TrainSpec(X), r"input_fn is a function"),  # type: ignore[arg-type]
    (lambda _: sge.EvalSpec(data, throttle_secs=-1), r"throttle_secs is a number of seconds from 0 up, got -1"),
    (lambda _: sge.WarmStartSettings("a", "("), r"regular expression, got '\('"),
    (lambda _: sge.StopAtStepHook(), r"give one of num_steps and last_step"),
    (lambda _: sge.LoggingTensorHook(["lss"]), r"'loss' and 'learning_rate', got 'lss'"),
    (lambda _: sge.StopAtStepHook(num_steps=0), r"num_steps is a positive int, got int 0"),
    (lambda _: sge.CheckpointSaverHook(), r"give one of save_steps and save_secs"),
    (lambda _: sge.CheckpointSaverHook(save_steps=0), r"save_steps is a positive int, got int 0"),
    (lambda _: sge.CheckpointSaverHook(save_secs=0), r"save_secs is a number of seconds above 0, got 0"),
    (lambda _: sge.CheckpointSaverHook(save_steps=1, on_error="x"), r"on_error is one of 'raise', 'warn', got 'x'"),
    (lambda _: sge.model_to_estimator(LAYER, loss=loss, optimizer=SGD), r"optimizer is a function that makes one"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_call_refuses(estimator: sge.Estimator, call: Callable[[sge.Estimator], Any], message: str) -> None:
    with pytest.raises(sge.EstimatorError, match=message):
        call(estimator)
    assert not Path(estimator.model_dir).exists(), "nothing was begun"


def test_tensors_without_batch_size_say_how(estimator: sge.Estimator) -> None:
    with pytest.raises(sg.StratagemError, match="needs global_batch_size=") as caught:
        estimator.train(lambda: (X, Y))
    assert "sg.estimator.Input(data, global_batch_size=...)" in caught.value.__notes__[0]


def test_batches_without_labels_are_named(estimator: sge.Estimator, tmp_path: Path) -> None:
    with pytest.raises(sge.EstimatorError, match=r"loss failed with .* have no labels: let input_fn give"):
        estimator.train(lambda: [X])
    estimator.train(data)
    with pytest.raises(sge.EstimatorError, match=r"loss, or a metric, failed .* have no labels: let input_fn give"):
        estimator.evaluate(lambda: [X])

    def counting(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
        return model_fn(features, len(labels), mode)

    with pytest.raises(
        sge.EstimatorError, match=r"model_fn failed with TypeError: .* have no labels: let input_fn give"
    ):
        sge.Estimator(counting, tmp_path / "counting").train(lambda: [X])

    def without(features: Any, mode: str) -> sge.EstimatorSpec:
        module = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return sge.EstimatorSpec(mode, module, lambda outputs, _: outputs.square().mean(), optimizer=optimizer)

    assert sge.Estimator(without, tmp_path / "without").train(lambda: [X]) is not None


def test_endless_evaluation_is_refused(estimator: sge.Estimator) -> None:
    estimator.train(data)
    with pytest.raises(sge.EstimatorError, match="does not end; give steps"):
        estimator.evaluate(lambda: sge.Input(data(), num_epochs=None))


def test_estimator_refuses_bad_arguments(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: sge.Estimator(3, tmp_path), r"model_fn is a function .* got int 3"),  # type: ignore[arg-type]
        (lambda: sge.Estimator(model_fn, ""), r"model_dir is the folder for checkpoints, got str ''"),
        (lambda: sge.Estimator(model_fn, file), r"model_dir is a folder, .* is a file"),
        (lambda: sge.Estimator(model_fn, file / "in"), r"cannot be written to"),
        (lambda: sge.Estimator(model_fn, tmp_path, {}), r"config is a RunConfig, got dict"),  # type: ignore[arg-type]
        (lambda: sge.Estimator(model_fn, "a", sge.RunConfig(model_dir="b")), r"'a' here and 'b' in config"),
        (lambda: sge.Estimator(model_fn, tmp_path, params={"a": 1}), r"params were given, but model_fn takes only"),
        (lambda: sge.Estimator(model_fn, tmp_path, warm_start_from=3), r"ckpt_to_initialize_from .* got int 3"),  # type: ignore[arg-type]
        (lambda: sge.Estimator(lambda features, depth: None, tmp_path), r"also has an argument 'depth'"),  # type: ignore[arg-type,return-value]
    ]
    for call, message in cases:
        with pytest.raises(sge.EstimatorError, match=message):
            call()


def test_estimator_without_a_folder_takes_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(sg.errors.StratagemWarning, match=r"kept in the temporary folder .*, which is removed when"):
        estimator = sge.Estimator(model_fn, config=sge.RunConfig(save_summary_steps=0))
    estimator.train(data)
    assert Path(estimator.model_dir).parent == tmp_path
    assert estimator.get_variable_value("weight").shape == (1, 3)
    run_config.remove_temporary_folders()  # as when the program ends
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}')
    with pytest.raises(sge.EstimatorError, match="which all tasks of a cluster need; give it"):
        sge.Estimator(model_fn)


def test_model_fn_must_return_a_spec_of_its_mode(tmp_path: Path) -> None:
    with pytest.raises(sge.EstimatorError, match="returns an EstimatorSpec, got nothing"):
        sge.Estimator(lambda mode: None, tmp_path).train(data)  # type: ignore[arg-type,return-value]
    wrong = sge.Estimator(lambda features, labels: model_fn(features, labels, "eval"), tmp_path)
    with pytest.raises(sge.EstimatorError, match="for mode 'train' and returned a spec for 'eval'"):
        wrong.train(data)


def test_checkpoint_of_another_model_names_the_differences(tmp_path: Path) -> None:
    sge.Estimator(model_fn, tmp_path, sge.RunConfig(save_summary_steps=0)).train(data)

    def deeper(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
        module = nn.Sequential(nn.Linear(3, 1))
        return sge.EstimatorSpec(mode, module, loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))

    def other_optimizer(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
        module = nn.Linear(3, 1)
        return sge.EstimatorSpec(mode, module, loss, optimizer=torch.optim.Adam(module.parameters()))

    with pytest.raises(sge.CheckpointMismatchError, match=r"missing '0\.weight'.*extra 'weight'"):
        sge.Estimator(deeper, tmp_path).train(data)
    with pytest.raises(sge.CheckpointMismatchError, match="optimizer SGD, the model function made Adam"):
        sge.Estimator(other_optimizer, tmp_path).train(data)


def test_what_a_checkpoint_cannot_keep_is_named_before_the_first_step(tmp_path: Path) -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> object:
            return object()

    def stateful(features: Any, labels: Any, mode: str) -> sge.EstimatorSpec:
        module = Stateful(3, 1)
        return sge.EstimatorSpec(mode, module, loss, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))

    class Never(sge.SessionRunHook):
        def before_run(self, run_context: sge.RunContext) -> None:
            raise AssertionError("a step was taken")

    with pytest.raises(sge.CheckpointError, match=r"got object .* as state/module/_extra_state"):
        sge.Estimator(stateful, tmp_path).train(data, hooks=[Never()])


def test_estimator_inside_a_scope_says_where_the_strategy_goes(estimator: sge.Estimator) -> None:
    with sg.OneDeviceStrategy().scope(), pytest.raises(sg.StratagemError, match=r"RunConfig\(train_distribute="):
        estimator.train(data)


def test_shorter_input_after_an_interruption_starts_anew_with_a_warning(tmp_path: Path) -> None:
    class Stop(sge.SessionRunHook):
        def before_run(self, run_context: sge.RunContext) -> None:
            if run_context.global_step == 3:
                raise KeyboardInterrupt

    config = sge.RunConfig(save_checkpoints_steps=1, save_summary_steps=0)
    estimator = sge.Estimator(model_fn, tmp_path, config)
    with pytest.raises(KeyboardInterrupt):
        estimator.train(lambda: data() * 5, hooks=[Stop()])
    with pytest.warns(sg.errors.StratagemWarning, match="cut short after pass 0, batch 3"):
        estimator.train(lambda: data() * 2)
    assert estimator.evaluate(data)["global_step"] == 5
