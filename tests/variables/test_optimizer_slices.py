"""An optimizer over slices does what the whole optimizer does."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stratagem.variables.optimizer_slices import ELEMENTWISE, bare_step, is_elementwise, over, step_with_hooks
from stratagem.variables.store import piece


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_slices_are_updated_as_the_whole_is(name: str) -> None:
    torch.manual_seed(0)
    whole, cut = (torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).t()) for _ in range(2))
    optimizer = ELEMENTWISE[name]([whole], lr=0.1)
    slices = [piece(cut.detach(), 0, 5), piece(cut.detach(), 5, 12)]
    inner = over(ELEMENTWISE[name]([cut], lr=0.1), [{**optimizer.param_groups[0], "params": slices}])
    for _ in range(3):
        whole.grad = torch.empty_like(whole).copy_(torch.randn(4, 3))
        slices[0].grad, slices[1].grad = piece(whole.grad, 0, 5), piece(whole.grad, 5, 12)
        optimizer.step()
        with torch.no_grad():
            bare_step(type(inner))(inner)
        torch.testing.assert_close(cut, whole, rtol=0, atol=0)


def test_a_class_of_the_users_own_is_not_taken_for_torchs() -> None:
    kind = type("Adam", (torch.optim.Adam,), {})
    assert is_elementwise(torch.optim.Adam([torch.zeros(1)]))
    assert not is_elementwise(kind([torch.zeros(1)]))


def twice(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(*args: Any) -> None:
        step(*args)
        step(*args)

    return wrapped


class Descending(torch.optim.SGD):
    @twice
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.sub_(each.grad)


def test_the_bare_step_has_what_a_user_put_around_it_but_no_hooks() -> None:
    optimizer = Descending([torch.full((1,), 8.0)])
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones(1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the hook was called"))
    bare_step(Descending)(optimizer)
    assert parameter.item() == 6.0


def test_hooks_and_closure_come_as_in_torch() -> None:
    calls: list[Any] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    def note(name: str) -> Callable[..., None]:
        return lambda *given: calls.append((name, given, torch.is_grad_enabled()))

    def closure() -> float:
        note("closure")()
        return 3.0

    hooks = [
        register_optimizer_step_pre_hook(note("before all")),
        register_optimizer_step_post_hook(note("after all")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
    ]
    try:
        for given in ((), (closure,)):
            loss: Any = optimizer.step(*given)
            expected = calls.copy()
            calls.clear()
            assert step_with_hooks(optimizer, lambda: None, *given) == loss
            assert calls == expected
            calls.clear()
    finally:
        for hook in hooks:
            hook.remove()
