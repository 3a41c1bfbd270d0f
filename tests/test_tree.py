"""What counts as a nesting, and what a walk over one keeps."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as theirs

from stratagem import _tree


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass(frozen=True)
class Record:
    one: Any
    two: Any = 0

    def __post_init__(self) -> None:
        if self.two == "made":
            raise RuntimeError("a record is copied, not made again")


@dataclasses.dataclass
class Rows:
    """A dataset that is written as a dataclass is no record."""

    rows: list[int]

    def __getitem__(self, index: int) -> int:
        return self.rows[index]


class Encoding(collections.UserDict[str, Any]):
    """Has attributes of its own, as Hugging Face's."""

    def __init__(self, data: dict[str, Any], num_sequences: int) -> None:
        super().__init__(data)
        self.num_sequences = num_sequences


class OwnList(list[int]):
    """A subclass, which may have rules of its own: a leaf."""


def nesting() -> Any:
    return {
        "b": [1, (2.5, None), []],
        "a": Pair("text", {"inner": (3,)}),
        "c": collections.OrderedDict(y=4, x=collections.deque([5, [6]])),
        "d": torch.return_types.max((torch.tensor(7), torch.tensor(8))),
        "e": torch.Size([9, 10]),
        "f": OwnList([11]),
        "g": collections.defaultdict(list, {"z": [12]}),
    }


def test_leaves_are_those_of_torch_in_their_order() -> None:
    assert _tree.leaves(nesting()) == theirs.tree_leaves(nesting())
    assert _tree.leaves(nesting())[:5] == [1, 2.5, None, "text", 3]


@pytest.mark.parametrize("value", [None, 3, "text", OwnList([1]), torch.Tensor])
def test_what_is_no_container_is_its_own_leaf(value: Any) -> None:
    assert _tree.leaves(value) == [value]
    assert _tree.map(lambda each: (each,), value) == (value,)


@pytest.mark.parametrize("value", [(), [], {}, ((), [{}])])
def test_empty_nestings_have_no_leaves_and_stay(value: Any) -> None:
    assert _tree.leaves(value) == []
    assert _tree.map(pytest.fail, value) == value


def test_map_keeps_containers_and_their_order() -> None:
    value = nesting()
    del value["e"]  # torch.Size holds nothing but numbers
    mapped = _tree.map(str, value)
    assert mapped == theirs.tree_map(str, value)
    assert list(mapped) == list(value)
    assert type(mapped["a"]) is Pair
    assert type(mapped["c"]) is collections.OrderedDict
    assert type(mapped["d"]) is torch.return_types.max
    assert mapped["g"].default_factory is list


def test_map_makes_new_containers() -> None:
    value = [[1], {"a": 2}]
    mapped = _tree.map(lambda each: each, value)
    assert mapped == value
    assert mapped is not value
    assert mapped[0] is not value[0]


def test_containers_can_be_leaves() -> None:
    def is_pair(value: Any) -> bool:
        return isinstance(value, Pair)

    value = [1, Pair(2, [3]), collections.deque([Pair(4, 5), 6])]
    assert _tree.leaves(value, is_pair) == [1, Pair(2, [3]), Pair(4, 5), 6]
    assert _tree.map(type, value, is_pair) == [int, Pair, collections.deque([Pair, int])]
    found, form = _tree.flatten(value, is_pair)
    assert found == _tree.leaves(value, is_pair)
    assert _tree.unflatten(found, form) == value
    assert _tree.structure(value, is_pair) == form != _tree.structure(value)


@pytest.mark.parametrize("value", [[1, 2], Pair(1, 2)])
def test_what_a_function_raises_comes_through(value: Any) -> None:
    def end(_: Any) -> None:
        raise StopIteration("of a step")

    with pytest.raises(StopIteration, match="of a step"):
        _tree.map(end, value)


def test_map_only_leaves_other_kinds_as_they_are() -> None:
    word = "text"
    mapped = _tree.map_only((int, float), lambda each: -each, {"a": [1, word], "b": Pair(2.5, None)})
    assert mapped == {"a": [-1, "text"], "b": Pair(-2.5, None)}
    assert mapped["a"][1] is word


def test_parts_can_be_taken_by_the_form_of_another_nesting() -> None:
    form = _tree.structure({"a": 0, "b": 0})
    assert _tree.flatten_as(form, {"a": [1, 2], "b": 3}) == [[1, 2], 3]
    with pytest.raises(ValueError, match="key"):
        _tree.flatten_as(form, {"a": 1, "c": 2})


def test_namedtuples_are_told_from_tuples() -> None:
    assert _tree.is_namedtuple(Pair(1, 2))
    assert not _tree.is_namedtuple((1, 2))
    assert not _tree.is_namedtuple(torch.Size([1]))


def test_records_are_containers_that_keep_their_class_and_other_attributes() -> None:
    value = [Record(1, Encoding({"a": 2, "b": [3]}, 7)), Encoding({}, 8)]
    mapped = _tree.map(str, value)
    assert mapped == [Record("1", Encoding({"a": "2", "b": ["3"]}, 7)), Encoding({}, 8)]
    assert mapped[0].two.num_sequences == 7
    found, form = _tree.flatten(value)
    assert found == _tree.leaves(value) == [1, 2, 3]
    again = _tree.unflatten([4, 5, 6], form)
    assert again == [Record(4, Encoding({"a": 5, "b": [6]}, 7)), Encoding({}, 8)]
    assert _tree.structure(again) == form != _tree.structure([Record(1), Encoding({}, 8)])


def test_record_of_which_nothing_changes_is_itself() -> None:
    value = Record(1, Encoding({"a": 2}, 7))
    assert _tree.map(lambda each: each, value) is value


@pytest.mark.parametrize("value", [Rows([1]), torch.nn.Linear(1, 1), Record])
def test_what_behaves_like_data_or_a_function_is_no_record(value: Any) -> None:
    assert _tree.leaves(value) == [value]


def test_too_few_and_too_many_leaves_are_refused() -> None:
    form = _tree.structure([1, 2])
    for found in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="leaves than the structure"):
            _tree.unflatten(found, form)
