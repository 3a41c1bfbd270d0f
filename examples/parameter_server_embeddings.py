"""Trains an embedding table of a million rows at the cost of the rows that each batch touches.

Users and items have vectors; what a user thinks of an item is their product. The table has sparse gradients: a step
reads, pushes and updates only the rows of its batch, wherever they lie in the table that all workers share. Each
worker makes its own data, and a coordinator hands out the steps.

python examples/parameter_server_embeddings.py [--rows 1000000] [--steps 400]
"""

import argparse
import time
from collections.abc import Iterator

import torch
from torch import nn

import stratagem as sg

NUM_KINDS, NUM_POPULAR, DIM = 8, 2000, 16


def ratings(place: sg.InputContext, num_rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of popular rows, far apart in the table, and whether they are of the same kind."""
    generator = torch.Generator().manual_seed(place.input_pipeline_id)
    while True:
        popular = torch.randint(NUM_POPULAR, (512, 2), generator=generator)
        same_kind = popular[:, 0] % NUM_KINDS == popular[:, 1] % NUM_KINDS
        yield popular * (num_rows // NUM_POPULAR), same_kind.float()


def main() -> None:
    """Trains, and says how the first steps and the last ones did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    torch.manual_seed(0)
    with sg.ParameterServerStrategy(num_workers=2, num_ps=2) as strategy:
        with strategy.scope():
            table = nn.Embedding(options.rows, DIM, sparse=True)
            optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.05)
        coordinator = sg.ClusterCoordinator(strategy)
        rows = options.rows
        iterator = iter(coordinator.create_per_worker_dataset(lambda place: ratings(place, rows)))

        def step(iterator: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
            pairs, same_kind = next(iterator)
            optimizer.zero_grad()
            first, second = table(pairs).unbind(dim=1)
            loss = nn.functional.binary_cross_entropy_with_logits((first * second).sum(dim=1), same_kind)
            loss.backward()
            optimizer.step()
            return loss

        coordinator.schedule(step, args=(iterator,)).fetch()
        start = time.perf_counter()
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(options.steps)]
        coordinator.join()
        seconds = time.perf_counter() - start
        values = torch.stack(coordinator.fetch(losses))
        print(f"{options.rows} rows: {1000 * seconds / options.steps:.1f} ms per step")
        print(f"loss of the first steps {values[:20].mean():.3f}, of the last {values[-20:].mean():.3f}")


if __name__ == "__main__":
    main()
