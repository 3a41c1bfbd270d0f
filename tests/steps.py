"""The step that tests train with, on one device and under every strategy."""

import time
from collections.abc import Callable

import torch
from torch import nn


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """A step of a classifier: one update for one batch."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def falling_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, pause_s: float = 0.0) -> Callable[[], None]:
    """A step in which each weight falls by the learning rate of plain SGD, after a pause."""

    def step() -> None:
        time.sleep(pause_s)
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()

    return step
