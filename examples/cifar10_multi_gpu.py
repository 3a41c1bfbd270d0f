"""CIFAR-10 on several GPUs by hand: a tower on each, the parameters on the CPU, and moving averages of them.

Each tower computes the loss and the gradients of its own batch. The CPU waits for all towers, takes the mean of their
gradients (`sg.average_gradients`), updates the parameters, and moves their averages (`sg.ExponentialMovingAverage`).
Tests are made with the averages.

python examples/cifar10_multi_gpu.py [--towers 2] [--steps 80] [--seed 0]

The images have the form of CIFAR-10's (10 classes, 3 x 32 x 32) and are made from a seed, so nothing is downloaded:
each class has stripes of its own direction and a colour of its own, under noise. On a machine with fewer GPUs,
simulated ones take their place.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from torch import nn

import stratagem as sg

NUM_CLASSES = 10
BATCH_SIZE = 32  # of each tower
MOVING_AVERAGE_DECAY = 0.99
LEARNING_RATE, RATE_DECAY, STEPS_PER_DECAY = 0.03, 0.5, 60


def make_images(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Images like CIFAR-10's, and their classes."""
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    angles = labels * (math.pi / NUM_CLASSES)
    shifts = torch.rand(count, generator=generator) * 2 * math.pi
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = angles.cos()[:, None, None] * columns + angles.sin()[:, None, None] * rows
    stripes = (along * (2 * math.pi / 8) + shifts[:, None, None]).sin()
    turns = labels[:, None] * (2 * math.pi / NUM_CLASSES) + torch.arange(3.0) * (2 * math.pi / 3)
    images = stripes[:, None] * (0.5 + 0.5 * turns.cos())[:, :, None, None]
    return images + 2 * torch.randn(images.shape, generator=generator), labels


def batches(count: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end, for one tower after the other."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = make_images(count, generator)
    while True:
        for rows in torch.randperm(count, generator=generator).split(BATCH_SIZE):
            yield images[rows], labels[rows]


def make_model() -> nn.Module:
    """Two convolutions with normalisation, and three dense layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.GroupNorm(4, 16)),
        *(nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.GroupNorm(4, 16)),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, NUM_CLASSES)),
    )


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The part of the images whose class the model names."""
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def train(model: nn.Module, num_towers: int, num_steps: int, seed: int) -> sg.ExponentialMovingAverage:
    """Trains, and returns the averages of the parameters."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS_PER_DECAY, RATE_DECAY)
    step = 0
    averages = sg.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, num_updates=lambda: step)
    queue = batches(2000, seed)
    for step in range(1, num_steps + 1):
        tower_grads, losses = [], []
        for tower in range(num_towers):
            images, labels = next(queue)
            with sg.device(f"/gpu:{tower}"):  # the parameters are copied here
                loss = nn.functional.cross_entropy(model(images), labels)
                gradients = torch.autograd.grad(loss, parameters)
            tower_grads.append(list(zip(gradients, parameters, strict=True)))
            losses.append(loss.item())
        with sg.device("/cpu:0"):  # where all towers meet
            for gradient, parameter in sg.average_gradients(tower_grads):
                parameter.grad = gradient
            optimizer.step()
            averages.apply(model)
        schedule.step()
        if step == 1 or step % 20 == 0:
            print(f"step {step:3}: loss {sum(losses) / num_towers:.3f}, learning rate {schedule.get_last_lr()[0]:.3f}")
    return averages


def main() -> None:
    """Trains, and tests with the parameters and with their averages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if len(sg.config.list_physical_devices("GPU")) < options.towers:
        sg.config.simulate_devices("GPU", options.towers)

    torch.manual_seed(options.seed)
    with sg.device("/cpu:0"):
        model = make_model()
    averages = train(model, options.towers, options.steps, options.seed)
    test_set = make_images(500, torch.Generator().manual_seed(options.seed + 1))
    print(f"test accuracy {accuracy(model, *test_set):.1%}")
    with averages.swapped(model):
        print(f"test accuracy of the averages {accuracy(model, *test_set):.1%}")
    print(f"parameters: {', '.join(sorted({sg.device_of(each).name for each in model.parameters()}))}")


if __name__ == "__main__":
    main()
