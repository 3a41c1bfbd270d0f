"""Shows what a memory limit on a share of the CPU costs a training step: nothing, by design."""

import contextlib
import time
from collections.abc import Callable

import torch

import stratagem as sg
from benchmarks.measure import interleaved, report


def make_step() -> Callable[[], None]:
    """One step of training a perceptron, on one thread."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(256, 784), torch.randint(10, (256,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None], device: contextlib.AbstractContextManager[object]) -> float:
    """How long 100 steps take on a device."""
    with device:
        step()
        start = time.perf_counter()
        for _ in range(100):
            step()
        return (time.perf_counter() - start) / 100


def main() -> None:
    """Prints the table."""
    shares = [
        sg.config.LogicalDeviceConfiguration(num_cores=1),
        sg.config.LogicalDeviceConfiguration(num_cores=1, memory_limit=1024),
    ]
    sg.config.set_logical_device_configuration("cpu:0", shares)
    step = make_step()
    contenders = {
        "a core without a limit": lambda: seconds_of(step, sg.devices.serve("cpu:0")),
        "a core with a limit": lambda: seconds_of(step, sg.devices.serve("cpu:1")),
    }
    report("memory limit", interleaved(contenders, num_rounds=15), reference="a core without a limit")


if __name__ == "__main__":
    main()
