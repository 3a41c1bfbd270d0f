"""The models that training speed is measured with, and one fixed global batch for each.

Four have few, large tensors; stacks of small layers, and networks with ResNet-50's and a 12-layer transformer's list of
tensors at small widths, have many small ones, as most networks do.
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


class _Bottleneck(nn.Module):
    """A block of ResNet-50: three convolutions with their normalization, and a way around them."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        widths = ((num_inputs, width, 1), (width, width, 3), (width, 4 * width, 1))
        self.layers = nn.Sequential(*(layer for each in widths for layer in _normalized(*each)))
        changes = num_inputs != 4 * width
        self.around = nn.Sequential(*_normalized(num_inputs, 4 * width, 1)) if changes else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the layers add to what comes in."""
        return torch.relu(self.layers(inputs) + self.around(inputs))


def _normalized(num_inputs: int, num_outputs: int, size: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(num_inputs, num_outputs, size, padding=size // 2, bias=False), nn.BatchNorm2d(num_outputs)


def _resnet50() -> nn.Module:
    """ResNet-50's 161 parameters and 159 buffers, each of a few elements."""
    blocks, num_inputs = [], 4
    for width, number in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True):
        for _ in range(number):
            blocks.append(_Bottleneck(num_inputs, width))
            num_inputs = 4 * width
    stem = (*_normalized(3, 4, 3), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_inputs, 10))


def _encoder() -> nn.Module:
    """The tensors of a transformer of 12 layers, 16 wide."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(50, 16), encoder, nn.Linear(16, 50))


EMPTY = Workload(nn.Identity, lambda: (torch.zeros(2, 1), torch.zeros(2, 1)), 200)  # a step that does nothing
WORKLOADS = {
    "empty": EMPTY,
    "mlp": Workload(_mlp, lambda: (torch.randn(256, 784), torch.randint(10, (256,))), 40),
    "cnn": Workload(_cnn, lambda: (torch.randn(256, 1, 28, 28), torch.randint(10, (256,))), 10),
    "transformer": Workload(Transformer, lambda: (torch.randint(1000, (16, 64)), torch.randint(1000, (16, 64))), 8),
    "wide": Workload(_wide, lambda: (torch.randn(8, 4000), torch.randint(4000, (8,))), 4),
    "linear": Workload(lambda: nn.Linear(8, 2), lambda: (torch.randn(16, 8), torch.randint(2, (16,))), 100),
    **{f"stack{num_layers}": _stack(num_layers) for num_layers in (10, 100, 500)},
    "resnet50": Workload(_resnet50, lambda: (torch.randn(8, 3, 8, 8), torch.randint(10, (8,))), 40),
    "encoder12": Workload(_encoder, lambda: (torch.randint(50, (8, 8)), torch.randint(50, (8, 8))), 40),
}
