"""A small training by the Estimator, for tests that disturb it: what random numbers and schedulers do is seen in it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg
from stratagem import estimator as sge

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)


def model_fn(features: torch.Tensor, labels: torch.Tensor, mode: str) -> sge.EstimatorSpec:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return sge.EstimatorSpec(mode, module, nn.functional.mse_loss, optimizer=optimizer, scheduler=scheduler)


def data() -> sge.Input:
    return sge.Input((X, Y), global_batch_size=8, shuffle=True, num_epochs=None)


def make(folder: Path, strategy: sg.Strategy, **more: Any) -> sge.Estimator:
    settings = {"random_seed": 3, "save_summary_steps": 0, "save_checkpoints_steps": 3}
    config = sge.RunConfig(**settings | more, train_distribute=strategy, eval_distribute=strategy)
    return sge.Estimator(model_fn, folder, config)


def weights(estimator: sge.Estimator) -> list[torch.Tensor]:
    return [estimator.get_variable_value(name) for name in estimator.get_variable_names()]
