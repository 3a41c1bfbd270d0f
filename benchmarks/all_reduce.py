"""Compares the sum of one vector over two processes with gloo and with the memory-copy limit.

All contenders run in the same two processes, in turns. As in training, stratagem's processes keep to a
core each, while gloo's threads may run on any.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from benchmarks.measure import RESULTS
from benchmarks.tables import TARGET_COLUMNS, Target, markdown, show
from stratagem.collectives.exchange import WindowExchange
from stratagem.collectives.shared_memory import SharedMemory
from stratagem.collectives.signals import NUM_LOOKS, Signals
from stratagem.processes.allocator import freed_memory_kept
from stratagem.processes.group import ChildGroup
from stratagem.processes.losses import raise_first
from stratagem.processes.region import Region
from stratagem.processes.registry import Registry

_SIZE = 2
_NUM_WARM_UP = 2
_TIMEOUT_S = 60.0
_NUM_REPEATS = {1: 40, 8: 20, 64: 8, 256: 4}  # by size in MB: in each round

EXCHANGE = "exchange of gradients"
GENERAL, GLOO, COPY = "SharedMemory.all_reduce", "gloo", "memcpy in both"

# By size in MB: how much faster than gloo, and how many memory copies long at most.
_AGAINST_GLOO, _AGAINST_COPY = {64: 4.0}, {64: 1.5}

Times = dict[str, list[float]]


def work(rank: int, regions: list[Region], num_mb: int, num_rounds: int, meeting: str) -> Times:
    """What each of the two processes does for one size.

    Args:
        rank: Which process this is.
        regions: Memory for signals, slots, their sum and the general exchange.
        num_mb: The size of the vector.
        num_rounds: How often every contender has its turn.
        meeting: A file where gloo's processes find each other.
    Returns:
        For each contender the seconds of all its calls, in order.
    """
    control, slots, total, scratch = regions
    torch.set_num_threads(1)
    num_elements = num_mb * 2**20 // 4
    signals = Signals(control, rank, _SIZE, _give_up, num_looks=NUM_LOOKS)
    exchange = WindowExchange(slots, total, torch.float32, [(0, num_elements)], num_elements, signals)
    general = SharedMemory(scratch, signals)
    outside, copy = torch.full((num_elements,), rank + 1.0), torch.zeros(num_elements)
    cores = os.sched_getaffinity(0)
    own_core = {sorted(cores)[rank % len(cores)]}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=_SIZE, timeout=timedelta(seconds=_TIMEOUT_S)
    )

    def sum_by_exchange(vector: torch.Tensor) -> torch.Tensor:
        exchange.forget()
        exchange.add_up([vector])
        signals.barrier()
        return exchange.sum

    def sum_by_gloo() -> torch.Tensor:
        torch.distributed.all_reduce(copy)
        return copy

    contenders: dict[str, tuple[set[int], Callable[[], torch.Tensor]]] = {
        EXCHANGE: (own_core, lambda: sum_by_exchange(outside)),
        GENERAL: (own_core, lambda: general.all_reduce(outside)),
        GLOO: (cores, sum_by_gloo),
        COPY: (own_core, lambda: copy.copy_(outside)),
    }
    times: Times = {name: [] for name in contenders}
    try:
        with freed_memory_kept():  # as a strategy does
            for round_number in range(num_rounds):
                order = list(contenders.items())
                for name, (where, call) in order if round_number % 2 == 0 else reversed(order):
                    os.sched_setaffinity(0, where)
                    copy.copy_(outside)
                    _check(name, call(), rank)
                    copy.zero_()  # gloo sums in place; it must not grow without bound
                    times[name] += _time(call, signals, _NUM_REPEATS.get(num_mb, 8))
    finally:
        os.sched_setaffinity(0, cores)
        torch.distributed.destroy_process_group()
    return times


def _check(name: str, result: torch.Tensor, rank: int) -> None:
    expected = rank + 1 if name == COPY else _SIZE * (_SIZE + 1) / 2
    assert result.min() == result.max() == expected, f"{name} is wrong"


def _time(call: Callable[[], Any], signals: Signals, num_repeats: int) -> list[float]:
    seconds = []
    for _ in range(_NUM_WARM_UP + num_repeats):
        signals.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[_NUM_WARM_UP:]


def _give_up(waited_s: float, missing: list[int]) -> None:
    if waited_s > _TIMEOUT_S:
        raise TimeoutError(f"process {missing} does not come")


def measure(num_mb: int, num_rounds: int) -> dict[str, list[float]]:
    """The median of each round, for each contender; a call lasts until the slower process has it."""
    num_elements = num_mb * 2**20 // 4
    regions = [
        Region.create(Signals.num_bytes(_SIZE)),
        Region.create(WindowExchange.num_slot_bytes(num_elements, 1, torch.float32, _SIZE)),
        Region.create(4 * num_elements),
        Region.create(SharedMemory.num_bytes(_SIZE)),
    ]
    Signals(regions[0], 0, _SIZE).reset()
    group = ChildGroup(Registry(), stall_timeout_s=_TIMEOUT_S)
    group.begin(range(1, _SIZE))
    group.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (regions, num_mb, num_rounds, f"{folder}/meeting")
            group.call(work, [(rank, *arguments) for rank in range(1, _SIZE)])
            own = work(0, *arguments)
            others = group.collect()
            raise_first(None, group.failures())
    finally:
        group.stop()
    medians = {}
    for name in own:
        slower = [max(each) for each in zip(own[name], *(other[name] for other in others), strict=True)]
        num_repeats = len(slower) // num_rounds
        rounds = [slower[start : start + num_repeats] for start in range(0, len(slower), num_repeats)]
        medians[name] = [statistics.median(each) for each in rounds]
    return medians


def targets_of(num_mb: int, medians: dict[str, list[float]]) -> list[Target]:
    """The ratios of one size."""
    found = []
    for what, first, second, bound, at_most in (
        ("speed of gloo", GLOO, EXCHANGE, _AGAINST_GLOO.get(num_mb), False),
        ("memory copies that it lasts", EXCHANGE, COPY, _AGAINST_COPY.get(num_mb), True),
        ("speed of gloo, SharedMemory.all_reduce", GLOO, GENERAL, None, False),
    ):
        ratio = statistics.median(medians[first]) / statistics.median(medians[second])
        rounds = [one / other for one, other in zip(medians[first], medians[second], strict=True)]
        found.append(Target(f"{num_mb} MB: {what}", ratio, bound, at_most, (min(rounds), max(rounds))))
    return found


def main() -> None:
    """Measures, prints the tables, writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1,8,64,256", help="in MB of float32")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    measured = {int(size): measure(int(size), options.rounds) for size in options.sizes.split(",")}
    columns = ["ms (least..most of the rounds)", *(f"{num_mb} MB" for num_mb in measured)]
    rows = [[name, *(_cell(each[name]) for each in measured.values())] for name in next(iter(measured.values()))]
    targets = [target for num_mb, medians in measured.items() for target in targets_of(num_mb, medians)]
    show("all-reduce, 2 processes", columns, rows)
    show("all-reduce of stratagem against the others", TARGET_COLUMNS, [target.cells() for target in targets])
    RESULTS.mkdir(exist_ok=True)
    content = {
        "num_rounds": options.rounds,
        "round_medians_s": {f"{num_mb} MB": medians for num_mb, medians in measured.items()},
        "targets": [target.as_json() for target in targets],
    }
    (RESULTS / "all_reduce.json").write_text(json.dumps(content, indent=2))
    tables = [markdown(columns, rows), markdown(TARGET_COLUMNS, [target.cells() for target in targets])]
    title = f"# All-reduce\n\nTwo processes, float32, medians of {options.rounds} interleaved round(s).\n"
    (RESULTS / "all_reduce.md").write_text("\n".join([title, *tables]))


def _cell(seconds: list[float]) -> str:
    low, middle, high = (1000 * each for each in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


if __name__ == "__main__":
    main()
