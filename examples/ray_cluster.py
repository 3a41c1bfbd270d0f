"""Trains a small network on handwritten digits with workers that Ray starts, driven by this one program.

Without --address a Ray of this machine alone is started, and shut down at the end. On a Ray cluster run the program on
one of its machines with --address auto: this process is the first worker, the others are wherever Ray has room.

python examples/ray_cluster.py [--workers 2] [--gpus-per-worker 0] [--address auto] [--epochs 4]
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
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus-per-worker", type=float, default=0)
    parser.add_argument("--address", help="where Ray is: host:port, or auto")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load_digits()
    loader = DataLoader(train_set, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    test_images, test_labels = test_set.tensors

    cluster = sg.RayCluster(options.workers, address=options.address, gpus_per_worker=options.gpus_per_worker)
    with sg.MultiWorkerMirroredStrategy(cluster=cluster) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

        def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        print(f"{strategy.num_replicas_in_sync} replicas")
        for epoch in range(options.epochs):
            losses = []
            for batch in strategy.distribute(loader):
                losses.append(strategy.reduce("mean", strategy.run(step, args=batch)).item())
            with torch.no_grad():
                accuracy = (model(test_images.to(strategy.device)).cpu().argmax(dim=1) == test_labels).float().mean()
            print(f"epoch {epoch + 1:2}: loss {sum(losses) / len(losses):.4f}, test accuracy {accuracy.item():.1%}")


if __name__ == "__main__":
    main()
