import gc
import itertools
import logging
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler

from stratagem.errors import StrategyError, UnevenDataError
from stratagem.inputs import DistributedLoader, distribute, portions
from tests.inputs.hosts import FakeHost, counted, deferred_in, leaves_of, seen_by, seen_by_all


class Squares(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        self.loaded.append(index)
        return torch.tensor([index]), index * index


class Drawing(Squares):
    def __getitem__(self, index: int):
        return torch.rand(1), random.gauss(), np.random.rand()


class Failing(Squares):
    def __getitem__(self, index: int):
        if index == 5:
            raise KeyError("row 5 is bad")
        return torch.tensor([index])


def samples(data, num_replicas):
    """All samples of an epoch, as the replicas see them one after the other."""
    return [int(value) for batch in data for part in counted(batch) for value in part[0].flatten().tolist()]


def batches(data, num_replicas):
    """The global batches of an epoch, put together again."""
    return [torch.cat([part[0] for part in counted(batch)]).flatten().tolist() for batch in data]


@pytest.fixture
def released():
    before = set(portions._known)
    yield
    gc.collect()
    assert set(portions._known) <= before, "a source was kept"


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_every_sample_is_used_once_in_the_order_of_the_loader(size, batch_size, num_replicas, shuffle, drop_last, seed):
    loader = DataLoader(Squares(size), batch_size=batch_size, shuffle=shuffle and size > 0, drop_last=drop_last)
    data = distribute(loader, FakeHost(num_replicas))
    for _ in range(2):
        torch.manual_seed(seed)
        expected = [batch[0].flatten().tolist() for batch in loader]
        after = torch.rand(1)
        torch.manual_seed(seed)
        seen = batches(data, num_replicas)
        assert seen == expected
        assert torch.rand(1) == after
        if not drop_last:
            assert sorted(itertools.chain(*seen)) == list(range(size))
    assert len(data) == len(loader)


@pytest.mark.parametrize("kind", ["plain", "generator", "weighted", "batch_sampler", "own"])
def test_loader_order_is_kept_over_epochs_for_every_sampler(kind):
    def make():
        dataset = Squares(23)
        if kind == "plain":
            return DataLoader(dataset, batch_size=5, shuffle=True)
        if kind == "generator":
            return DataLoader(dataset, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3))
        if kind == "weighted":
            return DataLoader(dataset, batch_size=5, sampler=WeightedRandomSampler([1.0] * 23, 30))
        if kind == "batch_sampler":
            return DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 4, True))
        return DataLoader(dataset, batch_size=5, sampler=[torch.randint(23, ()).item() for _ in range(11)])

    torch.manual_seed(5)
    loader = make()
    expected = [[batch[0].flatten().tolist() for batch in loader] for _ in range(3)]
    torch.manual_seed(5)
    data = distribute(make(), FakeHost(3))
    assert [batches(data, 3) for _ in range(3)] == expected
    assert kind == "weighted" or expected[0] != expected[1] or kind == "own"


def test_sampler_of_the_programs_own_is_read_when_its_batch_is_due(released):
    read = []

    class Looking:
        def __iter__(self):
            for index in range(6):
                read.append(index)
                yield [index]

    data = iter(distribute(DataLoader(Squares(6), batch_sampler=Looking()), FakeHost(1)))
    next(data)
    assert read == [0]
    data.close()


def test_replicas_load_their_own_part(released):
    dataset = Squares(4)
    batch = next(iter(distribute(DataLoader(dataset, batch_size=4), FakeHost(2))))
    assert deferred_in(batch) == [False, True]
    assert dataset.loaded == [0, 1]
    x, y = seen_by(1, batch)
    assert dataset.loaded == [0, 1, 2, 3]
    assert x.flatten().tolist() == [2, 3]
    assert y.tolist() == [4, 9]


def test_batch_keeps_counts_and_works_as_a_pair(released):
    data = distribute(DataLoader(Squares(5), batch_size=3), FakeHost(2))
    counts = [(x.counts, y.counts) for x, y in data]
    assert counts == [((2, 1), (2, 1)), ((1, 1), (1, 1))]


def test_replica_without_examples_gets_one_that_does_not_count_and_it_is_logged_once(released, caplog):
    data = distribute(DataLoader(Squares(5), batch_size=4), FakeHost(3))
    with caplog.at_level(logging.INFO, logger="stratagem"):
        for _ in range(2):
            *_, last = data
    x, y = seen_by(2, last)
    assert (x.tolist(), y.tolist()) == (seen_by(0, last)[0].tolist(), seen_by(0, last)[1].tolist())
    assert leaves_of(last)[0].counts == (1, 0, 0)
    assert [record.message[:15] for record in caplog.records] == ["global batch 1 "]


def test_next_batch_is_loaded_ahead_in_a_thread(released):
    data = iter(distribute(DataLoader(Squares(6), batch_size=2), FakeHost(1)))
    before = threading.active_count()
    next(data)
    dataset = data._owner.source.dataset
    while threading.active_count() > before:
        pass
    assert dataset.loaded == [0, 1, 2, 3]
    assert next(data)[0].values[0].flatten().tolist() == [2, 3]
    data.close()


def test_no_thread_is_left_when_iteration_is_abandoned(released):
    host = FakeHost(2)
    data = distribute(DataLoader(Squares(60), batch_size=2), host)
    for batch in data:
        seen_by(1, batch)
        break
    del batch
    assert host.calls == ["register"], "a finalizer called the children"
    next(iter(data))
    assert host.calls == ["register", "release"]
    assert not [each for each in threading.enumerate() if each.name.startswith("stratagem")]


def test_source_is_dropped_with_a_later_call_when_nobody_has_it_any_more():
    host = FakeHost(2)
    kept = list(distribute(DataLoader(Squares(8), batch_size=4), host))
    gc.collect()
    assert [samples([batch], 2) for batch in kept] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    kept.clear()
    gc.collect()
    assert host.calls == ["register", "release"]
    list(distribute([torch.zeros(2)], host))
    assert host.calls == ["register", "release", "forget"]


def test_closed_data_says_so(released):
    data = distribute(DataLoader(Squares(4), batch_size=2), FakeHost(2))
    batch = next(iter(data))
    data.close()
    data.close()
    with pytest.raises(StrategyError, match="was closed"):
        iter(data)
    with pytest.raises(StrategyError, match="no longer here"):
        seen_by(1, batch)


def test_skipped_and_repeated_batches_are_right(released):
    seen = list(distribute(DataLoader(Squares(12), batch_size=2), FakeHost(2)))
    assert [seen_by(1, seen[number])[0].item() for number in (4, 4, 1, 5)] == [9, 9, 3, 11]
    data = iter(distribute(DataLoader(Squares(12), batch_size=2), FakeHost(2)))
    own = [next(data) for _ in range(4)]
    assert [seen_by(1, own[number])[0].item() for number in (0, 3, 1)] == [1, 7, 3]
    data.close()


def test_dataset_that_draws_random_numbers_is_loaded_without_a_thread(released):
    data = distribute(DataLoader(Drawing(6), batch_size=2), FakeHost(1))
    values = []
    for _ in range(2):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        values.append([tuple(part.tolist() for part in seen_by(0, batch)) for batch in data])
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    plain = [tuple(part.tolist() for part in batch) for batch in DataLoader(Drawing(6), batch_size=2)]
    assert values[0] == values[1] == plain


def test_error_of_a_dataset_comes_with_its_batch(released):
    data = iter(distribute(DataLoader(Failing(8), batch_size=4), FakeHost(1)))
    next(data)
    with pytest.raises(KeyError, match="row 5 is bad"):
        next(data)
    data.close()
    second = iter(distribute(DataLoader(Failing(8), batch_size=4), FakeHost(2)))
    next(second)
    batch = None
    with pytest.raises(KeyError, match="row 5 is bad"):
        batch = next(second)
    assert batch is None
    second.close()


def test_collate_function_is_used(released):
    data = distribute(
        DataLoader(
            Squares(4), batch_size=4, collate_fn=lambda rows: {"n": len(rows), "x": torch.stack([r[0] for r in rows])}
        ),
        FakeHost(2),
    )
    (batch,) = data
    assert [part["n"] for part in seen_by_all(batch, 2)] == [2, 2]


def test_lists_with_one_entry_per_example_stay_lists(released):
    def collate(rows):
        return tuple(zip(*rows, strict=True))

    first, last = distribute(DataLoader(Squares(7), batch_size=5, collate_fn=collate), FakeHost(3))
    assert [[row.item() for row in part[0]] for part in seen_by_all(first, 3)] == [[0, 1], [2, 3], [4]]
    assert [part[1] for part in seen_by_all(last, 3)] == [(25,), (36,), (25,)]
    assert last[0].counts == (1, 1, 0)
    whole = next(iter(distribute(DataLoader(Squares(5), batch_size=5, collate_fn=list), FakeHost(2))))
    assert [len(part) for part in seen_by_all((whole,), 2) for part in part] == [3, 2]


def test_collate_function_with_unlike_results_is_told_so(released):
    def collate(rows):
        return [torch.zeros(1)] * (3 if len(rows) == 3 else 2)

    (batch,) = distribute(DataLoader(Squares(5), batch_size=5, collate_fn=collate), FakeHost(2))
    with pytest.raises(StrategyError, match="gave replica 1 2 parts in global batch 0, and replica 0 3"):
        seen_by(1, batch)


def test_texts_of_a_dataset_are_divided(released):
    (batch,) = distribute(DataLoader([("a", 1), ("b", 2), ("c", 3)], batch_size=3), FakeHost(2))
    assert seen_by(0, batch)[0] == ("a", "b")
    assert seen_by(1, batch)[0] == ("c",)


def test_many_at_once_datasets_are_asked_for_many(released):
    class Many(Squares):
        def __getitems__(self, indices):
            self.loaded.append(tuple(indices))
            return [torch.tensor([index]) for index in indices]

    dataset = Many(5)
    data = distribute(DataLoader(dataset, batch_size=5), FakeHost(2))
    (batch,) = data
    assert [part.flatten().tolist() for part in seen_by_all(batch, 2)] == [[0, 1, 2], [3, 4]]
    assert dataset.loaded == [(0, 1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("size", "batch_size", "message"), [(10, 5, "3, 2"), (10, 4, "the last global batch has 2 "), (9, 3, "3 examples")]
)
def test_uneven_sizes_are_refused_before_the_first_batch(size, batch_size, message):
    with pytest.raises(UnevenDataError, match=message):
        distribute(
            DataLoader(Squares(size), batch_size=batch_size),
            FakeHost(2 if size == 10 and batch_size == 5 else 4),
            uneven="error",
        )


def test_even_sizes_are_fine_where_they_are_asked_for(released):
    data = distribute(DataLoader(Squares(10), batch_size=4, drop_last=True), FakeHost(2), uneven="error")
    assert samples(data, 2) == list(range(8))


def test_batch_sampler_with_an_empty_batch_is_refused(released):
    with pytest.raises(StrategyError, match="global batch 0 has 0 examples"):
        next(iter(distribute(DataLoader(Squares(4), batch_sampler=[[]]), FakeHost(2))))


def test_dataset_that_cannot_be_sent_is_explained():
    class Refusing(FakeHost):
        def call_in_children(self, function, *args):
            raise TypeError("cannot send a file")

    with pytest.raises(TypeError) as raised:
        iter(distribute(DataLoader(Squares(4)), Refusing(2)))
    assert "open file" in raised.value.__notes__[0]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_load_the_same_and_end_with_the_epoch(num_replicas, persistent, released):
    loader = DataLoader(Squares(11), batch_size=2, shuffle=True, num_workers=1, persistent_workers=persistent)
    torch.manual_seed(2)
    expected = [[batch[0].flatten().tolist() for batch in loader] for _ in range(2)]
    drawn = torch.rand(1)
    torch.manual_seed(2)
    data = distribute(loader, FakeHost(num_replicas))
    assert [batches(data, num_replicas) for _ in range(2)] == expected
    assert torch.rand(1) == drawn
    for _ in data:
        break
    data.close()
    loader._iterator = None  # which has the workers of the plain one


def test_workers_follow_when_batches_are_skipped(released):
    data = iter(distribute(DataLoader(Squares(30), batch_size=2, num_workers=1), FakeHost(2)))
    own = [next(data) for _ in range(9)]
    assert [seen_by(1, own[number])[0].item() for number in (0, 2, 8, 3)] == [1, 5, 17, 7]
    assert isinstance(data._owner, DistributedLoader)
    data.close()


def test_workers_serve_a_collate_function_of_the_programs_own(released):
    def collate(rows):
        return tuple(zip(*rows, strict=True))

    data = distribute(DataLoader(Squares(7), batch_size=3, num_workers=1, collate_fn=collate), FakeHost(2))
    assert [[row.item() for part in counted(batch) for row in part[0]] for batch in data] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]


def test_tensor_dataset_needs_no_thread(released):
    data = iter(distribute(DataLoader(TensorDataset(torch.arange(6)), batch_size=2), FakeHost(1)))
    next(data)
    assert not [each for each in threading.enumerate() if each.name.startswith("stratagem")]
    data.close()
