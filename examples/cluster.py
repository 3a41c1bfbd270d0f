"""Trains a small network on handwritten digits with several workers, each a process with its own loop.

The same program runs alone, under `stratagem run` on this machine, and on a cluster (TF_CONFIG, torchrun, Slurm or
Kubernetes say who takes part). Every worker runs all of it; what only one may do, saving and printing, is the chief's.

stratagem run --workers 2 examples/cluster.py [--epochs 4] [--save digits.pt]
"""

import argparse

import torch
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


def main() -> None:
    """Trains, and tests after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save", help="where to keep the weights")
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load_digits()
    loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    test_images, test_labels = test_set.tensors

    with sg.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

        def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        strategy.print(f"{strategy.num_replicas_in_sync} replicas")
        for epoch in range(options.epochs):
            losses = []
            for batch in strategy.distribute(loader):
                losses.append(strategy.reduce("mean", strategy.run(step, args=batch)).item())
            with torch.no_grad():
                accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
            strategy.print(f"epoch {epoch + 1:2}: loss {sum(losses) / len(losses):.4f}, test accuracy {accuracy:.1%}")
        if strategy.is_chief and options.save:
            torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
