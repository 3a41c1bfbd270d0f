"""Tensors that lie next to each other in shared memory and are each other's business in no way."""

import io

import pytest
import torch

from stratagem.errors import StrategyError
from stratagem.variables.store import Store


def placed(*tensors: torch.Tensor) -> Store:
    return Store.take_in(list(enumerate(tensors)), tensors[0].dtype, {id(tensors[0]): "first"})


def test_save_of_one_tensor_writes_that_tensor() -> None:
    large, small = torch.zeros(100_000), torch.ones(10)
    store = placed(large, small)
    file = io.BytesIO()
    torch.save(small, file)
    assert len(file.getvalue()) < 10_000
    assert store.tensors[1] is small


def test_changes_of_neighbours_are_counted_apart() -> None:
    one, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    store = placed(one, other)
    product = (one * one).sum()
    with torch.no_grad():
        other.add_(1.0)
    product.backward()
    assert one.grad is not None
    assert store.private.sum() == 9.0


def test_what_shares_memory_with_a_backup_still_does_when_the_backup_is_moved() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    store = placed(weight)
    backup, row = weight.data, weight.data[1]
    weight.data = torch.full((2, 3), 9.0)
    store.bring_back()
    row.add_(1.0)
    assert backup.tolist() == [[0.0, 1.0, 2.0], [4.0, 5.0, 6.0]]
    assert store.private[:6].tolist() == [9.0] * 6
    assert weight.tolist() == [[9.0] * 3] * 2


def test_layout_of_memory_and_empty_tensors_survive_the_way_home() -> None:
    weight, empty = torch.nn.Parameter(torch.randn(4, 3).t()), torch.nn.Parameter(torch.empty(0, 2))
    store = placed(weight, empty)
    new = torch.randn(3, 4)
    weight.data, empty.data = new, torch.empty(0, 2)
    store.bring_back()
    assert weight.stride() == (1, 3)
    assert torch.equal(weight.detach(), new)


def test_other_shape_is_refused_by_name() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    store = placed(weight)
    weight.data = torch.ones(4)
    with pytest.raises(StrategyError, match=r"'first' was distributed as torch.float32 \(3,\)"):
        store.bring_back()
