import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stratagem.errors import StrategyError, UnevenDataError
from stratagem.inputs import InputContext, distribute, distribute_from_function
from tests.inputs.hosts import FakeHost, counted, seen_by, seen_by_all


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(7)


def rows(data):
    return [[part.tolist() for part in counted(batch)] for batch in data]


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
    assert rows(distribute(torch.arange(3), FakeHost(2), global_batch_size=2)) == [[[0], [1]], [[2]]]


def test_shuffle_gives_the_order_of_a_shuffling_loader():
    x = torch.arange(50)
    torch.manual_seed(4)
    loader = DataLoader(x, batch_size=8, shuffle=True)
    expected = [[batch.tolist() for batch in loader] for _ in range(2)]
    torch.manual_seed(4)
    data = distribute(x, FakeHost(3), global_batch_size=8, shuffle=True)
    assert [[[*itertools.chain(*parts)] for parts in rows(data)] for _ in range(2)] == expected
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
    assert seen == [[[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4], [4, 4]]]
    *_, last = data
    assert isinstance(last, tuple)
    assert last[0].counts == (2, 0)
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


class Column:
    """What pandas and polars have in common."""

    def __init__(self, values):
        self._values = values

    def __len__(self):
        return len(self._values)

    def to_numpy(self):
        return np.array(self._values)


class Table:
    def __init__(self, **columns):
        self.columns = list(columns)
        self._columns = {name: Column(values) for name, values in columns.items()}

    def __len__(self):
        return len(self._columns[self.columns[0]])

    def __getitem__(self, name):
        return self._columns[name]

    def __iter__(self):
        return iter(self.columns)

    def to_numpy(self):
        return np.array([each.to_numpy() for each in self._columns.values()]).T


def own_tables():
    return Table(x=[1.0, 2.0, 3.0], name=["a", "b", "c"]), Column([0, 1, 0])


def pandas_tables():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"x": [1.0, 2.0, 3.0], "name": ["a", "b", "c"]}), pandas.Series([0, 1, 0])


def polars_tables():
    polars = pytest.importorskip("polars")
    return polars.DataFrame({"x": [1.0, 2.0, 3.0], "name": ["a", "b", "c"]}), polars.Series([0, 1, 0])


@pytest.fixture(scope="module", params=[own_tables, pandas_tables, polars_tables])
def tables(request):
    """Made before a test is guarded: such libraries leave settings and threads behind when they are loaded."""
    return request.param()


def test_tables_are_divided_by_rows(tables):
    table, labels = tables
    (batch,) = distribute((table, labels), FakeHost(2), global_batch_size=3)
    features, labels_of = seen_by(1, batch)
    assert (features["x"].tolist(), features["name"].tolist(), labels_of.tolist()) == ([3.0], ["c"], [0])
    for data in (table, (table, labels), labels):
        with pytest.raises(StrategyError, match=r"table .* global_batch_size="):
            distribute(data, FakeHost(2))


class Examples:
    """The documented face of a dataset of Hugging Face."""

    column_names = ("x", "tokens")
    features = ("float", "list")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": float(index), "tokens": torch.tensor([index, index])}

    def __iter__(self):
        return (self[index] for index in range(3))


def test_hugging_face_dataset_needs_a_batch_size():
    with pytest.raises(StrategyError, match="single examples, so it needs global_batch_size="):
        distribute(Examples(), FakeHost(2))
    (batch,) = distribute(Examples(), FakeHost(2), global_batch_size=3)
    assert seen_by(0, batch)["tokens"].tolist() == [[0, 0], [1, 1]]


@pytest.fixture(scope="module")
def real_examples():
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # it watches bars with a thread, which stays
    return pytest.importorskip("datasets").Dataset.from_dict({"x": [0.0, 1.0, 2.0]})


def test_real_hugging_face_dataset_needs_a_batch_size(real_examples):
    data = real_examples
    with pytest.raises(StrategyError, match="global_batch_size="):
        distribute(data, FakeHost(2))
    (batch,) = distribute(data.with_format("torch"), FakeHost(2), global_batch_size=3)
    assert seen_by(1, batch)["x"].tolist() == [2.0]


def test_arrays_may_have_their_rows_along_another_dimension():
    arrays = {"src": torch.arange(8).view(2, 4), "label": np.arange(4)}
    data = distribute(arrays, FakeHost(2), global_batch_size=3, batch_dim={"src": 1})
    seen = [[part["src"].tolist() for part in counted(batch)] for batch in data]
    assert seen == [[[[0, 1], [4, 5]], [[2], [6]]], [[[3], [7]]]]
    (shuffled,) = distribute(arrays, FakeHost(1), global_batch_size=4, shuffle=True, batch_dim={"src": 1})
    whole = seen_by(0, shuffled)
    assert whole["src"][0].tolist() == whole["label"].tolist()


@dataclasses.dataclass
class Pairs:
    x: torch.Tensor
    y: torch.Tensor


def test_dataclasses_of_arrays_and_of_batches_are_divided():
    (batch,) = distribute(Pairs(torch.arange(3), torch.arange(3)), FakeHost(2), global_batch_size=3)
    assert seen_by(1, batch) == Pairs(torch.tensor([2]), torch.tensor([2]))
    (batch,) = distribute([Pairs(torch.arange(3), torch.arange(3))], FakeHost(2))
    assert batch.x.counts == (2, 1)
    assert [part.y.tolist() for part in seen_by_all(batch, 2)] == [[0, 1], [2]]
    with pytest.raises(StrategyError, match=r"a Pairs of tensors or arrays .* needs global_batch_size="):
        distribute(Pairs(torch.arange(3), torch.arange(3)), FakeHost(2))


class TfDataset:
    """A tf.data dataset, as far as its documentation goes."""

    element_spec = None

    def __init__(self, elements, *, length=True):
        self._elements, self._length = elements, length

    def as_numpy_iterator(self):
        for element in self._elements:
            read_only = tuple(np.asarray(each) for each in element)
            for each in read_only:
                each.setflags(write=False)
            yield read_only

    def batch(self, size):
        groups = [self._elements[start : start + size] for start in range(0, len(self._elements), size)]
        return TfDataset([tuple(map(np.stack, zip(*group, strict=True))) for group in groups])

    def __len__(self):
        if not self._length:
            raise TypeError("The dataset is infinite.")
        return len(self._elements)


def check_tf_dataset(examples):
    for data in (
        distribute(examples.batch(4), FakeHost(2)),
        distribute(examples, FakeHost(2), global_batch_size=4),
        distribute(examples.batch(4), FakeHost(2), prefetch=True),
    ):
        assert len(data) == 2
        for _ in range(2):
            batches = list(data)
            assert [[part[0].tolist() for part in seen_by_all(batch, 2)] for batch in batches] == [
                [[0, 1], [2, 3]],
                [[4, 5], [6]],
            ]
            assert isinstance(seen_by(0, batches[0])[0], torch.Tensor)
            assert isinstance(seen_by(0, batches[0])[1], np.ndarray)
        data.close()
    numbers = distribute(examples.batch(4).as_numpy_iterator(), FakeHost(2))
    assert [part[0].tolist() for part in seen_by_all(next(iter(numbers)), 2)] == [[0, 1], [2, 3]]
    made = distribute_from_function(lambda _: examples.batch(2), FakeHost(2))
    assert [part[0].tolist() for part in seen_by_all(next(iter(made)), 2)] == [[0, 1], [2, 3]]
    with pytest.raises(StrategyError, match=r"shuffles itself: .* dataset.shuffle\(1000\)"):
        distribute(examples, FakeHost(2), global_batch_size=4, shuffle=True)


def test_tf_datasets_are_read_without_tensorflow():
    check_tf_dataset(TfDataset([(number, str(number).encode()) for number in range(7)]))
    with pytest.raises(TypeError, match="infinite"):
        len(distribute(TfDataset([], length=False), FakeHost(2)))


def test_real_tf_datasets_are_read():
    tensorflow = pytest.importorskip("tensorflow")
    texts = [str(number) for number in range(7)]
    check_tf_dataset(tensorflow.data.Dataset.from_tensor_slices((list(range(7)), texts)))


def test_batches_are_read_ahead_while_one_is_in_use():
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield torch.full((2,), number)

    for data in (distribute(batches(), FakeHost(2), prefetch=True), distribute(batches, FakeHost(2), prefetch=True)):
        read.clear()
        epoch = iter(data)
        next(epoch)
        data.close()
        assert read == [0, 1]
        assert [part.tolist() for part in seen_by_all(next(epoch), 2)] == [[1], [1]]
        assert len(list(epoch)) == 1
        data.close()


def test_a_generator_that_is_left_goes_on_with_what_was_read_ahead():
    data = distribute((torch.full((2,), number) for number in range(3)), FakeHost(2), prefetch=True)
    next(iter(data))
    assert [batch[0].tolist() for batch in data] == [[1], [2]]
    with pytest.raises(StrategyError, match="the generator given to distribute is used up"):
        iter(data)


def test_what_draws_random_numbers_is_not_read_ahead():
    read = []

    def drawing():
        for number in range(3):
            read.append(number)
            yield torch.randn(2)

    data = iter(distribute(drawing(), FakeHost(2), prefetch=True))
    next(data)
    next(data)
    assert read == [0, 1]


def test_errors_of_what_is_read_ahead_come_in_their_place():
    def failing():
        yield torch.zeros(2)
        raise ValueError("the file ends here")

    data = iter(distribute(failing, FakeHost(2), prefetch=True))
    next(data)
    with pytest.raises(ValueError, match="the file ends here"):
        next(data)
    with pytest.raises(StrategyError, match="prefetch is True or False, got 2"):
        distribute([torch.zeros(2)], FakeHost(2), prefetch=2)


def test_functions_may_give_single_examples():
    examples = [
        (torch.zeros(3), torch.tensor(1)),
        (torch.zeros(5), torch.tensor(2)),
        (torch.zeros(2), torch.tensor(0)),
    ]
    first, second = distribute_from_function(lambda _: examples, FakeHost(2))
    assert first[0].counts == (1, 1)
    assert second[0].counts == (1, 0)
    assert [part[0].shape for part in seen_by_all(first, 2)] == [(3,), (5,)]
    for example in (1.5, torch.tensor(2.0), (torch.zeros(3), torch.zeros(2))):
        (batch,) = distribute_from_function(lambda _, example=example: [example] * 2, FakeHost(2))
        assert (batch[0] if isinstance(batch, tuple) else batch).counts == (1, 1)


@pytest.mark.parametrize("kind", ["stream", "loader"])
def test_iterators_have_the_words_of_tensorflow(kind):
    batches = [torch.arange(2), torch.arange(2)]
    data = distribute(batches if kind == "stream" else DataLoader(torch.arange(4), batch_size=2), FakeHost(2))
    iterator = iter(data)
    assert seen_by(1, iterator.get_next()) == 1
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert len(seen_by_all(optional.get_value(), 2)) == 2
    optional = iterator.get_next_as_optional()
    assert not optional.has_value()
    with pytest.raises(StrategyError, match=r"ask has_value\(\) before"):
        optional.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()
