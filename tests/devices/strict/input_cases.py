"""What `distribute` gives each replica on GPUs, for each kind of data, on strict devices; see `in_a_program`.

The same rows in the same order as on the CPU, on the device of the replica. Two replicas, so that batches of five rows
are uneven, and of one row empty for one of them.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import stratagem as sg

STRATEGIES: list[sg.Strategy] = []
_open = contextlib.ExitStack()


def prepare() -> None:
    sg.config.simulate_devices("GPU", 2, strict=True)
    torch.set_num_threads(1)
    STRATEGIES.append(_open.enter_context(sg.MirroredStrategy(["gpu:1", "gpu:0"])))
    STRATEGIES.append(_open.enter_context(sg.MirroredStrategy(["cpu:0"], cross_device_ops="to_one")))


def finish() -> None:
    _open.close()


def rows_of(data: Any) -> list[list[list[Any]]]:
    """For each batch the rows of each replica that has some, which must be on its device."""

    def look(batch: Any) -> tuple[str, str]:
        x = batch["x"] if isinstance(batch, dict) else batch
        x = x[0] if isinstance(x, list | tuple) else x
        return json.dumps(x.tolist()), str(x.device)

    strategy, _ = STRATEGIES
    found = []
    for batch in data:
        parts = strategy.local_results(strategy.run(look, args=(batch,)))
        assert [place for _, place in parts] == ["gpu:1", "gpu:0"][: len(parts)]
        found.append([json.loads(rows) for rows, _ in parts])
    return found


class Squares(Dataset[torch.Tensor]):
    """Loaded by index, in the process of the replica."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Stream(IterableDataset[int]):
    """Read by the main program."""

    def __iter__(self) -> Iterator[int]:
        yield from range(6)


EXPECTED = [[[0, 1, 2], [3, 4]], [[5]]]
BATCHES = [torch.arange(5), torch.arange(5, 6)]


def case_every_kind_of_data_gives_the_rows_of_the_cpu() -> None:
    strategy, _ = STRATEGIES
    kinds: dict[str, Callable[[], Any]] = {
        "list": lambda: strategy.distribute(BATCHES),
        "generator": lambda: strategy.distribute(iter(BATCHES)),
        "function": lambda: strategy.distribute(lambda: iter(BATCHES)),
        "ahead": lambda: strategy.distribute(lambda: iter(BATCHES), prefetch=True),
        "tensor": lambda: strategy.distribute(torch.arange(6), global_batch_size=5),
        "array": lambda: strategy.distribute(np.arange(6), global_batch_size=5),
        "dict": lambda: strategy.distribute({"x": np.arange(6)}, global_batch_size=5),
        "dataset": lambda: strategy.distribute(Squares(), global_batch_size=5),
        "loader": lambda: strategy.distribute(DataLoader(Squares(), batch_size=5)),
        "pinned": lambda: strategy.distribute(DataLoader(Squares(), batch_size=5, pin_memory=True)),
        "stream": lambda: strategy.distribute(DataLoader(Stream(), batch_size=5)),
        "on a device": lambda: strategy.distribute([each.to("gpu:0") for each in BATCHES]),
    }
    for kind, make in kinds.items():
        data = make()
        assert rows_of(data) == EXPECTED, kind
        if kind != "generator":
            assert rows_of(data) == EXPECTED, kind


def case_tuples_and_other_dimensions_are_cut() -> None:
    strategy, _ = STRATEGIES
    pairs = TensorDataset(torch.arange(6), torch.arange(6.0))
    assert rows_of(strategy.distribute(DataLoader(pairs, batch_size=5))) == EXPECTED
    wide = [each.view(1, -1) for each in BATCHES]
    found = rows_of(strategy.distribute(wide, batch_dim=1))
    assert found == [[[each] for each in parts] for parts in EXPECTED]


def case_shuffled_rows_are_in_the_order_of_the_cpu() -> None:
    on_gpus, on_cpu = STRATEGIES
    orders = []
    for strategy in (on_gpus, on_cpu):
        torch.manual_seed(4)
        data = strategy.distribute(torch.arange(20), global_batch_size=8, shuffle=True)
        orders.append([strategy.gather(strategy.run(lambda x: x, args=(batch,))).tolist() for batch in data])
    assert orders[0] == orders[1]


def case_function_of_each_input_pipeline_fills_the_replicas() -> None:
    strategy, _ = STRATEGIES
    data = strategy.distribute_from_function(lambda context: iter([torch.arange(2), torch.arange(2, 4)]))
    assert rows_of(data) == [[[0, 1], [2, 3]]]


def case_uneven_batches_are_refused_where_even_ones_are_asked_for() -> None:
    strategy, _ = STRATEGIES
    with pytest.raises(sg.errors.UnevenDataError, match="5"):
        rows_of(strategy.distribute(BATCHES, uneven="error"))


def case_texts_stay_what_they_are() -> None:
    strategy, _ = STRATEGIES
    (batch,) = strategy.distribute({"x": np.array(["a", "b", "c"])}, global_batch_size=3)
    found = strategy.local_results(strategy.run(lambda each: "".join(each["x"]), args=(batch,)))
    assert found == ("ab", "c")
