"""Trains a small network on handwritten digits with an Estimator, on one device.

`estimator_distributed.py` is the same program on many devices, and shows what is different.

python examples/estimator_baseline.py [--epochs 12] [--model-dir FOLDER]
"""

import argparse
import tempfile
from typing import Any

import torch
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


class Net(nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The part of the images that are recognised."""
    return (outputs.argmax(dim=1) == labels).float().mean()


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> sg.estimator.EstimatorSpec:
    """Builds the model once; what happens in each step is said by functions."""
    model = Net(params["width"])
    return sg.estimator.EstimatorSpec(
        mode,
        model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        predictions=lambda outputs: outputs.argmax(dim=1),
        eval_metric_ops={"accuracy": accuracy},
    )


def main() -> None:
    """Trains, tests after every second epoch, and predicts; started again, it goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--model-dir", default=None, help="where checkpoints are kept; by default nowhere for long")
    options = parser.parse_args()

    train_set, test_set = load_digits()
    steps_per_epoch = len(train_set) // 56

    def train_input() -> sg.estimator.Input:
        loader = DataLoader(train_set, batch_size=56, shuffle=True, generator=torch.Generator().manual_seed(0))
        return sg.estimator.Input(loader, num_epochs=None)

    def test_input() -> DataLoader[Any]:
        return DataLoader(test_set, batch_size=100)

    class Show(sg.estimator.SessionRunHook):
        """Prints what an evaluation is of."""

        def end(self, run_context: sg.estimator.RunContext) -> None:
            print(f"testing after step {run_context.global_step}")

    with tempfile.TemporaryDirectory() as folder:
        config = sg.estimator.RunConfig(
            random_seed=0,
            save_checkpoints_steps=2 * steps_per_epoch,
        )
        estimator = sg.estimator.Estimator(model_fn, options.model_dir or folder, config, params={"width": 64})
        result = sg.estimator.train_and_evaluate(
            estimator,
            sg.estimator.TrainSpec(train_input, max_steps=options.epochs * steps_per_epoch),
            sg.estimator.EvalSpec(test_input, steps=None, hooks=[Show()], throttle_secs=0),
        )
        print(f"step {result['global_step']}: loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%}")
        first = [int(digit) for digit, _ in zip(estimator.predict(test_input), range(10), strict=False)]
        print("first digits, predicted:", first, "real:", test_set.tensors[1][:10].tolist())


if __name__ == "__main__":
    main()
