"""Trains an Estimator on all workers of a cluster; one of them may die once, on the way.

python estimator_program.py FOLDER [die | terminate]
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg

NUM_STEPS, DEATH = 12, 7


def model_fn(features: Any, labels: Any, mode: str) -> sg.estimator.EstimatorSpec:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return sg.estimator.EstimatorSpec(mode, module=module, loss=nn.functional.cross_entropy, optimizer=optimizer)


def batches() -> sg.estimator.Input:
    generator = torch.Generator().manual_seed(1)
    dataset = torch.utils.data.TensorDataset(
        torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    return sg.estimator.Input(loader, num_epochs=None)


class Die(sg.estimator.SessionRunHook):
    """Sends this process a signal after a step, the first time."""

    def __init__(self, marker: Path, number: signal.Signals) -> None:
        self._marker = marker
        self._number = number

    def after_run(self, context: Any, values: Any) -> None:
        if context.global_step == DEATH and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), self._number)


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = sg.MultiWorkerMirroredStrategy()
    config = sg.estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=5, random_seed=1)
    estimator = sg.estimator.Estimator(model_fn, folder / "model", config)
    number = {"die": signal.SIGKILL, "terminate": signal.SIGTERM}.get(sys.argv[-1])
    hooks = [Die(folder / "died", number)] if number is not None and not strategy.is_chief else []
    estimator.train(batches, max_steps=NUM_STEPS, hooks=hooks)
    print(f"worker {strategy.input_pipeline[1]} of {strategy.input_pipeline[0]} is done")


if __name__ == "__main__":
    main()
