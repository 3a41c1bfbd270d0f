"""Compares `TPUStrategy` with plain torch_xla, written by hand, on the same model and batches.

Both train on all devices of XLA as one program, in one process and by turns: four shares of the CPU, if nothing else
is said (`make bench-tpu`). A measurement is the mean time of a step, from host memory to the end of the computation.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import stratagem as sg
from benchmarks.measure import RESULTS
from benchmarks.models import WORKLOADS, Workload
from benchmarks.tables import TARGET_COLUMNS, Target, show

_BOUND = 1.10


def by_hand(workload: Workload, num_steps: int) -> Callable[[], float]:
    """A training loop of torch_xla's own: a mesh, batches sharded along their first axis."""
    mesh = xs.Mesh(list(range(xr.global_runtime_device_count())), (xr.global_runtime_device_count(),), ("data",))
    device = torch_xla.device()
    torch.manual_seed(0)
    model = workload.make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = workload.make_batch()
    layouts = [xs.ShardingSpec(mesh, ("data", *[None] * (part.dim() - 1))) for part in batch]

    def measure() -> float:
        xm.wait_device_ops()
        begin = time.perf_counter()
        for _ in range(num_steps):
            inputs, targets = (
                xm.send_cpu_data_to_device([part], device, layout)[0]
                for part, layout in zip(batch, layouts, strict=True)
            )
            optimizer.zero_grad()
            loss = workload.loss(model, inputs, targets)
            loss.backward()
            optimizer.step()
            torch_xla.sync()
        loss.item()
        xm.wait_device_ops()
        return (time.perf_counter() - begin) / num_steps

    return measure


def by_strategy(workload: Workload, num_steps: int) -> Callable[[], float]:
    """The same with `TPUStrategy`."""
    strategy = sg.TPUStrategy()
    torch.manual_seed(0)
    with strategy.scope():
        model = workload.make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = strategy.distribute([workload.make_batch()] * num_steps)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    def measure() -> float:
        xm.wait_device_ops()
        begin = time.perf_counter()
        for batch in batches:
            loss = strategy.run(step, args=batch)
        strategy.reduce("mean", loss).item()
        xm.wait_device_ops()
        return (time.perf_counter() - begin) / num_steps

    return measure


def compare(name: str, num_steps: int, num_rounds: int) -> tuple[Target, list[str]]:
    """How long steps take both ways, by turns; the ratio of each round counts."""
    contenders = {
        "by hand": by_hand(WORKLOADS[name], num_steps),
        "TPUStrategy": by_strategy(WORKLOADS[name], num_steps),
    }
    for measure in contenders.values():
        measure()  # compiles
    seconds: dict[str, list[float]] = {each: [] for each in contenders}
    for number in range(num_rounds):
        for each in sorted(contenders, reverse=number % 2 == 1):
            seconds[each].append(contenders[each]())
    ratios = [own / hand for own, hand in zip(seconds["TPUStrategy"], seconds["by hand"], strict=True)]
    spread = (min(ratios), max(ratios))
    target = Target(f"{name}: step of TPUStrategy / by hand", statistics.median(ratios), _BOUND, True, spread)
    medians = [f"{1000 * statistics.median(each):.1f}" for each in seconds.values()]
    return target, [name, *medians]


def main() -> None:
    """Measures, prints tables and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,stack10,transformer")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    xr.use_spmd()
    found = [compare(name, given.steps, given.rounds) for name in given.models.split(",")]
    devices = f"{xr.global_runtime_device_count()} devices of XLA on {xr.device_type()}"
    show(f"ms per step, {devices}", ("model", "by hand", "TPUStrategy"), [row for _, row in found])
    show("targets", TARGET_COLUMNS, [target.cells() for target, _ in found])
    RESULTS.mkdir(exist_ok=True)
    figures = {target.what: target.as_json() for target, _ in found}
    (RESULTS / "tpu.json").write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
