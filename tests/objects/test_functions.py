"""A function is sent again whenever something that it captures has changed, and only then where that can be told."""

import collections
import dataclasses
import enum
import functools
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from stratagem.objects.functions import FunctionCache
from stratagem.processes.packing import find_unsendable, pack


def is_sent_again(function: Callable[..., Any], change: Callable[[], object]) -> bool:
    cache = FunctionCache(lambda _: False)
    cache.prepare(function)
    change()
    return cache.prepare(function)[1] is function


class Slotted:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 1


class SlottedBelow(Slotted):
    pass


class Text(str):
    pass


class Queue(collections.deque):  # type: ignore[type-arg]
    pass


class Options:
    rate = 1

    def scaled(self) -> int:
        return 2 * self.rate

    @property
    def half(self) -> float:
        return self.rate / 2


@dataclasses.dataclass
class Data:
    values: list[int]


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: list[int]


class Color(enum.Enum):
    RED = 1


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@torch.inference_mode()
def add_one(value: torch.Tensor) -> None:
    value.add_(1)


def aliases(first: list[int], second: list[int]) -> list[list[int]]:
    return [first, second, second, first]


MUTABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1], lambda value: value.append(2)),
    "nested list": (lambda: [[1]], lambda value: value[0].append(2)),
    "aliases": (lambda: aliases([1], [2]), lambda value: value.__setitem__(1, value[0])),
    "tuple of lists": (lambda: ([1],), lambda value: value[0].append(2)),
    "dict": (lambda: {"a": 1}, lambda value: value.update(a=2)),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "ordered dict": (lambda: collections.OrderedDict(a=1), lambda value: value.update(a=2)),
    "ordered dict order": (lambda: collections.OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "counter": (lambda: collections.Counter("a"), lambda value: value.update("a")),
    "default dict": (lambda: collections.defaultdict(list, a=[1]), lambda value: value["a"].append(2)),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "deque": (lambda: collections.deque([1]), lambda value: value.append(2)),
    "deque of a subclass": (lambda: Queue([1]), lambda value: value.append(2)),
    "bytearray": (lambda: bytearray(b"a"), lambda value: value.extend(b"b")),
    "object": (Options, lambda value: setattr(value, "rate", 2)),
    "slots": (Slotted, lambda value: setattr(value, "x", 2)),
    "slots of a base": (SlottedBelow, lambda value: setattr(value, "x", 2)),
    "attribute of a str": (lambda: Text("x"), lambda value: setattr(value, "tag", 2)),
    "dataclass": (lambda: Data([1]), lambda value: value.values.append(2)),
    "frozen dataclass": (lambda: Frozen([1]), lambda value: value.values.append(2)),
    "namespace": (lambda: types.SimpleNamespace(x=1), lambda value: setattr(value, "x", 2)),
    "state in C": (lambda: random.Random(1), lambda value: value.random()),  # noqa: S311
    "torch generator": (torch.Generator, lambda value: value.manual_seed(3)),
    "numpy generator": (lambda: np.random.default_rng(1), lambda value: value.random()),
    "iterator": (lambda: iter([1, 2]), next),
    "partial": (lambda: functools.partial(max, [1]), lambda value: value.args[0].append(2)),
    "bound method": (lambda: Options().scaled, lambda value: setattr(value.__self__, "rate", 5)),
    "method of a builtin": (lambda: {"a": 1}.get, lambda value: value.__self__.update(a=2)),
    "tensor in place": (lambda: torch.zeros(3), lambda value: value.add_(1)),
    "tensor through data": (lambda: torch.zeros(3), lambda value: value.data.fill_(1)),
    "tensor through numpy": (lambda: torch.zeros(3), lambda value: value.numpy().fill(1)),
    "large tensor in one place": (lambda: torch.zeros(10**6), lambda value: value.data[77].fill_(1)),
    "bfloat16": (lambda: torch.zeros(3, dtype=torch.bfloat16), lambda value: value.data.fill_(1)),
    "tensor in other memory": (lambda: torch.zeros(3), lambda value: setattr(value, "data", torch.ones(3))),
    "inference tensor": (inference_tensor, add_one),
    "requires_grad": (lambda: torch.zeros(3), lambda value: value.requires_grad_()),
    "shape of a tensor": (lambda: torch.zeros(2, 3), lambda value: value.t_()),
    "array": (lambda: np.zeros(3), lambda value: value.fill(1)),
    "strided array": (lambda: np.zeros(9)[::2], lambda value: value.fill(1)),
    "array of objects": (lambda: np.array([[1], None], dtype=object), lambda value: value[0].append(2)),
    "function attribute": (lambda: types.FunctionType((lambda: 1).__code__, {}), lambda f: setattr(f, "n", 2)),
    "code of a function": (
        lambda: types.FunctionType((lambda: 1).__code__, {}),
        lambda f: setattr(f, "__code__", (lambda: 2).__code__),
    ),
    "default of a function": (lambda: lambda x=1: x, lambda value: setattr(value, "__defaults__", (2,))),
}


@pytest.mark.parametrize("name", MUTABLE)
def test_changed_capture_is_sent_again(name: str) -> None:
    make, change = MUTABLE[name]
    captured = make()
    assert is_sent_again(lambda: captured, lambda: change(captured))


@pytest.mark.parametrize("name", MUTABLE)
def test_changed_capture_of_an_inner_function_is_sent_again(name: str) -> None:
    make, change = MUTABLE[name]
    captured = make()

    def inner() -> Any:
        return captured

    holder = {"inner": functools.partial(inner)}
    assert is_sent_again(lambda: holder, lambda: change(captured))


def test_minus_zero_is_another_value() -> None:
    value = 0.0

    def change() -> None:
        nonlocal value
        value = -0.0

    assert is_sent_again(lambda: value, change)


def test_loop_variable_is_seen() -> None:
    def outer() -> tuple[Callable[[], int], Callable[[], None]]:
        index = 0

        def advance() -> None:
            nonlocal index
            index += 1

        return lambda: index, advance

    assert is_sent_again(*outer())


counted = 1


def test_rebound_global_is_seen() -> None:
    def change() -> None:
        global counted  # noqa: PLW0603
        counted += 1

    assert is_sent_again(lambda: counted, change)


def test_class_attributes_methods_and_bases_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        rate = 1

    class Local(Base):
        def method(self) -> int:
            return self.rate

        @property
        def twice(self) -> int:
            return 2

        @staticmethod
        def three() -> int:
            return 3

    made = Local()
    for function in (lambda: Local, lambda: made):
        assert is_sent_again(function, lambda: setattr(Base, "rate", Base.rate + 1))
        assert is_sent_again(function, lambda: setattr(Local, "method", lambda self: 4))
        assert is_sent_again(function, lambda: setattr(Local, "twice", property(lambda self: 5)))
        assert is_sent_again(function, lambda: setattr(Local, "three", staticmethod(lambda: 6)))
        assert not is_sent_again(function, lambda: None)


def test_attributes_of_the_users_module_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_settings.py").write_text("rate = 1\ndef scaled(x):\n    return rate * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import users_settings  # type: ignore[import-not-found]

    scaled = users_settings.scaled
    assert is_sent_again(lambda: users_settings.rate, lambda: setattr(users_settings, "rate", 2))
    assert is_sent_again(lambda: scaled(1), lambda: setattr(users_settings, "rate", 3))
    del sys.modules["users_settings"]


def test_what_did_not_change_is_not_sent_again() -> None:
    weights, array, options, loss = inference_tensor(), np.ones(2), Options(), torch.nn.CrossEntropyLoss()

    def helper(x: Any) -> Any:
        return cross_entropy(x, weights) + options.rate

    def step(x: Any, reduction: str = "mean") -> Any:
        return helper(x), array, Color.RED, loss, collections.OrderedDict, np.float32, reduction, functools.partial(max)

    cache = FunctionCache(lambda _: False)
    token, sent = cache.prepare(step)
    assert sent is step
    assert cache.prepare(step) == (token, None)
    assert cache.prepare(step) == (token, None)


def test_references_are_not_looked_into() -> None:
    model = torch.nn.Linear(2, 2)
    cache = FunctionCache(lambda value: value is model)
    step = lambda: model  # noqa: E731
    cache.prepare(step)
    with torch.no_grad():
        model.weight.add_(1)
    assert cache.prepare(step)[1] is None


def test_functions_that_children_have_forgotten_are_sent_again() -> None:
    cache = FunctionCache(lambda _: False)
    kept = lambda: 7  # noqa: E731
    token, _ = cache.prepare(kept)
    for number in range(100):
        cache.prepare(functools.partial(int, number))
    again, sent = cache.prepare(kept)
    assert sent is kept
    assert again > token


def test_a_new_function_in_the_place_of_an_old_one_is_sent() -> None:
    cache = FunctionCache(lambda _: False)
    tokens = {cache.prepare(eval(f"lambda: {number}"))[0] for number in range(50)}  # noqa: S307
    assert len(tokens) == 50


def test_what_cannot_be_sent_is_found() -> None:
    import threading

    def can_be_sent(value: Any) -> bool:
        try:
            pack(value)
        except Exception:
            return False
        return True

    lock = threading.Lock()
    options = Options()
    options.guard = lock  # type: ignore[attr-defined]

    def step() -> Any:
        return options

    found, where = find_unsendable((1, {"f": functools.partial(step)}), can_be_sent)
    assert found is lock
    assert "captured as 'options' by step" in where
    assert "the attribute 'guard' of a Options" in where
