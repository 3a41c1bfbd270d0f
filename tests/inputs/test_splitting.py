from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import StrategyError, UnevenDataError
from stratagem.inputs.splitting import Evenness, join, offsets, sizes_of_slices, split
from tests.inputs.hosts import seen_by_all

Pair = namedtuple("Pair", "x y")


def split_over(num_replicas, batch, uneven="allow"):
    return split(batch, Evenness(uneven, num_replicas), "global batch 0", range(num_replicas))


@given(st.integers(0, 100), st.integers(1, 9))
def test_slices_have_the_sizes_of_tensor_split(num_examples, num_replicas):
    sizes = sizes_of_slices(num_examples, num_replicas)
    assert list(sizes) == [len(part) for part in torch.arange(num_examples).tensor_split(num_replicas)]
    assert sizes[0] == max(sizes)
    assert offsets(sizes)[-1][1] == num_examples


def test_split_keeps_the_structure_and_says_the_counts():
    batch = {"pair": Pair(torch.arange(5), np.arange(5.0)), "text": list("abcde"), "scale": 2.0, "name": "n"}
    distributed = split_over(2, batch)
    first, second = seen_by_all(distributed, 2)
    assert distributed["pair"].x.counts == (3, 2)
    assert isinstance(first["pair"], Pair)
    assert first["pair"].x.tolist() == [0, 1, 2]
    assert second["pair"].y.tolist() == [3.0, 4.0]
    assert second["text"] == ["d", "e"]
    assert (first["scale"], second["scale"], second["name"]) == (2.0, 2.0, "n")


def test_split_makes_a_tuple_of_a_list():
    x, y = split_over(2, [torch.arange(2), torch.arange(2)])
    assert isinstance(split_over(2, [torch.arange(2)]), tuple)
    assert x.counts == y.counts == (1, 1)


def test_split_keeps_a_single_tensor_a_single_value():
    batch = split_over(3, torch.arange(3))
    assert [each.item() for each in batch.values] == [0, 1, 2]


def test_split_gives_one_row_that_does_not_count_when_nothing_is_left():
    batch = split_over(3, (torch.arange(2.0).repeat(4, 1).T, ["a", "b"], 5))
    _, _, last = seen_by_all(batch, 3)
    assert last[0].tolist() == [[0.0] * 4]
    assert last[1:] == (["a"], 5)
    assert batch[0].counts == batch[1].counts == (1, 1, 0)


def test_split_names_the_sizes_when_they_differ():
    with pytest.raises(StrategyError, match=r"first dimensions 4, 3"):
        split_over(2, (torch.zeros(4), np.zeros(3)))


@pytest.mark.parametrize("batch", [torch.zeros(0, 3), []])
def test_split_refuses_a_batch_without_examples(batch):
    with pytest.raises(StrategyError, match="0 examples"):
        split_over(2, batch)


def test_split_refuses_a_batch_with_nothing_to_divide():
    with pytest.raises(StrategyError, match="nothing to divide"):
        split_over(2, {"a": 1, "b": "text"})


def test_split_refuses_what_it_cannot_cut():
    with pytest.raises(StrategyError, match="cannot cut a set"):
        split_over(2, (torch.zeros(2), {1, 2}))


def test_uneven_error_names_the_sizes():
    with pytest.raises(UnevenDataError, match="has 5 examples, which gives 2 replicas 3, 2"):
        split_over(2, torch.zeros(5), uneven="error")
    with pytest.raises(UnevenDataError, match="1, 1, 0"):
        split_over(3, torch.zeros(2), uneven="error")
    assert split_over(2, torch.zeros(4), uneven="error").counts == (2, 2)


def test_uneven_lists_the_known_words():
    with pytest.raises(StrategyError, match="'allow', 'error'"):
        Evenness("pad", 2)


def test_join_gives_the_batch_of_another_where_one_has_no_rows():
    batches = [(torch.zeros(0), []), (torch.ones(2), ["a", "b"])]
    joined = join(batches, 3, Evenness("allow", 3), "step 0")
    assert joined[0].counts == (0, 2, 0)
    assert [each[1] for each in seen_by_all(joined, 3)] == [["a", "b"]] * 3


def test_join_leaves_batches_of_which_none_has_rows():
    joined = join([torch.zeros(0, 2)], 2, Evenness("allow", 2), "step 0")
    assert joined.counts == (0, 0)
    assert [each.shape for each in seen_by_all(joined, 2)] == [(0, 2), (0, 2)]


def test_split_cuts_the_dimension_that_has_the_examples():
    batch = {"src": torch.arange(12).view(4, 3), "tgt": [np.arange(6).reshape(2, 3)], "label": torch.arange(3)}
    distributed = split(batch, Evenness("allow", 2), "b", range(2), {"src": 1, "tgt": 1})
    first, second = seen_by_all(distributed, 2)
    assert distributed["src"].counts == (2, 1)
    assert (first["src"].shape, second["src"].shape, second["tgt"][0].shape) == ((4, 2), (4, 1), (2, 1))
    assert second["label"].tolist() == [2]
    by_position = split((torch.zeros(4, 3), torch.zeros(3)), Evenness("allow", 4), "b", range(4), {0: 1})
    assert [each[0].shape for each in seen_by_all(by_position, 4)] == [(4, 1)] * 4
    assert [each.shape for each in seen_by_all(split(batch["src"], Evenness("allow", 2), "b", range(2), 1), 2)] == [
        (4, 2),
        (4, 1),
    ]


@pytest.mark.parametrize(
    ("batch", "batch_dim", "words"),
    [
        ((torch.zeros(4, 3), torch.zeros(3)), 1, "batch_dim is 1, and a part of b is a Tensor of 1 dim"),
        (torch.zeros(3), -1, "batch_dim is -1"),
        ({"x": torch.zeros(3)}, {"y": 1}, r"batch_dim names 'y', and b has \['x'\]"),
        (torch.zeros(3), {"x": 0}, "no parts with names"),
        ((torch.zeros(4, 3), torch.zeros(3)), 0, "name it with batch_dim="),
    ],
)
def test_split_names_what_is_wrong_with_the_dimension(batch, batch_dim, words):
    with pytest.raises(StrategyError, match=words):
        split(batch, Evenness("allow", 2), "b", range(2), batch_dim)


def test_split_cuts_sparse_and_nested_tensors():
    nested = torch.nested.nested_tensor([torch.ones(size) for size in (1, 2, 3)], layout=torch.jagged)
    first, second, none = seen_by_all(split_over(3, (torch.eye(3)[:2].to_sparse(),)), 3)
    assert [each[0].to_dense().tolist() for each in (first, second, none)] == [[[1, 0, 0]], [[0, 1, 0]], [[1, 0, 0]]]
    assert [[len(row) for row in each.unbind()] for each in seen_by_all(split_over(2, nested), 2)] == [[1, 2], [3]]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_split_refuses_sparse_tensors_that_cannot_be_cut():
    with pytest.raises(StrategyError, match="to_sparse_coo"):
        split_over(2, torch.eye(2).to_sparse_csr())
