"""Data of which each machine has its own: it reads no other, and those that run out wait for the rest.

Owns how machines end an epoch together. A machine without data gets its last batch
again, which counts for nothing, until all are done.
"""

import copy
from collections.abc import Callable, Generator, Iterator
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from stratagem._checks import StaysHere
from stratagem.errors import StrategyError
from stratagem.inputs.reader import Batches, InputHost, Told
from stratagem.inputs.splitting import uncounted


@final
class OneMachine:
    """A strategy as if there were no other machine."""

    def __init__(self, host: InputHost) -> None:
        self._host = host

    @property
    def num_replicas(self) -> int:
        return len(self._host.replicas_here)

    @property
    def replicas_here(self) -> range:
        return range(self.num_replicas)

    @property
    def input_pipeline(self) -> tuple[int, int]:
        return 1, 0

    def require_usable(self) -> None:
        self._host.require_usable()

    def draw_alike(self) -> None:
        """What others draw is their own business."""

    def compare_data(self, told: Told) -> None:
        """So is what they have."""

    def is_any(self, has_data: bool) -> bool:
        return has_data

    def call_in_children(self, function: Callable[..., None], *args: Any) -> None:
        self._host.call_in_children(function, *args)


@final
class OwnData(StaysHere):
    """Batches of this machine's own data.

    Args:
        batches: What this machine reads, distributed over its replicas.
        host: The strategy.
    """

    def __init__(self, batches: Any, host: InputHost) -> None:
        self._batches = batches
        self._host = host

    def __iter__(self) -> Iterator[Any]:
        return Batches(self._together(), self._host, meets_others=True)

    def _together(self) -> Generator[Any]:
        batches, last = iter(self._batches), None
        while True:
            batch = next(batches, None)
            if not self._host.is_any(batch is not None):
                return
            if batch is None and last is None:
                number, machines = self._host.input_pipeline[1], self._host.input_pipeline[0]
                raise StrategyError(
                    f"worker {number} of {machines} got no batch while others have some: its part of the data is "
                    f"empty; give every worker at least one batch, or share data with auto_shard='data'"
                )
            last = batch if batch is not None else uncounted(last)
            yield last

    def __len__(self) -> int:
        return len(self._batches)

    def close(self) -> None:
        """Drops what the replicas keep."""
        self._batches.close()


def files_of_this_machine(data: Any, host: InputHost) -> Any:
    """A copy of the data that reads every n-th of its files."""
    if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset):
        own = copy.copy(data)
        own.__dict__["dataset"] = files_of_this_machine(data.dataset, host)  # its own way refuses to change it
        return own
    files = getattr(data, "files", None)
    if files is None:
        raise StrategyError(
            f"auto_shard='file' is for data with a list of its files in `files` (a Dataset, an iterable of batches, or "
            f"a DataLoader of an IterableDataset), got {type(data).__name__} without; give it one, or use "
            f"auto_shard='data'"
        )
    num_machines, number = host.input_pipeline
    if len(files) < num_machines:
        raise StrategyError(
            f"auto_shard='file' gives each of {num_machines} workers its files, and there are {len(files)}; make more "
            f"files, or use auto_shard='data'"
        )
    own = copy.copy(data)
    own.files = list(files)[number::num_machines]
    return own
