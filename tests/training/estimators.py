"""A small model, its data, and hooks, for tests of Estimators."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem import estimator as sge

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, :3].sum(dim=1) > 0).long()


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(dim=1) == labels).float().mean()


def model_fn(features: torch.Tensor, labels: torch.Tensor, mode: str, params: dict[str, Any]) -> sge.EstimatorSpec:
    dropout = nn.Dropout(params.get("dropout", 0.0))
    module = nn.Sequential(nn.Linear(features.shape[1], params.get("width", 8)), nn.Tanh(), dropout, nn.Linear(8, 2))
    optimizer = scheduler = None
    if mode == sge.ModeKeys.TRAIN:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    return sge.EstimatorSpec(
        mode,
        module,
        nn.functional.cross_entropy,
        optimizer=optimizer,
        scheduler=scheduler,
        predictions=lambda outputs: {"class": outputs.argmax(dim=1), "scores": outputs},
        eval_metric_ops={"accuracy": accuracy},
    )


def make(folder: Path, strategy: sg.Strategy | None = None, **more: Any) -> sge.Estimator:
    params, warm_start_from = more.pop("params", {}), more.pop("warm_start_from", None)
    config = sge.RunConfig(
        **{"random_seed": 3, "save_summary_steps": 0, **more}, train_distribute=strategy, eval_distribute=strategy
    )
    return sge.Estimator(model_fn, folder, config, params, warm_start_from)


def batches() -> sge.Input:
    """Seven passes; the last batch of each is uneven."""
    return sge.Input((X, Y), global_batch_size=16, shuffle=True, num_epochs=7)


def one_pass() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=16)


class Record(sge.SessionRunHook):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def after_run(self, run_context: sge.RunContext, run_values: sge.RunValues) -> None:
        self.losses.append(run_values.loss)
        self.rates.append(run_values.learning_rate)


class FailAt(sge.SessionRunHook):
    def __init__(self, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self._step = step
        self._error = error

    def before_run(self, run_context: sge.RunContext) -> None:
        if run_context.global_step == self._step:
            raise self._error


def weights(estimator: sge.Estimator) -> dict[str, torch.Tensor]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}
