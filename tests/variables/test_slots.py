"""The state of optimizers in shared memory: views of whole parameters over parts that are updated one by one."""

from typing import Any

import pytest
import torch

from stratagem.variables.optimizer_slices import ELEMENTWISE, bare_step, over
from stratagem.variables.slots import Layout, forms_of
from stratagem.variables.store import Placement, piece


def placement_of(tensor: torch.Tensor, name: int) -> Placement:
    return Placement(name, 0, tuple(tensor.shape), tensor.stride(), requires_grad=True, is_parameter=True)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parts_in_shared_memory_are_the_state_of_the_whole(name: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    whole = torch.nn.Parameter(torch.randn(3, 4).t())
    optimizer = ELEMENTWISE[name]([whole], lr=0.1, **options)
    group, ranges = optimizer.param_groups[0], [(0, 5), (5, 12)]
    layout = Layout()
    layout.add(0, placement_of(whole, 7), forms_of(optimizer, group, whole, is_flat=True), ranges)
    slots = layout.make()
    assert slots.views() == {}
    slots.write({7: optimizer.state[whole]})  # Adagrad has one from the beginning
    values = torch.empty_like(whole).copy_(whole.detach())
    parts = [piece(values, *each) for each in ranges]
    inner = over(optimizer, [{**group, "params": parts}])
    for part, place in zip(parts, slots.parts, strict=True):
        if slots.cell(place.flag):
            inner.state[part] = {cell.key: slots.cell(cell) for cell in place.cells}
    for _ in range(3):
        whole.grad = torch.empty_like(whole).copy_(torch.randn(4, 3))
        for part, each in zip(parts, ranges, strict=True):
            part.grad = piece(whole.grad, *each)
        optimizer.step()
        with torch.no_grad():
            bare_step(type(inner))(inner)
        for part, place in zip(parts, slots.parts, strict=True):
            for cell in place.cells:
                inner.state[part][cell.key] = slots.cell(cell).copy_(inner.state[part][cell.key])
            slots.cell(place.flag).fill_(1)
        torch.testing.assert_close(values, whole.detach(), rtol=0, atol=0)
        torch.testing.assert_close(slots.views()[7], optimizer.state[whole], rtol=0, atol=0)


def test_what_is_written_is_seen_in_views_and_what_has_no_state_is_left_out() -> None:
    first, second = torch.nn.Parameter(torch.zeros(2, 3).t()), torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([first, second])
    layout = Layout()
    for number, each in enumerate((first, second)):
        forms = forms_of(optimizer, optimizer.param_groups[0], each, is_flat=True)
        layout.add(number, placement_of(each, 10 + number), forms, [(0, 3), (3, each.numel())])
    slots = layout.make()
    state = {"step": torch.tensor(5.0), "exp_avg": torch.arange(6.0).view(3, 2), "exp_avg_sq": torch.ones(3, 2)}
    slots.write({10: state})
    views = slots.views()
    assert views.keys() == {10}
    torch.testing.assert_close(views[10], state)
    assert views[10]["exp_avg"].stride() == first.stride()
    views[10]["exp_avg"].fill_(7.0)
    last = slots.parts[1]
    shared = slots.cell(next(cell for cell in last.cells if cell.key == "exp_avg"))
    assert 7.0 not in shared.tolist()
    assert slots.is_written()  # it is this process' own until it is taken
    slots.write({10: views[10]})
    slots.drop_written()
    assert shared.tolist() == [7.0] * 3
    assert not slots.is_written()
    slots.write({})
    assert slots.views() == {}
