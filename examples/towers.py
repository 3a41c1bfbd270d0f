"""Data parallelism by hand: a tower on each GPU, the parameters and the update on the CPU.

Each tower computes the gradients of its part of the batch; the CPU waits for all, averages them and updates. A strategy
(`sg.MirroredStrategy`, `sg.CentralStorageStrategy`) does the same without any of this code, and its towers run at once.

python examples/towers.py [--towers 2] [--steps 80]

On a machine with fewer GPUs, simulated ones take their place.
"""

import argparse

import torch
from torch import nn

import stratagem as sg


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Points on a plane, and on which side of a curve each is."""
    points = torch.rand(512, 2) * 4 - 2
    return points, (points[:, 1] > points[:, 0].sin()).long()


def train(num_towers: int, num_steps: int) -> tuple[nn.Module, list[float]]:
    """Trains with so many towers; returns the model and its losses."""
    torch.manual_seed(0)
    points, labels = make_data()
    with sg.device("/cpu:0"):
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parameters = list(model.parameters())
    losses = []
    for _ in range(num_steps):
        tower_grads, tower_losses = [], []
        for tower in range(num_towers):
            with sg.device(f"/gpu:{tower}"):  # the parameters are copied here, the gradients go back
                part = slice(tower * len(points) // num_towers, (tower + 1) * len(points) // num_towers)
                loss = nn.functional.cross_entropy(model(points[part]), labels[part])
                gradients = torch.autograd.grad(loss, parameters)
            tower_grads.append(list(zip(gradients, parameters, strict=True)))
            tower_losses.append(loss.item())
        with sg.device("/cpu:0"):
            for gradient, parameter in sg.average_gradients(tower_grads):
                parameter.grad = gradient
            optimizer.step()
        losses.append(sum(tower_losses) / num_towers)
    return model, losses


def main() -> None:
    """Trains with several towers and with one, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    if len(sg.config.list_physical_devices("GPU")) < options.towers:
        sg.config.simulate_devices("GPU", options.towers)

    with sg.log_placement() as log:
        model, losses = train(options.towers, options.steps)
    _, alone = train(1, options.steps)
    print(f"{options.towers} towers: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"1 tower:  loss {alone[0]:.4f} -> {alone[-1]:.4f}")
    for device in sorted({record.device for record in log}):
        names = {record.operation for record in log if record.device == device}
        print(f"{device}: {', '.join(sorted(names))}")
    print(f"parameters: {', '.join(sorted({sg.device_of(each).name for each in model.parameters()}))}")


if __name__ == "__main__":
    main()
