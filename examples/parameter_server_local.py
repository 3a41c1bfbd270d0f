"""Trains a small network on handwritten digits asynchronously: workers update shared parameters, each at its own pace.

The loop is that of `custom_loop_distributed.py`. `run` returns before its step is done, and so does `reduce`: losses
are read at the end of an epoch, and all workers compute meanwhile. One worker is killed on the way: its step is given
to another, and a new worker takes its place.

python examples/parameter_server_local.py [--workers 2] [--epochs 6] [--max-staleness 4]
"""

import argparse
import os
import signal

import torch
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


def main() -> None:
    """Trains, and tests after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-staleness", type=int, help="how many pushes of others a push may miss; by default any")
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load_digits()
    loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    test_images, test_labels = test_set.tensors

    consistency = sg.Async() if options.max_staleness is None else sg.BoundedStaleness(options.max_staleness)
    with sg.ParameterServerStrategy(options.workers, consistency=consistency, verbose=True) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

        def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        for epoch in range(options.epochs):
            total = 0.0
            for batch in strategy.distribute(loader):
                total += strategy.reduce("mean", strategy.run(step, args=batch))
            with torch.no_grad():
                accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
            print(f"epoch {epoch + 1:2}: loss {total / len(loader):.4f}, test accuracy {accuracy:.1%}")
            if epoch == 1:
                os.kill(strategy.local_results(strategy.run(os.getpid))[0], signal.SIGKILL)
                print("killed a worker")


if __name__ == "__main__":
    main()
