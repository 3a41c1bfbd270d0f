import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stratagem.errors import StrategyError, UnevenDataError
from stratagem.inputs import InputContext, distribute, distribute_from_function
from tests.inputs.hosts import FakeHost, seen_by, seen_by_all


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(7)


def rows(data, num_replicas=2):
    return [[part.tolist() for part in seen_by_all(batch, num_replicas)] for batch in data]


def test_list_of_batches_is_cut_in_every_epoch():
    data = distribute([torch.arange(3), torch.arange(4)], FakeHost(2))
    assert len(data) == 2
    for _ in range(2):
        assert rows(data) == [[[0, 1], [2]], [[0, 1], [2, 3]]]


def test_iterable_dataset_is_read_by_the_main_program():
    data = distribute(DataLoader(Stream(), batch_size=4), FakeHost(2))
    assert rows(data) == rows(data) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert rows(distribute(Stream(), FakeHost(2), global_batch_size=4)) == rows(data)


def test_loader_without_batch_sampler_gives_whole_batches():
    batches = TensorDataset(torch.arange(6).view(2, 3))
    assert rows(batch[0] for batch in distribute(DataLoader(batches, batch_size=None), FakeHost(2))) == [
        [[0, 1], [2]],
        [[3, 4], [5]],
    ]


def test_loader_with_its_own_iteration_is_iterated():
    class Doubling(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield 2 * batch

    assert rows(distribute(Doubling(torch.arange(3), batch_size=3), FakeHost(2))) == [[[0, 2], [4]]]


def test_generator_is_used_up_after_one_epoch():
    data = distribute((torch.arange(2) for _ in range(3)), FakeHost(2))
    next(iter(data))
    assert len(rows(data)) == 2
    with pytest.raises(StrategyError, match="generator given to distribute is used up; give a list"):
        iter(data)
    with pytest.raises(TypeError):
        len(data)


def test_function_makes_each_epoch():
    data = distribute(lambda: (torch.arange(2) for _ in range(3)), FakeHost(2))
    assert [len(rows(data)) for _ in range(2)] == [3, 3]
    with pytest.raises(StrategyError, match="returned int 3"):
        iter(distribute(lambda: 3, FakeHost(2)))


def test_arrays_are_divided_into_batches():
    data = distribute((torch.arange(5), np.arange(5.0)), FakeHost(2), global_batch_size=3)
    seen = [[(x.tolist(), y.tolist()) for x, y in seen_by_all(batch, 2)] for batch in data]
    assert seen == [[([0, 1], [0.0, 1.0]), ([2], [2.0])], [([3], [3.0]), ([4], [4.0])]]
    assert len(data) == 2
    assert isinstance(seen_by(1, next(iter(data)))[1], torch.Tensor)


def test_arrays_in_a_dict_keep_their_names_and_texts_stay_arrays():
    (batch,) = distribute({"x": np.array(["a", "b"]), "y": torch.zeros(2)}, FakeHost(2), global_batch_size=2)
    assert seen_by(1, batch)["x"].tolist() == ["b"]


def test_single_tensor_is_divided():
    assert rows(distribute(torch.arange(3), FakeHost(2), global_batch_size=2)) == [[[0], [1]], [[2], []]]


def test_shuffle_gives_the_order_of_a_shuffling_loader():
    x = torch.arange(50)
    torch.manual_seed(4)
    loader = DataLoader(x, batch_size=8, shuffle=True)
    expected = [[batch.tolist() for batch in loader] for _ in range(2)]
    torch.manual_seed(4)
    data = distribute(x, FakeHost(3), global_batch_size=8, shuffle=True)
    assert [[[*itertools.chain(*parts)] for parts in rows(data, 3)] for _ in range(2)] == expected
    assert expected[0] != expected[1]


def test_dataset_is_divided():
    assert rows(batch[0] for batch in distribute(TensorDataset(torch.arange(3)), FakeHost(2), global_batch_size=3)) == [
        [[0, 1], [2]]
    ]
    assert rows(distribute([1, 2, 3], FakeHost(2), global_batch_size=3)) == [[[1, 2], [3]]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_no_data_gives_no_batches(shuffle):
    assert list(distribute(torch.zeros(0, 3), FakeHost(2), global_batch_size=2, shuffle=shuffle)) == []
    assert list(distribute([], FakeHost(2))) == []
    assert list(distribute(DataLoader([], batch_size=2), FakeHost(2))) == []


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_global_batch_size_must_be_a_positive_int(size):
    with pytest.raises(StrategyError, match="positive int"):
        distribute(torch.zeros(4), FakeHost(2), global_batch_size=size)


@pytest.mark.parametrize(
    "data", [torch.zeros(4), (torch.zeros(4), torch.zeros(4)), {"x": np.zeros(4)}, TensorDataset(torch.zeros(4))]
)
def test_arrays_and_datasets_need_a_batch_size(data):
    with pytest.raises(StrategyError, match="needs global_batch_size="):
        distribute(data, FakeHost(2))


@pytest.mark.parametrize("data", [3, None, "text", torch.nn.Linear])
def test_what_cannot_be_iterated_is_refused(data):
    with pytest.raises(StrategyError, match="it takes a DataLoader"):
        distribute(data, FakeHost(2))


@pytest.mark.parametrize("data", [DataLoader([1, 2]), iter([torch.zeros(2)]), lambda: []])
def test_batch_size_is_refused_where_batches_are_made_already(data):
    with pytest.raises(StrategyError, match="makes its own batches"):
        distribute(data, FakeHost(2), global_batch_size=2)


def test_shuffle_is_refused_where_it_means_nothing():
    with pytest.raises(StrategyError, match="shuffle=True goes with global_batch_size="):
        distribute([torch.zeros(2)], FakeHost(2), shuffle=True)
    with pytest.raises(StrategyError, match="shuffle inside it"):
        distribute(Stream(), FakeHost(2), shuffle=True, global_batch_size=2)


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(StrategyError, match="first dimensions 4, 3"):
        distribute((torch.zeros(4), torch.zeros(3)), FakeHost(2), global_batch_size=2)
    with pytest.raises(StrategyError, match="at least one dimension"):
        distribute({"x": 3}, FakeHost(2), global_batch_size=2)


def test_uneven_batch_of_a_stream_is_refused_when_it_comes():
    data = iter(distribute([torch.zeros(4), torch.zeros(3)], FakeHost(2), uneven="error"))
    next(data)
    with pytest.raises(UnevenDataError, match="global batch 1 has 3 examples"):
        next(data)


# From a function


def test_function_gets_a_context_and_gives_each_replica_a_batch():
    contexts = []

    def make(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(4)
        return [[torch.full((size, 1), number), torch.zeros(size)] for number in range(5)]

    data = distribute_from_function(make, FakeHost(2))
    seen = [[part[0].flatten().tolist() for part in seen_by_all(batch, 2)] for batch in data]
    assert contexts == [InputContext(1, 0, 2)]
    assert seen == [[[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4], []]]
    *_, last = data
    assert isinstance(last, tuple)
    assert last[0].counts == (2, 0)
    assert seen_by(1, last)[0].shape == (0, 1)
    assert len(data) == 3
    assert len(contexts) == 1


def test_function_that_makes_a_generator_is_called_for_each_epoch():
    data = distribute_from_function(lambda _: (torch.zeros(1) for _ in range(4)), FakeHost(2))
    assert [len(list(data)) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(TypeError, match="no length"):
        len(data)


def test_function_with_unlike_batches_is_refused():
    with pytest.raises(StrategyError, match="differ in structure"):
        list(distribute_from_function(lambda _: [torch.zeros(1), (torch.zeros(1),)], FakeHost(2)))


def test_function_must_return_an_iterable():
    with pytest.raises(StrategyError, match="returned int 3"):
        distribute_from_function(lambda _: 3, FakeHost(2))
    with pytest.raises(StrategyError, match="takes a function"):
        distribute_from_function(3, FakeHost(2))


def test_context_refuses_a_batch_that_does_not_divide():
    with pytest.raises(StrategyError, match="multiple of 3"):
        InputContext(1, 0, 3).get_per_replica_batch_size(4)
