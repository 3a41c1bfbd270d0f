"""The models that training speed is measured with, and one fixed global batch for each.

Four have few, large tensors; stacks of small layers have many small ones, as most networks do.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its batch and how many steps make a measurement."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    num_steps: int

    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the last axis."""
        outputs = model(inputs)
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Transformer(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 256)
        self.positions = nn.Parameter(torch.zeros(64, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1000)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token at every position."""
        return self.head(self.layers(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def _wide() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(4000, 4000), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _stack(num_layers: int) -> Workload:
    def make_model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))

    return Workload(make_model, lambda: (torch.randn(16, 8), torch.randint(8, (16,))), 60)


WORKLOADS = {
    "mlp": Workload(_mlp, lambda: (torch.randn(256, 784), torch.randint(10, (256,))), 40),
    "cnn": Workload(_cnn, lambda: (torch.randn(256, 1, 28, 28), torch.randint(10, (256,))), 10),
    "transformer": Workload(Transformer, lambda: (torch.randint(1000, (16, 64)), torch.randint(1000, (16, 64))), 8),
    "wide": Workload(_wide, lambda: (torch.randn(8, 4000), torch.randint(4000, (8,))), 4),
    **{f"stack{num_layers}": _stack(num_layers) for num_layers in (10, 100, 500)},
}
