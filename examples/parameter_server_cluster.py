"""Trains a small network on digits with parameter servers, workers and an evaluator, each a task of its own.

Every task runs this program. A ps task only serves; workers train at their own pace, each on its part of every batch;
the first of them saves, and the evaluator tests every checkpoint that it finds.

stratagem run --workers 2 --ps 1 --evaluator --show worker/0,evaluator/0 examples/parameter_server_cluster.py DIR
"""

import argparse
import time

import torch
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem.estimator import latest_checkpoint
from stratagem.training.checkpoints import load_checkpoint, load_latest, save_checkpoint, step_of


def main() -> None:
    """Trains, or evaluates, as the task demands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load_digits()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    with sg.ParameterServerStrategy() as strategy:  # in a ps task this serves, and ends the program
        with strategy.scope():
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        num_pushes = options.epochs * len(loader) * strategy.num_replicas
        if strategy.task == "evaluator/0":
            evaluate(strategy, model, test_set.tensors, options.folder)
            return

        def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        found = load_latest(options.folder)
        if found is not None:  # after a failure all servers go on from the same checkpoint
            strategy.load_state_dict(found[1]["strategy"])
        for epoch in range(options.epochs):
            for batch in strategy.distribute(loader):
                loss = strategy.run(step, args=batch)
            if strategy.is_chief:
                is_last = epoch == options.epochs - 1
                state = {"strategy": strategy.state_dict(), "is_last": is_last}
                save_checkpoint(options.folder, strategy.version, state, keep_max=5)
                print(f"epoch {epoch + 1:2}: loss {loss.item():.4f}, {strategy.version} of {num_pushes} pushes")
        print(f"{strategy.task}: staleness of its pushes {strategy.staleness()}")


def evaluate(strategy: sg.Strategy, model: nn.Module, test_data: tuple[torch.Tensor, ...], folder: str) -> None:
    """Tests every new checkpoint, until the last one."""
    images, labels = test_data
    path, is_last = None, False
    while not is_last:
        newest = latest_checkpoint(folder)
        if newest is None or newest == path:
            time.sleep(0.1)
            continue
        path, state = newest, load_checkpoint(newest)
        strategy.load_state_dict(state["strategy"])
        is_last = state["is_last"]
        with torch.no_grad():
            accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
        print(f"checkpoint {step_of(path)}: test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
