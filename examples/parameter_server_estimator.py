"""Trains an Estimator with parameter servers: workers train, the evaluator tests every checkpoint, servers serve.

Every task runs this program; which part is its own `train_and_evaluate` knows from the cluster.

stratagem run --workers 2 --ps 1 --evaluator --show worker/0,evaluator/0 examples/parameter_server_estimator.py DIR
"""

import argparse
from typing import Any

import torch
from digits import load_digits
from torch import nn

import stratagem as sg


def model_fn(mode: str) -> sg.estimator.EstimatorSpec:
    """A small network."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return sg.estimator.EstimatorSpec(
        mode,
        module,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.Adam(module.parameters(), lr=2e-3),
        eval_metric_ops={"accuracy": lambda outputs, labels: (outputs.argmax(1) == labels).float().mean()},
    )


def main() -> None:
    """Does what the task demands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    train_set, test_set = load_digits()

    def train_input() -> Any:
        return sg.estimator.Input(train_set, global_batch_size=64, shuffle=True, num_epochs=None)

    def test_input() -> Any:
        return sg.estimator.Input(test_set, global_batch_size=256)

    with sg.ParameterServerStrategy() as strategy:  # in a ps task this serves, and ends the program
        config = sg.estimator.RunConfig(
            model_dir=options.folder, train_distribute=strategy, save_checkpoints_steps=40, random_seed=0
        )
        metrics = sg.estimator.train_and_evaluate(
            sg.estimator.Estimator(model_fn, config=config),
            sg.estimator.TrainSpec(train_input, max_steps=options.steps),
            sg.estimator.EvalSpec(test_input, steps=None, throttle_secs=0),
        )
        if metrics:
            print(f"step {metrics['global_step']}: test accuracy {metrics['accuracy']:.1%}")
        else:
            print(f"{strategy.task}: {strategy.version} pushes of all workers")


if __name__ == "__main__":
    main()
