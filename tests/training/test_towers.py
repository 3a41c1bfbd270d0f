"""The mean gradient of towers is that of the whole batch."""

from typing import Any

import pytest
import torch
from torch import nn

from stratagem.errors import StrategyError
from stratagem.training.towers import average_gradients


def test_mean_gradient_of_towers_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    parameters = list(model.parameters())

    def gradients(part: torch.Tensor) -> Any:
        return zip(torch.autograd.grad(model(part).square().mean(), parameters), parameters, strict=True)

    found = average_gradients([gradients(part) for part in x.chunk(4)])
    assert [variable for _, variable in found] == parameters
    for (ours, _), (theirs, _) in zip(found, gradients(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_sparse_gradients_and_variables_without_gradient() -> None:
    weight, unused = torch.zeros(3), torch.zeros(1)
    sparse = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    gradients = average_gradients([[(sparse, weight), (None, unused)], [(sparse, weight), (None, unused)]])
    assert gradients[0][0] is not None
    assert gradients[0][0].to_dense().tolist() == [0.0, 2.0, 0.0]
    assert gradients[1][0] is None
    assert gradients[1][1] is unused


A, B = torch.zeros(2), torch.zeros(3)
WRONG_TOWERS: dict[str, tuple[Any, str]] = {
    "none": ([], "one tower or more"),
    "lengths": ([[(A, A)], [(A, A), (B, B)]], "tower 0 has 1 and tower 1 has 2"),
    "variables": ([[(A, A)], [(A, B)]], r"variable 0 of shape \(2,\) of tower 0 is another one in tower 1.*\(3,\)"),
    "some gradients": ([[(A, A)], [(None, A)], [(A, A)]], r"variable 0 of shape \(2,\) has .* tower\(s\) 0, 2 of 3"),
    "some other gradients": ([[(None, A)], [(A, A)]], r"tower\(s\) 1 of 2"),
    "shapes": ([[(A, A)], [(B, A)]], r"has shape \(3,\) in tower 1"),
    "no pairs": ([[A]], "tower 0 has a Tensor"),
}


@pytest.mark.parametrize("name", WRONG_TOWERS)
def test_towers_that_do_not_fit(name: str) -> None:
    towers, message = WRONG_TOWERS[name]
    with pytest.raises(StrategyError, match=message):
        average_gradients(towers)
