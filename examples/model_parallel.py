"""Model parallelism by hand: parts of one computation, and of one network, on different GPUs.

python examples/model_parallel.py [--steps 60] [--save placement.png]

On a machine with fewer than two GPUs, simulated ones take their place.
"""

import argparse

import torch
from torch import nn

import stratagem as sg
from stratagem.placement import PlacementLog


class AutoEncoder(nn.Module):
    """Its two halves are built on two devices; all of the rest is as for one."""

    def __init__(self) -> None:
        super().__init__()
        with sg.device("/gpu:0"):
            self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
        with sg.device("/gpu:1"):
            self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Operations follow their parameters: nothing is moved by hand."""
        return self.decoder(self.encoder(x))


def product_and_sum() -> torch.Tensor:
    """GPU 0 multiplies, GPU 1 adds, the CPU sums both."""
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.eye(2)
    parts = []
    with sg.device("/gpu:0"):
        parts.append(torch.matmul(a, b))
    with sg.device("/gpu:1"):
        parts.append(a + b)
    with sg.device("/cpu:0"):
        return sg.add_n(parts)


def train(num_steps: int) -> PlacementLog:
    """Trains the network; returns the log of its last step."""
    torch.manual_seed(0)
    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.randn(256, 4) @ torch.randn(4, 32)
    for number in range(num_steps):
        with sg.log_placement() as log:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(data), data)
            loss.backward()
            optimizer.step()
        if number in (0, num_steps - 1):
            print(f"step {number + 1:3}: loss {loss.item():.4f}")
    for name, parameter in model.named_parameters():
        print(f"{name:18} {sg.device_of(parameter).name}, its gradient {sg.device_of(parameter.grad).name}")
    return log


def main() -> None:
    """Runs the small computation, then the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", metavar="FILE", help="a picture of the last step: .html or .png")
    options = parser.parse_args()
    if len(sg.config.list_physical_devices("GPU")) < 2:
        sg.config.simulate_devices("GPU", 2)

    print(product_and_sum())
    log = train(options.steps)
    copies = sum(record.num_bytes_copied for record in log)
    print(f"the last step copied {copies / 1024:.1f} KiB between devices")
    if options.save:
        print(f"the picture is in {log.save(options.save)}")


if __name__ == "__main__":
    main()
