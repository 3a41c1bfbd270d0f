"""The losses of TensorFlow's custom loops; values follow the definitions in its documentation (2.16)."""

from typing import Any

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.errors import StrategyError

LOSSES = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("losses", "weight", "expected"),
    [
        (LOSSES, None, 1.25),
        (np.array(LOSSES), None, 1.25),
        ([torch.tensor(1.0), torch.tensor(9.0)], None, 1.25),
        (torch.tensor(LOSSES), [1.0, 0.0, 2.0, 0.5], 1.125),
        (torch.tensor(LOSSES), np.array([[1.0], [0.0], [2.0], [0.5]]), 1.125),
        (torch.tensor(LOSSES).view(4, 1), [1.0, 0.0, 2.0, 0.5], 1.125),
        (torch.tensor(LOSSES).view(4, 1), torch.tensor([[1.0], [0.0], [2.0], [0.5]]), 1.125),
        (torch.tensor(LOSSES).view(2, 2), [1.0, 0.0], 0.375),
        (torch.tensor(LOSSES).view(2, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.625),
        (torch.tensor(LOSSES).view(2, 2, 1), [1.0, 0.0], 0.375),
        (torch.tensor(LOSSES), 2.0, 2.5),
        (torch.tensor(LOSSES), np.float64(2), 2.5),
        (torch.ones(0), None, 0.0),
    ],
)
@pytest.mark.parametrize("size", [8, np.int64(8), torch.tensor(8)], ids=["int", "numpy", "tensor"])
def test_values_are_those_of_tensorflow(losses: Any, weight: Any, expected: float, size: Any) -> None:
    found = sg.compute_average_loss(losses, sample_weight=weight, global_batch_size=size)
    assert found.dim() == 0
    assert float(found) == expected
    if isinstance(losses, torch.Tensor):
        assert found.dtype == losses.dtype


@pytest.mark.parametrize("weight", [[1.0, 2.0], torch.ones(1, 4), torch.ones(4, 2), torch.ones(4, 1, 1), "one"])
def test_weights_that_do_not_fit_are_refused(weight: Any) -> None:
    with pytest.raises(StrategyError, match="sample_weight has one weight for each example"):
        sg.compute_average_loss(torch.tensor(LOSSES), sample_weight=weight)


def test_the_global_batch_is_all_rows_by_default() -> None:
    assert sg.compute_average_loss(LOSSES) == 2.5
    assert sg.scale_regularization_loss([torch.tensor(1.0), torch.tensor(2.0)]) == 3.0
    assert sg.scale_regularization_loss([]) == 0.0
    with pytest.raises(StrategyError, match="regularization_loss is a tensor or a list"):
        sg.scale_regularization_loss("l2")


def test_a_guess_in_the_main_program_is_refused() -> None:
    with sg.OneDeviceStrategy().scope():
        assert sg.compute_average_loss(LOSSES, global_batch_size=8) == 1.25
        for call in (sg.compute_average_loss, sg.scale_regularization_loss):
            with pytest.raises(StrategyError, match="was called in the main program, inside a scope"):
                call(LOSSES)
