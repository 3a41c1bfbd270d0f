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

from stratagem.objects import kinds
from stratagem.objects.captured import Captured, Delivery
from stratagem.objects.comparing import Same
from stratagem.objects.kind import CONTENT
from stratagem.objects.known_objects import KnownObject
from stratagem.objects.same_again import SameAgain
from stratagem.objects.steady import Steady
from stratagem.processes.packing import find_unsendable, pack
from stratagem.processes.registry import Registry


def is_sent_again(function: Callable[..., Any], change: Callable[[], object], num_runs: int = 3) -> bool:
    """After the first run objects are described, later on most are only compared by what is in them."""
    captured = Captured(Registry(keeps=False))
    for _ in range(num_runs):
        captured.prepare(function)
        captured.note_run()
    change()
    return is_anything(captured.prepare(function))


def is_anything(delivery: Delivery) -> bool:
    return bool(delivery.new or delivery.changes)


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


class OtherOptions(Options):
    def scaled(self) -> int:
        return 3 * self.rate


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
    "class of an object": (Options, lambda value: setattr(value, "__class__", OtherOptions)),
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


@pytest.mark.parametrize("num_runs", [1, 3])
@pytest.mark.parametrize("name", MUTABLE)
def test_changed_capture_is_sent_again(name: str, num_runs: int) -> None:
    make, change = MUTABLE[name]
    captured = make()
    assert is_sent_again(lambda: captured, lambda: change(captured), num_runs)


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

    captured = Captured(Registry(keeps=False))
    assert is_anything(captured.prepare(step))
    assert not is_anything(captured.prepare(step))
    captured.note_run()
    assert not is_anything(captured.prepare(step))


def test_distributed_objects_are_not_looked_into() -> None:
    model = torch.nn.Linear(2, 2)
    registry = Registry(keeps=False)
    for number, part in enumerate((model, model.weight, model.bias), start=1):
        registry.add(number, part)
    captured = Captured(registry)
    step = lambda: model  # noqa: E731
    captured.prepare(step)
    with torch.no_grad():
        model.weight.add_(1)
    assert not is_anything(captured.prepare(step))


def test_what_cannot_be_sent_is_found() -> None:
    def can_be_sent(value: Any) -> bool:
        try:
            pack(value)
        except Exception:
            return False
        return True

    lines = (each for each in "ab")
    options = Options()
    options.guard = lines  # type: ignore[attr-defined]

    def step() -> Any:
        return options

    found, where = find_unsendable((1, {"f": functools.partial(step)}), can_be_sent)
    assert found is lines
    assert "captured as 'options' by step" in where
    assert "the attribute 'guard' of a Options" in where


def test_only_what_a_function_can_reach_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, seen = torch.zeros(3), [torch.zeros(2)]
    captured = Captured(Registry(keeps=False))

    def both() -> Any:
        return weights, seen

    captured.prepare(both)
    looked: list[torch.Tensor] = []
    tokens = kinds._Tensor.tokens
    monkeypatch.setattr(kinds._Tensor, "tokens", lambda *args: [looked.append(args[1]), tokens(*args)][1])
    weights.add_(1)
    assert is_anything(captured.prepare(lambda: seen))
    captured.note_run()
    assert looked
    assert all(each is seen[0] for each in looked)
    assert is_anything(captured.prepare(both))  # it has changed all the same


@pytest.mark.parametrize(
    "holder", [lambda value: [value] * 2000, lambda value: np.array([value, None], dtype=object), Frozen]
)
def test_known_object_inside_a_new_one_is_looked_at(holder: Callable[[Any], Any]) -> None:
    seen, captured = [1], Captured(Registry(keeps=False))
    captured.prepare(lambda: seen)
    held = holder(seen)
    seen.append(2)
    changes = [members for members, _ in captured.prepare(lambda: held).changes]
    assert {CONTENT: (1, 2)} in changes


def test_opaque_attributes_of_a_distributed_module_are_seen() -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.slots, model.scale, model.lines = Slotted(), np.float64(1.0), iter([])
    registry = Registry(keeps=False)
    registry.add(1, model)
    captured = Captured(registry)
    step = lambda: model  # noqa: E731
    captured.prepare(step)
    captured.note_run()
    assert not is_anything(captured.prepare(step))
    model.slots.x = 2
    model.scale = np.float64(2.0)
    assert [dict(members) for members, _ in captured.prepare(step).changes] == [
        {"slots": model.slots, "scale": 2.0},
    ]


def test_children_that_share_a_look_at_steady_objects_are_each_sent_what_has_changed() -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.scale = 1.0
    registry = Registry(keeps=False)
    for number, part in enumerate((model, model.weight, model.bias), start=1):
        registry.add(number, part)
    steady = Steady(registry)
    first, second = Captured(registry, steady), Captured(registry, steady)
    step = lambda: model  # noqa: E731

    def sent_to(captured: Captured) -> list[Any]:
        steady.look()
        delivery = captured.prepare(step)
        if not steady.is_so:
            steady.note()
        return [dict(members) for members, _ in delivery.changes]

    for captured in (first, second) * 4:  # in the end nothing is looked at but what the step can reach
        sent_to(captured)
    assert [len(captured.distributed()[0]) for captured in (first, second)] == [0, 0]  # none is looked at by itself
    model.scale = 2.0
    assert [sent_to(captured) for captured in (first, second) * 2] == [[{"scale": 2.0}]] * 2 + [[]] * 2
    model.scale = 3.0
    assert sent_to(first) == [{"scale": 3.0}]
    model.scale = 2.0
    assert sent_to(first) == [{"scale": 2.0}]
    assert sent_to(second) == []
    second.forget()
    assert len(second.distributed()[0]) == 1


class Scaled(torch.optim.SGD):
    """An optimizer of a program's own, with a number besides what torch's have."""

    scale = 1.0


def _take_hook(optimizer: Scaled) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


OPTIMIZER_CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "an attribute": lambda optimizer: setattr(optimizer, "scale", 3.0),
    "a new attribute": lambda optimizer: setattr(optimizer, "other", "text"),
    "a hook": _take_hook,
    "a class attribute": lambda optimizer: setattr(type(optimizer), "scale", 2.0),
}


@pytest.mark.parametrize("change", OPTIMIZER_CHANGES.values(), ids=OPTIMIZER_CHANGES.keys())
def test_changes_of_a_distributed_optimizer_are_seen_where_nothing_else_is_looked_at(
    change: Callable[[Scaled], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "scale", 1.0)
    layer = torch.nn.Linear(2, 2)
    optimizer = Scaled(layer.parameters(), lr=0.1)
    optimizer.scale = 1.0
    registry = Registry(keeps=False)
    for name, each in enumerate((*layer.parameters(), layer, optimizer), start=1):
        registry.add(name, each)
    steady = Steady(registry)
    captured = Captured(registry, steady)

    def step() -> None:
        layer(torch.ones(2)).sum().backward()
        optimizer.step()

    def run() -> bool:
        steady.look()
        is_sent = is_anything(captured.prepare(step))
        if not steady.look():
            steady.note()
        captured.note_run()
        return is_sent

    assert [run() for _ in range(5)][-3:] == [False] * 3
    looked_at: list[object] = []
    monkeypatch.setattr(Captured, "distributed", lambda self: looked_at.append(self) or ([], set()))
    assert not run()
    assert not looked_at  # the function and all that it reaches are as they were: nothing else is asked
    monkeypatch.undo()
    change(optimizer)
    assert run()
    assert not run()


def test_variable_without_a_value_hides_no_change_of_another() -> None:
    def other() -> Any:
        return later

    def step() -> Any:
        return factor, other

    factor = 1
    captured = Captured(Registry(keeps=False))
    for _ in range(4):
        captured.prepare(step)
        captured.note_run()
    assert not is_anything(captured.prepare(step))
    factor = 7
    assert is_anything(captured.prepare(step))
    captured.note_run()
    later = 2
    assert is_anything(captured.prepare(step))


def test_object_that_goes_while_it_is_looked_at_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, seen = Captured(Registry(keeps=False)), [1]
    step = lambda: seen  # noqa: E731
    for _ in range(2):
        captured.prepare(step)
        captured.note_run()
    get = KnownObject.get
    with monkeypatch.context() as patched:
        patched.setattr(KnownObject, "get", lambda self: None if self.strong is seen else get(self))
        assert SameAgain.of(list(captured._nodes.values())) is None
    seen.append(2)
    assert is_anything(captured.prepare(step))


def test_what_is_compared_by_what_it_is_does_not_rest_on_its_address() -> None:
    lines: list[Any] = [(each for each in "ab") for _ in range(2)]
    gone, here = Same(lines.pop()), Same(lines[0])
    assert here == Same(lines[0])
    assert gone not in (here, Same(each for each in "ab"))


def test_many_objects_that_are_in_use_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.objects.captured._MAX_NODES", 20)
    captured, many, few = Captured(Registry(keeps=False)), [[1] for _ in range(50)], [2]

    def other() -> Any:
        return few

    captured.prepare(other)
    for _ in range(2):
        captured.prepare(lambda: many)
        captured.note_run()
        assert len(captured._nodes) > 50
    changes = captured.prepare(lambda: many)
    assert all(isinstance(each, types.FunctionType | types.CellType) for each in changes.new)
    assert captured.node_of(few) is None  # the last run did not use it
    assert is_anything(captured.prepare(other))


def test_globals_of_a_script_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    script = sys.modules["__main__"]
    monkeypatch.setattr(script, "own_rate", 1, raising=False)
    function = eval("lambda: own_rate", vars(script))  # noqa: S307
    assert is_sent_again(function, lambda: setattr(script, "own_rate", 2))


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_changes_in_large_containers_are_seen_without_packing_them(kind: Any) -> None:
    rows = kind((torch.zeros(1), {"number": number}) for number in range(2000))

    def step() -> int:
        return len(rows)

    assert is_sent_again(step, lambda: rows[7][0].add_(1))
    assert is_sent_again(step, lambda: rows.append((torch.ones(1), {"number": -1})))
    assert is_sent_again(step, lambda: rows[0][1].update(number=5))
    assert is_sent_again(step, lambda: rows[0][1].update(other=5))
    assert not is_sent_again(step, lambda: rows[0][1].update(number=5))
    assert not is_sent_again(step, lambda: None)


def test_what_a_step_turns_to_is_watched_from_then_on() -> None:
    first, second = {"x": 1}, {"x": 2}
    box = {"now": first}

    def step() -> int:
        return box["now"]["x"]

    def other() -> int:
        return second["x"]

    captured = Captured(Registry(keeps=False))
    for function in (other, step, step, step):
        captured.prepare(function)
        captured.note_run()
    captured.prepare(step)
    box["now"] = second  # in the step
    captured.note_run()
    second["x"] = 3
    assert captured.prepare(step).changes == [({"x": 3}, [])]
