"""What tests of faults do with a strategy before and after the fault."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import stratagem as sg


def train(strategy: sg.Strategy, step: Callable[..., torch.Tensor], num_steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for batch in strategy.distribute([torch.randn(9, 4, generator=generator) for _ in range(num_steps)]):
        strategy.run(step, args=(batch,))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def pids(strategy: sg.Strategy) -> list[int]:
    return list(strategy.local_results(strategy.run(os.getpid)))


def is_gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False
