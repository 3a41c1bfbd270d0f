"""Runs one function in several real processes at once: this one as replica 0, children as the others."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from stratagem.collectives.signals import Signals
from stratagem.errors import CollectiveError
from stratagem.processes.group import ChildGroup
from stratagem.processes.losses import raise_first
from stratagem.processes.region import Region
from stratagem.processes.registry import Registry

PATIENCE_S = 20.0


class Replicas:
    """Processes that a whole test file shares; a run takes as many of them as it needs."""

    def __init__(self, num_replicas: int) -> None:
        self.group = ChildGroup(Registry(keeps=True))
        self.group.begin(range(1, num_replicas))

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(rank, size, *arguments)` on replicas 0 to `size - 1`."""
        ranks = range(1, len(self.group.members) + 1)
        self.group.call(_take_part, [(rank, size, function, arguments) for rank in ranks])
        own, error = None, None
        try:
            own = function(0, size, *arguments)
        except Exception as raised:
            error = raised
        answers = self.group.collect()
        raise_first(error, self.group.failures())
        return [own, *answers][:size]


@contextlib.contextmanager
def started(num_replicas: int) -> Iterator[Replicas]:
    replicas = Replicas(num_replicas)
    replicas.group.start()
    try:
        yield replicas
    finally:
        replicas.group.stop()


def shared(*sizes_bytes: int) -> list[Region]:
    """Shared memory for a test, gone with it."""
    return [Region.create(size_bytes) for size_bytes in sizes_bytes]


def give_up(waited_s: float, missing: list[int]) -> None:
    """Ends a wait that a broken test would never come back from."""
    if waited_s > PATIENCE_S:
        raise CollectiveError(f"gave up after {waited_s:.0f} s without replicas {missing}")


def meeting_point(region: Region, rank: int, size: int) -> Signals:
    return Signals(region, rank, size, give_up)


def seeded(*numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = seed * 1009 + number + 1
    return torch.Generator().manual_seed(seed)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(torch.cat([each.flatten()]).view(torch.uint8) for each in (one, other)))


def num_threads() -> int:
    """All threads of this process, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def sockets() -> set[str]:
    """The inodes of the sockets that this process holds."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            if link.startswith("socket:["):
                found.add(link[len("socket:[") : -1])
    return found


def addresses() -> set[str]:
    """Where the TCP sockets of this process are bound, in the words of /proc/net."""
    own, found = sockets(), set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[9] in own:
                found.add(fields[1].partition(":")[0])
    return found


def _take_part(rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    return function(rank, size, *arguments) if rank < size else None
