"""One look at all distributed modules and tensors finds whatever has changed in them, and keeps none of them alive."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stratagem import _torch
from stratagem.objects.steady import Steady
from stratagem.processes.registry import Registry


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = 1.5
        self.activation = nn.functional.relu
        self.active, self.pending = nn.ModuleDict({"a": nn.Identity()}), nn.ModuleDict({"b": nn.Identity()})
        self.shared = self.first.weight
        self.sizes = (1, 2)


def registered(*models: nn.Module) -> tuple[Registry, Steady]:
    registry = Registry(keeps=False)
    objects = [each for model in models for each in (*model.modules(), *model.parameters(), *model.buffers())]
    for name, obj in enumerate(objects, start=1):
        registry.add(name, obj)
    steady = Steady(registry)
    steady.note()
    return registry, steady


def _swap(model: Net) -> None:
    model.first, model.second = model.second, model.first


def _rename(model: Net) -> None:
    members = vars(model)
    members["other"] = members.pop("sizes")
    assert list(members).index("other") == len(members) - 1


def _move(model: Net) -> None:
    model.active["b"] = model.pending.pop("b")


def _freeze(model: Net) -> None:
    bias = model.first.bias
    del model.first.bias
    model.first.register_buffer("bias", bias)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "a plain attribute": lambda model: setattr(model, "scale", 2.5),
    "a tuple": lambda model: setattr(model, "sizes", (2, 1)),
    "a new attribute": lambda model: setattr(model, "added", 1),
    "an attribute that is gone": lambda model: delattr(model, "scale"),
    "the name of the last attribute": _rename,
    "a function of a library": lambda model: setattr(model, "activation", nn.functional.gelu),
    "eval": lambda model: model.eval(),
    "one layer's mode": lambda model: model.norm.eval(),
    "a parameter": lambda model: setattr(model.first, "weight", nn.Parameter(torch.ones(2, 2))),
    "a buffer": lambda model: model.norm.register_buffer("running_mean", torch.ones(2)),
    "layers in another order": _swap,
    "a layer of another container": _move,
    "a parameter that became a buffer": _freeze,
    "a layer that is gone": lambda model: delattr(model, "second"),
    "a frozen parameter": lambda model: model.first.weight.requires_grad_(False),
    "a hook of a layer": lambda model: model.first.register_forward_hook(lambda *_: None),
    "a hook of a parameter": lambda model: model.first.weight.register_hook(lambda gradient: gradient),
    "a hook after a gradient": lambda model: model.first.weight.register_post_accumulate_grad_hook(lambda _: None),
    "a class": lambda model: setattr(model.first, "__class__", nn.Bilinear),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_look_finds_what_the_program_changed(change: Callable[[Net], Any]) -> None:
    model = Net()
    registry, steady = registered(model)
    assert len(steady.names) == 8 + 6 + 3  # modules, parameters, buffers
    assert steady.look()
    kept = change(model)
    assert not steady.look()
    assert steady.rest().keys() == registry.names
    del kept


def test_values_of_tensors_are_none_of_its_business() -> None:
    model = Net()
    _, steady = registered(model)
    with torch.no_grad():
        model.first.weight.fill_(3.0)
    model.norm(torch.randn(4, 2))
    assert steady.look()
    assert not steady.rest()


def test_modules_that_hold_what_can_change_by_itself_are_looked_at_one_by_one() -> None:
    model = Net()
    model.history = []
    model.first.register_forward_hook(lambda *_: None)
    registry, steady = registered(model)
    assert steady.look()
    assert set(map(id, steady.rest().values())) == {id(model), id(model.first)}
    assert registry.names >= steady.names


def test_a_part_that_nobody_knows_yet_is_found_in_every_look() -> None:
    model = Net()
    _, steady = registered(model)
    model.second.register_buffer("mask", torch.ones(2))  # as a step may do, after which this is noted
    assert not steady.look()
    steady.note()
    assert steady.look()
    assert list(map(id, steady.rest().values())) == [id(model.second)]


def test_a_hook_of_the_program_beside_one_of_the_library_is_found() -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_torch.gradient_hooks.LibraryHook(lambda _: None))
    _, steady = registered(model)
    assert steady.look()
    model.first.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert not steady.look()


def _nothing(*_: Any) -> None:
    """A hook."""


def test_a_model_that_a_hook_of_its_own_refers_to_is_not_kept_alive() -> None:
    model = Net()
    _, steady = registered(model)
    model.first.register_forward_hook(functools.partial(_nothing, model))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    steady.forget()


def test_objects_that_come_and_go_are_noticed() -> None:
    model, other = Net(), nn.Linear(3, 3)
    registry, steady = registered(model, other)
    registry.add(100, nn.Linear(1, 1))  # gone at once
    assert not steady.look()
    steady.note()
    assert steady.look()
    del other
    gc.collect()
    assert not steady.look()


def test_nothing_is_kept_alive() -> None:
    model = Net()
    _, steady = registered(model)
    references = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    assert steady.look()
    del model
    gc.collect()
    assert [each() for each in references] == [None] * len(references)
    assert not steady.look()


def test_a_module_that_changes_in_every_run_is_set_apart_for_a_while() -> None:
    model = Net()
    _, steady = registered(model)
    for number in range(3):
        model.norm.counter = number
        looked = steady.look()
        if not looked:
            steady.note()
    assert looked  # the others are as before
    assert list(map(id, steady.rest().values())) == [id(model.norm)]
    for number in range(70):
        model.first.bias.requires_grad_(number == 69)
        steady.look()
    steady.note()
    assert steady.look()
    assert not steady.rest()


def test_a_mode_that_is_set_now_and_then_sets_nothing_apart() -> None:
    model = Net()
    _, steady = registered(model)
    for training in (False, True, False):
        for _ in range(9):
            assert steady.look()
        model.train(training)
        assert not steady.look()
        steady.note()
    assert steady.look()
    assert not steady.rest()


def test_what_comes_after_a_look_is_among_the_rest() -> None:
    model = Net()
    registry, steady = registered(model)
    assert steady.look()
    assert not steady.rest()
    new = nn.Identity()
    registry.add(1000, new)
    assert steady.rest() == {1000: new}
    assert not steady.look()
    steady.note()
    assert steady.look()
    assert not steady.rest()
