"""How several machines share data: each sees the part of its own replicas."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from stratagem.errors import StrategyError
from stratagem.inputs import distribute, distribute_from_function
from tests.inputs.hosts import FakeHost, leaves_of, seen_by

SIZES = (2, 1)  # replicas of each machine


def machines(**options):
    """The same strategy as each machine sees it."""
    starts = itertools.accumulate(SIZES, initial=0)
    return [
        FakeHost(sum(SIZES), range(start, start + size), (len(SIZES), number), **options)
        for number, (start, size) in enumerate(zip(starts, SIZES, strict=False))
    ]


def seen(host, data):
    """For each batch what each replica of a machine gets."""
    return [[seen_by(place, batch).tolist() for place in range(len(host.replicas_here))] for batch in data]


def loader(num_examples, global_batch_size):
    dataset = TensorDataset(torch.arange(num_examples))
    return DataLoader(
        dataset, batch_size=global_batch_size, collate_fn=lambda rows: torch.stack([row for (row,) in rows])
    )


def batches(num_examples, global_batch_size):
    return list(torch.arange(num_examples).split(global_batch_size))


@pytest.mark.parametrize("source", [loader, batches])
def test_machines_together_see_each_global_batch_once_and_in_order(source):
    parts = [seen(host, distribute(source(10, 6), host)) for host in machines()]
    assert parts[0] == [[[0, 1], [2, 3]], [[6, 7], [8]]]
    assert parts[1] == [[[4, 5]], [[9]]]


@pytest.mark.parametrize("source", [loader, batches])
def test_a_machine_for_which_nothing_is_left_gets_a_row_that_does_not_count(source):
    host = machines()[1]
    *_, last = distribute(source(8, 6), host)
    assert seen_by(0, last).shape == (1,)
    assert leaves_of(last)[0].counts == (0,)


def test_a_loader_loads_only_the_rows_of_its_machine():
    loaded = []

    class Noting(TensorDataset):
        def __getitem__(self, index):
            loaded.append(index)
            return super().__getitem__(index)

        __getitems__ = None

    host = machines()[1]
    for batch in distribute(DataLoader(Noting(torch.arange(12)), batch_size=6), host):
        seen_by(0, batch)
    assert sorted(loaded) == [4, 5, 10, 11]


def test_counts_are_those_of_the_machine():
    (batch,) = distribute([torch.arange(5)], machines()[0])
    assert leaves_of(batch)[0].counts == (2, 2)


def test_a_function_makes_the_batches_of_its_machine():
    contexts = []

    def make(context):
        contexts.append(context)
        return [torch.full((2,), context.input_pipeline_id)] * 2

    parts = [seen(host, distribute_from_function(make, host)) for host in machines()]
    assert parts == [[[[0, 0], [0, 0]]], [[[1, 1]], [[1, 1]]]]
    assert [(each.num_input_pipelines, each.input_pipeline_id, each.num_replicas_in_sync) for each in contexts] == [
        (2, 0, 3),
        (2, 1, 3),
    ]


def test_own_data_ends_when_that_of_all_machines_has():
    host = machines(others_have_data=[True] * 3)[1]
    got = seen(host, distribute([torch.ones(2)], host, auto_shard="off"))
    assert got == [[[1.0, 1.0]]] * 3
    *_, last = distribute([torch.ones(2)], machines(others_have_data=[True] * 3)[1], auto_shard="off")
    assert leaves_of(last)[0].counts == (0,)


def test_a_machine_without_any_data_of_its_own_is_told_so():
    host = machines(others_have_data=[True])[1]
    with pytest.raises(StrategyError, match=r"worker 1 of 2 got no batch while others have some"):
        list(distribute([], host, auto_shard="off"))


class Files:
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        return iter([torch.tensor([number] * 2) for number in self.files])


class StreamOfFiles(torch.utils.data.IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        return (number * 10 + line for number in self.files for line in range(4))


def test_files_of_a_loader_are_shared_out():
    loader = torch.utils.data.DataLoader(StreamOfFiles([1, 2, 3]), batch_size=4)
    parts = [seen(host, distribute(loader, host, auto_shard="file")) for host in machines()]
    assert parts == [[[[10, 11], [12, 13]], [[30, 31], [32, 33]]], [[[20, 21, 22, 23]]]]
    assert loader.dataset.files == [1, 2, 3]


def test_files_are_shared_out():
    parts = [seen(host, distribute(Files([1, 2, 3]), host, auto_shard="file")) for host in machines()]
    assert parts == [[[[1], [1]], [[3], [3]]], [[[2, 2]]]]


def test_the_wrong_way_to_share_is_refused():
    host = machines()[0]
    with pytest.raises(StrategyError, match=r"auto_shard is one of 'data', 'file', 'off', got 'rows'"):
        distribute([torch.ones(2)], host, auto_shard="rows")
    with pytest.raises(StrategyError, match=r"a list of its files in `files`.*, got list without"):
        distribute([torch.ones(2)], host, auto_shard="file")
    with pytest.raises(StrategyError, match=r"each of 2 workers its files, and there are 1"):
        distribute(Files([1]), host, auto_shard="file")


def test_a_sampler_that_divides_data_itself_is_refused():
    dataset = TensorDataset(torch.arange(8))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.raises(StrategyError, match="a DistributedSampler that leaves 1 of 2 examples"):
        distribute(DataLoader(dataset, batch_size=4, sampler=sampler), machines()[0])


def told_of(data, **options):
    """What a machine tells others of its data when an epoch begins."""
    host = machines()[0]
    iter(distribute(data, host, **options))
    (told,) = host.told
    return told


def differing(one, other):
    return [key for key in one if one[key] != other[key]]


def test_machines_tell_how_many_examples_and_batches_they_have():
    one, other = (told_of(torch.arange(size), global_batch_size=4) for size in (10, 13))
    assert (one["examples"], one["batches"], one["examples in a batch"]) == (10, 3, 4)
    assert differing(one, other) == ["examples", "batches"]
    assert differing(told_of(torch.arange(10), global_batch_size=4), one) == []
    assert differing(told_of(batches(10, 4)), told_of(batches(13, 4))) == ["batches"]
    assert told_of(lambda: batches(10, 4))["batches"] is None


def test_machines_tell_an_order_of_their_own_and_it_stays_as_it_is():
    def shuffled(seed):
        return DataLoader(
            TensorDataset(torch.arange(9)), 4, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )

    one, other = told_of(shuffled(1)), told_of(shuffled(2))
    assert differing(one, other) == ["checksum of the order", "checksum of the first batch"]
    assert differing(one, told_of(shuffled(1))) == []
    got = [seen_by(0, batch)[0].tolist() for batch in distribute(shuffled(1), machines()[0])]
    expected = [batch[0].tolist() for batch in shuffled(1)]
    assert got == [batch[: len(part)] for batch, part in zip(expected, got, strict=True)]
    subsets = [torch.utils.data.SubsetRandomSampler([0, 1, last]) for last in (2, 3)]
    one, other = (told_of(DataLoader(TensorDataset(torch.arange(9)), 1, sampler=each)) for each in subsets)
    assert "checksum of the order" in differing(one, other)


def test_samplers_of_other_kinds_are_compared_by_their_first_batch():
    def own(*first):
        return DataLoader(TensorDataset(torch.arange(9)), batch_sampler=[list(first), [3]])

    assert differing(told_of(own(1, 2)), told_of(own(2, 1))) == ["checksum of the first batch"]
    assert told_of(own("a", "b"))["checksum of the first batch"] is None
    assert told_of(torch.arange(0), global_batch_size=4)["checksum of the first batch"] is None


def test_data_of_a_machines_own_is_not_compared():
    host = machines()[0]
    iter(distribute(torch.arange(10), host, global_batch_size=4, auto_shard="off"))
    assert host.told == []
