"""Shows how many pushes of others the pushes of each worker had missed."""

from collections.abc import Mapping
from typing import Any

import torch

Histogram = Mapping[int, Mapping[int, int]]
"""For each worker, how many of its pushes had which staleness."""


def described(histogram: Histogram) -> str:
    """A histogram as lines of text."""
    lines = ["staleness of pushes, by worker: how many pushes of others each had missed"]
    for worker, counts in histogram.items():
        total = sum(counts.values())
        mean = sum(staleness * count for staleness, count in counts.items()) / total
        parts = ", ".join(f"{staleness}: {count}" for staleness, count in counts.items())
        lines.append(f"worker {worker}: {total} pushes, mean {mean:.2f} ({parts})")
    return "\n".join(lines)


def write(histogram: Histogram, writer: Any, global_step: int) -> None:
    """Adds a histogram to TensorBoard, and the mean of each worker.

    Args:
        histogram: What to add.
        writer: A `torch.utils.tensorboard.SummaryWriter`.
        global_step: At which step.
    """
    for worker, counts in histogram.items():
        found = torch.tensor(list(counts)).repeat_interleave(torch.tensor(list(counts.values())))
        writer.add_histogram(f"staleness/worker {worker}", found, global_step)
        writer.add_scalar(f"staleness/worker {worker}, mean", found.double().mean().item(), global_step)
