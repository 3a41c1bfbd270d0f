"""Handwritten digits (MNIST's problem) by towers: a tower on each GPU, the parameters and the update on the CPU.

Each tower computes the gradients of its part of the batch; the CPU waits for all, averages them and updates. A strategy
(`sg.MirroredStrategy`, `sg.CentralStorageStrategy`) does the same without any of this code, and its towers run at once.
`cifar10_multi_gpu.py` does it for larger images, with moving averages.

python examples/towers.py [--towers 2] [--epochs 3]

On a machine with fewer GPUs, simulated ones take their place.
"""

import argparse

import torch
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


def train(num_towers: int, num_epochs: int) -> tuple[nn.Module, list[float]]:
    """Trains with so many towers; returns the model and the mean loss of each epoch."""
    torch.manual_seed(0)
    train_set, _ = load_digits()
    loader = DataLoader(train_set, batch_size=60, shuffle=True, drop_last=True)
    with sg.device("/cpu:0"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    parameters = list(model.parameters())
    means = []
    for _ in range(num_epochs):
        losses = []
        for images, labels in loader:
            tower_grads = []
            for tower, part in enumerate(zip(images.chunk(num_towers), labels.chunk(num_towers), strict=True)):
                with sg.device(f"/gpu:{tower}"):  # the parameters are copied here, the gradients go back
                    loss = nn.functional.cross_entropy(model(part[0]), part[1])
                    gradients = torch.autograd.grad(loss, parameters)
                tower_grads.append(list(zip(gradients, parameters, strict=True)))
                losses.append(loss.item())
            with sg.device("/cpu:0"):
                for gradient, parameter in sg.average_gradients(tower_grads):
                    parameter.grad = gradient
                optimizer.step()
        means.append(sum(losses) / len(losses))
    return model, means


def main() -> None:
    """Trains with several towers and with one, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, default=2, help="a number that divides the batch of 60")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if len(sg.config.list_physical_devices("GPU")) < options.towers:
        sg.config.simulate_devices("GPU", options.towers)

    with sg.log_placement() as log:
        model, losses = train(options.towers, options.epochs)
    _, alone = train(1, options.epochs)
    print(f"{options.towers} towers: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"1 tower:  loss {alone[0]:.4f} -> {alone[-1]:.4f}")
    images, labels = load_digits()[1].tensors
    with torch.no_grad():
        print(f"test accuracy {(model(images).argmax(dim=1) == labels).float().mean().item():.1%}")
    for device in sorted({record.device for record in log}):
        names = {record.operation for record in log if record.device == device}
        print(f"{device}: {', '.join(sorted(names))}")
    print(f"parameters: {', '.join(sorted({sg.device_of(each).name for each in model.parameters()}))}")


if __name__ == "__main__":
    main()
