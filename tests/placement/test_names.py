"""Names of operations."""

import pytest
import torch

from stratagem.placement.names import NameCounter, type_of


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.matmul, "MatMul"),
        (torch.Tensor.__matmul__, "MatMul"),
        (torch.nn.functional.conv2d, "Conv2D"),
        (torch.nn.functional.log_softmax, "LogSoftmax"),
        (torch.tensor, "Const"),
        (torch.Tensor.add_, "AssignAdd"),
        (torch.Tensor.__iadd__, "AssignAdd"),
        ("__rsub__", "Sub"),
        ("add_n", "AddN"),
    ],
)
def test_type_is_tensorflows_word(function: object, expected: str) -> None:
    assert type_of(function) == expected  # type: ignore[arg-type]


def test_names_are_numbered_from_the_second_on() -> None:
    names = NameCounter()
    assert [names.unique(each) for each in ("a", "a", "b", "a_2", "a", "a")] == ["a", "a_1", "b", "a_2", "a_3", "a_4"]
