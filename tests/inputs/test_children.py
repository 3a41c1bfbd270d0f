"""The same in real child processes."""

import gc
import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stratagem.inputs import distribute, portions
from stratagem.objects import per_replica
from stratagem.processes.group import ChildGroup
from stratagem.processes.losses import raise_first
from stratagem.processes.registry import Registry


class GroupHost:
    """A strategy that only has its children."""

    def __init__(self, group):
        self.group = group
        self.num_replicas = len(group.members) + 1
        self.replicas_here = range(self.num_replicas)
        self.input_pipeline = 1, 0

    def require_usable(self):
        pass

    def draw_alike(self):
        pass

    def compare_data(self, told):
        pass

    def call_in_children(self, function, *args):
        self.group.call_all(function, *args)
        self.group.collect()
        raise_first(None, self.group.failures())

    def run(self, function, batch):
        """What each replica's function makes of its part."""
        ranks = range(1, self.num_replicas)
        self.group.call(_run, [(function, per_replica.select(batch, rank)) for rank in ranks])
        own = function(per_replica.select(batch, 0))
        answers = self.group.collect()
        raise_first(None, self.group.failures())
        return [own, *answers]


def _run(function, batch):
    return function(per_replica.load_deferred(batch))


@pytest.fixture(scope="module")
def host():
    group = ChildGroup(Registry())
    group.begin([1, 2])
    group.start()
    yield GroupHost(group)
    group.stop()


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 99:
            raise KeyError("row 99 is bad")
        return torch.tensor([index]), f"row {index}"


def rows_of(batch):
    return batch[0].flatten().tolist(), list(batch[1])


def threads_here(_batch):
    return [each.name for each in threading.enumerate() if each.name.startswith("stratagem")]


def num_worker_processes(_batch=None):
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def sources_here(_batch):
    return list(portions._known)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_children_load_their_own_rows(host, num_workers):
    torch.manual_seed(0)
    loader = DataLoader(Rows(11), batch_size=4, shuffle=True, num_workers=num_workers)
    expected = [rows_of(batch) for _ in range(2) for batch in loader]
    torch.manual_seed(0)
    data = distribute(loader, host)
    seen = [host.run(rows_of, batch) for _ in range(2) for batch in data]
    assert [tuple([*itertools.chain(*column)] for column in zip(*parts, strict=True)) for parts in seen] == expected
    assert [len(part[0]) for part in seen[-1]] == [1, 1, 1]
    assert host.run(threads_here, ()) == [[], [], []]
    assert host.run(num_worker_processes, ())[1:] == [0, 0]


def test_abandoned_workers_in_children_end_with_the_next_epoch(host):
    data = distribute(DataLoader(Rows(30), batch_size=3, num_workers=1), host)
    for batch in data:
        host.run(rows_of, batch)
        break
    assert host.run(num_worker_processes, ())[1:] == [1, 1]
    unused = iter(data)
    assert host.run(num_worker_processes, ())[1:] == [0, 0]
    unused.close()


class Loaded(Rows):
    """Rows with the process that loaded them."""

    def __getitem__(self, index):
        return super().__getitem__(index), os.getpid()


def test_persistent_workers_stay_for_all_epochs(host):
    loader = DataLoader(Loaded(13), batch_size=4, num_workers=1, persistent_workers=True)
    data = distribute(loader, host)
    processes, seen = [], []
    for num_batches in (4, 2, 4, 4):  # the second epoch is given up
        parts = [host.run(lambda batch: batch, batch) for batch in itertools.islice(data, num_batches)]
        processes.append({pid for part in parts for _, pids in part for pid in pids.tolist()})
        seen.append([sum(len(pids) for _, pids in part) for part in parts])
    assert processes == [processes[0]] * 4
    assert len(processes[0]) == 3
    assert seen == [[4, 4, 4, 3], [4, 4], [4, 4, 4, 3], [4, 4, 4, 3]]
    data.close()
    assert host.run(num_worker_processes, ())[1:] == [0, 0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 6")
@pytest.mark.parametrize(("num_workers", "num_in_each"), [(2, 1), (6, 2)])
def test_replicas_share_the_workers_of_a_loader(host, num_workers, num_in_each):
    data = distribute(DataLoader(Rows(30), batch_size=3, num_workers=num_workers), host)
    epoch = iter(data)
    host.run(rows_of, next(epoch))
    assert host.run(num_worker_processes, ())[1:] == [num_in_each, num_in_each]
    epoch.close()


def test_arrays_are_sent_once(host):
    x = torch.arange(300_000.0).view(-1, 3)
    data = distribute(x, host, global_batch_size=50_000)
    totals = [sum(host.run(lambda batch: batch.double().sum().item(), batch)) for batch in data]
    assert sum(totals) == x.double().sum().item()


def test_children_forget_data_that_nobody_has(host):
    data = distribute(torch.arange(6), host, global_batch_size=3)
    key = data.key
    for batch in data:
        host.run(lambda batch: batch.sum().item(), batch)
    assert all(key in keys for keys in host.run(sources_here, ()))
    del data, batch
    gc.collect()
    list(distribute([], host))
    assert not any(key in keys for keys in host.run(sources_here, ()))


def test_error_of_a_dataset_in_a_child_is_raised(host):
    data = distribute(DataLoader(Rows(100), batch_size=100), host)
    (batch,) = data
    with pytest.raises(KeyError, match="row 99 is bad") as raised:
        host.run(rows_of, batch)
    assert "raised in replica 2" in raised.value.__notes__[0]
