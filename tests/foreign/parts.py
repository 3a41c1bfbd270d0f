"""Small batches, models and loops that programs of several files are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from tests.foreign.programs import Runner


def images(num_rows: int = 6, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, 1, size, size, generator=numbers), torch.arange(num_rows) % 3


def vectors(num_rows: int = 7, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(2)
    return torch.randn(num_rows, width, generator=numbers), torch.arange(num_rows) % 3


def made(
    on: Runner, *models: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
) -> Any:
    """Models with an optimizer of all their parameters, from the same weights each time."""
    with on.scope():
        torch.manual_seed(3)
        built = [make() for make in models]
        return *built, optimizer([each for model in built for each in model.parameters()], lr=0.05)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def classify(
    on: Runner,
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    num_steps: int = 2,
    after: Callable[[], Any] = lambda: None,
) -> Any:
    """Losses and weights of the usual loop."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    for _ in range(num_steps):
        losses.append(on.mean(on(step, *batch)))
        after()
    return losses, dict(model.named_parameters()), dict(model.named_buffers())


def weights(*modules: nn.Module) -> list[dict[str, Any]]:
    """What is compared of modules: parameters, their gradients, buffers."""
    return [
        {
            "parameters": dict(module.named_parameters()),
            "buffers": dict(module.named_buffers()),
            "gradients": {name: each.grad for name, each in module.named_parameters()},
        }
        for module in modules
    ]


def gathered(on: Runner, rows: torch.Tensor) -> torch.Tensor:
    return rows if on.strategy is None else sg.get_replica_context().all_gather(rows)


def summed(on: Runner, value: torch.Tensor) -> torch.Tensor:
    return value if on.strategy is None else sg.get_replica_context().all_reduce("sum", value)
