"""Divides the CPU, trains a network on one of its shares, and meets that share's memory limit.

python examples/one_device.py [--device cpu:1] [--steps 400]
"""

import argparse
import math
import time

import torch
from rich.console import Console
from rich.progress import track

import stratagem as sg

MIB = 2**20


def two_spirals(num_points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals wound into each other, and which spiral each is on."""
    labels = torch.arange(num_points) % 2
    turn = torch.rand(num_points).sqrt() * 3 * math.pi
    angle = turn + math.pi * labels
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 10
    return points + 0.02 * torch.randn_like(points), labels


def accuracy(model: torch.nn.Module, points: torch.Tensor, labels: torch.Tensor) -> float:
    """The part of the points whose spiral the model names."""
    with torch.no_grad():
        return (model(points).argmax(dim=1) == labels).float().mean().item()


def train(device: sg.LogicalDevice, num_steps: int, console: Console) -> None:
    """Trains on one device and says how well and how fast."""
    torch.manual_seed(0)
    points, labels = (tensor.to(device.torch_device) for tensor in two_spirals(4096))
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2)
    ).to(device.torch_device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for _ in track(range(num_steps), f"training on {device.name}", console=console):
        batch = torch.randint(len(points), (512,), device=device.torch_device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(points[batch]), labels[batch]).backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    peak = sg.config.get_memory_info(device.name)["peak"]
    console.print(
        f"accuracy {accuracy(model, *two_spirals(2048)):.1%}, {num_steps * 512 / seconds:,.0f} examples/s, "
        f"peak memory {peak / MIB:.0f} MiB",
        highlight=False,
    )


def main() -> None:
    """Runs the tour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu:1", help="cpu:0 or cpu:1, each half of the cores")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    console = Console()

    half = sg.config.LogicalDeviceConfiguration(memory_limit=512)
    sg.config.set_logical_device_configuration("cpu:0", [half, half])
    for device in sg.config.list_logical_devices("CPU"):
        console.print(
            f"{device.name}: cores {list(device.cores)}, limit {device.memory_limit_bytes // MIB} MiB", highlight=False
        )

    with sg.devices.serve(options.device) as device:
        train(device, options.steps, console)
    try:
        with sg.devices.serve(options.device):
            torch.zeros(2048 * MIB, dtype=torch.uint8)
    except sg.OutOfMemoryError as error:
        console.print(f"and asked for too much: {error}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
