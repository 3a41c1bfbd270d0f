"""Trains a small network on handwritten digits with a loop of its own, on as many devices as there are.

The losses are those of `custom_loop_baseline.py`, which is plain torch. All that is different, by `diff -u0`:

    +
    +import stratagem as sg

    +    parser.add_argument("--devices", type=int, default=2, help="how many logical devices the CPU is divided into")

    -    model = Net()
    -    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    +    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * options.devices)
    +    strategy = sg.MirroredStrategy()
    +    with strategy.scope():
    +        model = Net()
    +        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    -        for batch in loader:
    -            loss = step(*batch)
    +        for batch in strategy.distribute(loader):
    +            loss = strategy.reduce("mean", strategy.run(step, args=batch))

Two of these lines, `--devices` and `sg.config`, divide one CPU into several devices; a machine with several GPUs
does without.

python examples/custom_loop_distributed.py [--devices 2] [--epochs 12]
"""

import argparse

import torch
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


class Net(nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def main() -> None:
    """Trains, and tests after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="how many logical devices the CPU is divided into")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load_digits()
    loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    test_images, test_labels = test_set.tensors

    sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * options.devices)
    strategy = sg.MirroredStrategy()
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    for epoch in range(options.epochs):
        losses = []
        for batch in strategy.distribute(loader):
            loss = strategy.reduce("mean", strategy.run(step, args=batch))
            losses.append(loss.item())
        with torch.no_grad():
            accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
        print(f"epoch {epoch + 1:2}: loss {sum(losses) / len(losses):.4f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
