"""Compares programs whose time goes into loading: images that loader workers augment in Python, and a small model.

Every program has as many loader workers in all. DDP has a loader in each of its processes, as its users write it;
MirroredStrategy is given one loader. Programs measure in turns.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import turns
from benchmarks.contender import build, divide, train_step
from benchmarks.measure import RESULTS
from benchmarks.models import Workload
from benchmarks.tables import TARGET_COLUMNS, Target, show
from benchmarks.training import Measured, Program, environment, machine, ratio, speed

PROGRAMS = (Program("single", 1), Program("ddp", 2), Program("stratagem", 2))
_NUM_LOADER_WORKERS = 2
_GLOBAL_BATCH_SIZE = 32
_NUM_BATCHES = 20  # of a round
_AGAINST_DDP = 1.0


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Images of noise; each is turned, cut and blurred in Python when it is taken."""

    def __len__(self) -> int:
        return _NUM_BATCHES * _GLOBAL_BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        random = np.random.default_rng(index)
        image = random.random((3, 72, 72), dtype=np.float32)
        image = np.rot90(image, random.integers(4), axes=(1, 2))
        top, left = random.integers(8, size=2)
        image = image[:, top : top + 64, left : left + 64]
        for _ in range(4):
            image = (image + np.roll(image, 1, axis=1) + np.roll(image, 1, axis=2)) / 3
        return torch.from_numpy(np.ascontiguousarray(image)), index % 10


def make_loader(num_parts: int = 1, part: int | None = None) -> DataLoader[tuple[torch.Tensor, int]]:
    """The loader of a program, or of one of the processes that each have one."""
    data = Augmented()
    sampler = None if part is None else DistributedSampler(data, num_parts, part, shuffle=False)
    return DataLoader(
        data,
        _GLOBAL_BATCH_SIZE // num_parts,
        sampler=sampler,
        num_workers=_NUM_LOADER_WORKERS // num_parts,
        persistent_workers=True,
    )


def _small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))


WORKLOAD = Workload(_small_network, lambda: next(iter(make_loader())), _NUM_BATCHES)


def measure(epoch: Callable[[], Iterator[float]], *, leads: bool = True) -> None:
    """Times an epoch in each round, after one that does not count."""
    list(epoch())
    for answer in turns.rounds(leads=leads):
        start = time.perf_counter()
        losses = list(epoch())
        answer({"seconds": [(time.perf_counter() - start) / len(losses)], "loss": losses[-1]})


def single() -> None:
    """Plain torch in one process."""
    loader, step = make_loader(), train_step(WORKLOAD, *build(WORKLOAD))
    measure(lambda: (step(*batch).item() for batch in loader))


def ddp() -> None:
    """DistributedDataParallel under torchrun, a loader in each process."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    model, optimizer = build(WORKLOAD)
    step = train_step(WORKLOAD, nn.parallel.DistributedDataParallel(model), optimizer)
    loader = make_loader(size, rank)
    measure(lambda: (step(*batch).item() for batch in loader), leads=rank == 0)
    torch.distributed.destroy_process_group()


def stratagem() -> None:
    """MirroredStrategy with the loader of the program for one process."""
    import stratagem as sg  # noqa: PLC0415  # the others must not pay for it

    divide(sg, 2)
    with sg.MirroredStrategy() as strategy:
        with strategy.scope():
            step = train_step(WORKLOAD, *build(WORKLOAD))
        data = strategy.distribute(make_loader())
        measure(lambda: (float(strategy.reduce("mean", strategy.run(step, args=batch))) for batch in data))


def command(program: Program) -> list[str]:
    """What starts a program."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if program.contender == "ddp" else []
    )
    return [sys.executable, *launcher, "-m", "benchmarks.loader", "--program", program.contender]


def main() -> None:
    """Measures, prints the tables, writes the file; or is one of the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", choices=[each.contender for each in PROGRAMS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        {"single": single, "ddp": ddp, "stratagem": stratagem}[options.program]()
        return
    found = turns.take_turns({each: command(each) for each in PROGRAMS}, options.rounds, environment())
    measured: Measured = {("loader", program): figures for program, figures in found.items()}
    own, other = PROGRAMS[2], PROGRAMS[1]
    what = f"examples/s of DDP, {_NUM_LOADER_WORKERS} loader workers, 2 replicas"
    target: Target = ratio(what, measured, "loader", (own, other), speed, _AGAINST_DDP)
    rows = [[str(program), f"{_GLOBAL_BATCH_SIZE * speed(figures[-1]):.0f}"] for program, figures in found.items()]
    Console(width=130).print(f"[dim]{options.rounds} rounds of {_NUM_BATCHES} batches[/]")
    show("Loading, examples/s", ("program", "examples/s"), rows)
    show("stratagem against DDP", TARGET_COLUMNS, [target.cells()])
    RESULTS.mkdir(exist_ok=True)
    kept: dict[str, Any] = {str(program): figures for program, figures in found.items()}
    content = {"num_rounds": options.rounds, "environment": machine(), "measured": kept, "targets": [target.as_json()]}
    (RESULTS / "loader.json").write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
