"""Keeps the stack of device scopes of each thread, and each coroutine in it: what `sg.device(...)` asks for.

Owns how nested scopes combine into one spec. Does not know which devices exist (`resolution`), runs nothing
(`eager` does for eager code, graphs for theirs). A recorder of graphs reads `spec_for(operation)` for each node and
wraps its work in `recording()`, so that the eager side leaves its operations alone.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeAlias, TypeVar, final

import torch

from stratagem.devices.device import LogicalDevice, PhysicalDevice
from stratagem.devices.device_spec import DeviceSpec
from stratagem.devices.lookup import DeviceLike
from stratagem.errors import DeviceTypeError

# Kinds of tensors whose operations are not placed: they are recorded by whoever made the kind.
UNPLACED: set[type] = set()

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a function given to `sg.device` decides about.

    Args:
        type: What it computes, in TensorFlow's words: `MatMul`, `Conv2D`, `Const`.
        name: The type, numbered where it was used before: `MatMul_1`.
        inputs: Its tensors, or the nodes of a graph.
        num_bytes: Of a new tensor or a variable, how much memory it takes; `None` of what computes.
    """

    type: str
    name: str
    inputs: tuple[Any, ...] = ()
    num_bytes: int | None = None


DeviceFunction: TypeAlias = Callable[[Operation], DeviceLike | None]
ScopeTarget: TypeAlias = DeviceLike | DeviceFunction | None

NOTHING = DeviceSpec()
"""The spec that asks for nothing."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    """One time that a scope was entered."""

    scope: "DeviceScope"
    target: "DeviceSpec | DeviceFunction | None"


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """The scopes that code is in, the innermost last, in its thread.

    Args:
        entries: The scopes.
        fixed: What they ask for; None if that depends on the operation.
        thread: Whose they are; another thread may see them, but is not in them.
        num_left: How often the thread had left scopes when all of these were open.
    """

    entries: tuple[_Entry, ...] = ()
    fixed: DeviceSpec | None = NOTHING
    thread: int = 0
    num_left: int = 0


class _Scopes(threading.local):
    """What a thread has entered.

    Attributes:
        open: The scopes that it has not left, in all its coroutines.
        num_left: How often it has left scopes.
        recorders: Whether its operations are recorded, not run.
    """

    def __init__(self) -> None:
        self.open: dict[_Entry, None] = {}
        self.num_left = 0
        self.recorders = 0


state = _Scopes()
_OUTSIDE = Frame()
_frame: contextvars.ContextVar[Frame] = contextvars.ContextVar("stratagem_device_scopes", default=_OUTSIDE)
_observers: list[Callable[[], None]] = []


def frame() -> Frame:
    """The scopes around the caller."""
    found = _frame.get()
    if found.thread != threading.get_ident():
        return _OUTSIDE
    if found.num_left != state.num_left:  # what one coroutine has left has ended for all
        found = _framed(tuple(each for each in found.entries if each in state.open))
        _frame.set(found)
    return found


@final
class DeviceScope:
    """One `sg.device(...)`: a context manager that can be entered again, and a decorator."""

    def __init__(self, target: ScopeTarget) -> None:
        self._target = read_target(target)

    def __enter__(self) -> DeviceSpec:
        before, entry = frame(), _Entry(self, self._target)
        state.open[entry] = None
        try:
            _set((*before.entries, entry))
        except BaseException:
            del state.open[entry]
            _frame.set(before)
            raise
        return spec_for(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Scopes inside that were not left, as those of a generator that nobody finished, end with this one.
        entries = frame().entries
        depth = max((index for index, each in enumerate(entries) if each.scope is self), default=len(entries))
        # It may have been entered in another coroutine.
        ended = entries[depth:] or [each for each in reversed(state.open) if each.scope is self][:1]
        for each in ended:
            state.open.pop(each, None)
        state.num_left += 1
        _set(entries[:depth])

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Runs every call of a function in this scope."""
        if not callable(function) or inspect.isclass(function):
            raise DeviceTypeError(f"sg.device(...) decorates a function, got {function!r}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise DeviceTypeError(
                f"sg.device(...) decorates plain functions, but {function.__qualname__!r} is a generator or a "
                f"coroutine; write `with sg.device(...):` inside it, in a generator around code that does not yield"
            )

        @functools.wraps(function)
        def placed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return placed

    def __repr__(self) -> str:
        return f"device({str(self._target) if isinstance(self._target, DeviceSpec) else self._target!r})"


def device(target: ScopeTarget) -> DeviceScope:
    """Places what is made or computed in a block on a device: `with sg.device("/gpu:1"):`, or as a decorator.

    Inner scopes win, part by part: `/gpu:0` inside `/job:worker/task:1` means both; an inner kind of device takes no
    index from outside. A scope holds for its thread, and there for its coroutine.

    Args:
        target: A device in any spelling, whole or in part; `None` for no scope at all, as if outside; or a function
            from an `Operation` to any of these, where `None` leaves the choice to the scopes around it.
    Raises:
        UnknownDeviceError: The text is not the name of a device. One that is, but of which there is none, is an error
            of the first operation that needs it.
    Example:
        >>> with device("/cpu:0"):
        ...     x = torch.ones(2, 2)
        >>> with device(lambda operation: "/cpu:0" if operation.type == "MatMul" else None):
        ...     y = x @ x
    """
    return DeviceScope(target)


def current_device() -> DeviceSpec:
    """What the scopes around the caller ask for, functions left out; `NOTHING` where they ask for nothing."""
    return _merged(None)


def spec_for(operation: Operation | None) -> DeviceSpec:
    """What the scopes of this thread ask for of one operation, its device functions included.

    The result may be partial (`/device:GPU:*`, `/job:worker`) or `NOTHING`; `resolution.resolve` makes a device of this
    process of it.
    """
    fixed = frame().fixed
    return fixed if fixed is not None else _merged(operation)


def asks_functions() -> bool:
    """Whether the scopes of this thread need an operation to say what they ask for."""
    return frame().fixed is None


def merge(outer: DeviceSpec, inner: DeviceSpec) -> DeviceSpec:
    """Both specs, the inner one first; a kind and its index stay together."""
    if inner.device_type is not None:
        outer = dataclasses.replace(outer, device_type=None, device_index=None)
    return outer.make_merged_spec(inner)


# A generator: Ctrl-C may come as the first instruction of an `__exit__` in Python, which would then count nothing.
@contextlib.contextmanager
def recording() -> Iterator[None]:
    """For what is no operation of the program: scopes are kept, but eager operations of this thread are left alone."""
    state.recorders += 1
    try:
        yield
    finally:
        state.recorders -= 1


@contextlib.contextmanager
def placing() -> Iterator[None]:
    """For code of the program that is called inside the innermost `recording`: as outside that."""
    state.recorders -= 1
    try:
        yield
    finally:
        state.recorders += 1


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """For code that the scopes around it do not concern: in the block this thread is in none of them."""
    if not state.open:
        yield
        return
    entries, opened = _frame.get().entries, state.open
    state.open = {}
    try:
        _set(())
        yield
    finally:
        state.open = opened
        _set(tuple(each for each in entries if each in opened))


@contextlib.contextmanager
def inside(known: Frame) -> Iterator[None]:
    """For what was made in scopes that may have been left since: `spec_for` in the block is as it was there."""
    before = _frame.set(dataclasses.replace(known, thread=threading.get_ident(), num_left=state.num_left))
    try:
        yield
    finally:
        _frame.reset(before)


def observe(changed: Callable[[], None]) -> None:
    """Has a function called whenever a thread has entered or left a scope, in that thread."""
    _observers.append(changed)


def _framed(entries: tuple[_Entry, ...]) -> Frame:
    functions = any(callable(each.target) for each in entries)
    fixed = None if functions else _merge_all(entries, None)
    return Frame(entries, fixed, threading.get_ident(), state.num_left)


def _set(entries: tuple[_Entry, ...]) -> None:
    _frame.set(_framed(entries))
    for each in _observers:
        each()


def _merged(operation: Operation | None) -> DeviceSpec:
    return _merge_all(frame().entries, operation)


def _merge_all(entries: Sequence[_Entry], operation: Operation | None) -> DeviceSpec:
    spec = NOTHING
    for entry in reversed(entries):
        target = entry.target
        if target is None:
            break
        if isinstance(target, DeviceSpec):
            spec = merge(target, spec)
        elif operation is not None:
            chosen = read_target(target(operation))
            if callable(chosen):
                raise DeviceTypeError(
                    f"a function given to sg.device returns a device, got another function {chosen!r}"
                )
            spec = merge(chosen or NOTHING, spec)
    return spec


def read_target(target: ScopeTarget) -> DeviceSpec | DeviceFunction | None:
    """What a user wrote as a device, whole or in part; functions and `None` stay as they are."""
    match target:
        case None | DeviceSpec():
            return target
        case PhysicalDevice():
            raise DeviceTypeError(f"{target!r} is a physical device; name a logical one such as 'gpu:0'")
        case LogicalDevice():
            return DeviceSpec(device_type=target.device_type, device_index=target.index)
        case str() | torch.device():
            return DeviceSpec.from_string(str(target))
        case _ if callable(target):
            return target
    raise DeviceTypeError(
        f"a device scope takes a device such as '/gpu:1', a function from an operation to one, or None; got {target!r}"
    )
