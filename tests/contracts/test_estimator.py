"""One suite for Estimators on every synchronous strategy: they must give what they give on one device."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem import estimator as sge
from stratagem.training.checkpoints import all_checkpoints, step_of
from tests.contracts.strategies_under_test import FEWER_ROWS, WORKERS, opened
from tests.training.estimators import FailAt, Record, X, Y, accuracy, batches, make, model_fn, one_pass, weights


@pytest.fixture(scope="module", params=FEWER_ROWS)
def strategy(
    request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sg.Strategy]:
    with opened(request, tmp_path_factory.mktemp("workers")) as made:
        yield made


@pytest.fixture
def folder(strategy: sg.Strategy, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the model is kept: a folder that all workers see."""
    token_file = os.environ.get("STRATAGEM_TOKEN_FILE")
    return Path(token_file).parent / request.node.name if token_file else tmp_path


def test_train_evaluate_and_predict_equal_one_device(strategy: sg.Strategy, folder: Path, tmp_path: Path) -> None:
    records, results, predictions = [Record(), Record()], [], []
    here = tmp_path / "one device"
    for record, place, chosen in zip(records, (here, folder), (None, strategy), strict=True):
        estimator = make(place, chosen)
        estimator.train(batches, hooks=[record], max_steps=7)  # shuffled, with an uneven batch and two rates
        results.append(estimator.evaluate(one_pass))
        predictions.append(torch.stack([each["scores"] for each in estimator.predict(one_pass)]))
    assert records[1].losses == pytest.approx(records[0].losses, abs=1e-4)
    assert records[1].rates == records[0].rates
    assert results[1] == pytest.approx(results[0], abs=1e-4)
    assert results[1]["global_step"] == 7
    torch.testing.assert_close(predictions[1], predictions[0], atol=1e-4, rtol=1e-3)
    expected = weights(make(here))
    for name, value in weights(make(folder)).items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-3)


def test_evaluation_is_that_of_all_examples_at_once(strategy: sg.Strategy, folder: Path) -> None:
    estimator = make(folder, strategy)
    estimator.train(batches, steps=2)
    module = model_fn(X, Y, "eval", {}).module
    module.load_state_dict(weights(estimator))
    with torch.no_grad():
        outputs = module(X)
    result = estimator.evaluate(one_pass)
    assert result["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, Y).item(), abs=1e-5)
    assert result["accuracy"] == pytest.approx(accuracy(outputs, Y).item(), abs=1e-6)


def test_resumed_training_equals_an_uninterrupted_one_to_the_last_bit(strategy: sg.Strategy, folder: Path) -> None:
    settings = {"params": {"dropout": 0.3}, "save_checkpoints_steps": 3}
    whole, rest = Record(), Record()
    often = {**settings, "save_checkpoints_steps": 1}  # saving draws no random numbers
    make(folder / "whole", strategy, **often).train(batches, hooks=[whole], max_steps=7)
    with pytest.raises(KeyboardInterrupt):
        make(folder / "cut", strategy, **settings).train(batches, hooks=[FailAt(5)], max_steps=7)
    make(folder / "cut", strategy, **settings).train(batches, hooks=[rest], max_steps=7)
    assert rest.losses == whole.losses[3:]
    expected = weights(make(folder / "whole"))
    assert all(torch.equal(value, expected[name]) for name, value in weights(make(folder / "cut")).items())


def test_folder_that_workers_do_not_share_is_named(
    strategy: sg.Strategy, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["strategy"] not in WORKERS:
        pytest.skip("it has one worker")
    estimator = make(tmp_path, strategy)
    estimator.train(one_pass, steps=1)
    for call in (estimator.train, estimator.evaluate):
        with pytest.raises(
            sge.EstimatorError, match=r"step 0 for one and of step 1 for another; let model_dir, '.*share"
        ):
            call(one_pass)  # type: ignore[operator]


def test_training_and_evaluating_by_turns_trains_as_if_it_only_trained(strategy: sg.Strategy, folder: Path) -> None:
    alone, beside = Record(), Record()
    make(folder / "alone", strategy, save_checkpoints_steps=3).train(batches, hooks=[alone], max_steps=7)
    estimator = make(folder / "both", strategy, save_checkpoints_steps=3)
    train_spec = sge.TrainSpec(batches, max_steps=7, hooks=[beside])
    result = sge.train_and_evaluate(estimator, train_spec, sge.EvalSpec(one_pass, throttle_secs=0))
    assert beside.losses == alone.losses
    assert result == estimator.evaluate(one_pass)
    assert [step_of(path) for path in all_checkpoints(folder / "both")] == [3, 6, 7]
