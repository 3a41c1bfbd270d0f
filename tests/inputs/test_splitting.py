from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import StrategyError, UnevenDataError
from stratagem.inputs.splitting import Evenness, emptied, offsets, sizes_of_slices, split
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


def test_split_gives_an_empty_batch_when_nothing_is_left():
    _, _, last = seen_by_all(split_over(3, (torch.ones(2, 4, dtype=torch.float64), ["a", "b"])), 3)
    assert last[0].shape == (0, 4)
    assert last[0].dtype == torch.float64
    assert last[1] == []


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


def test_emptied_leaves_what_has_another_number_of_rows():
    weights = torch.ones(7)
    assert emptied(weights, 3) is weights
    assert emptied(torch.ones(3, 2), 3).shape == (0, 2)
    assert emptied((torch.ones(1), torch.ones(2)), 2) == ()
    assert emptied("text", 4) == "text"
