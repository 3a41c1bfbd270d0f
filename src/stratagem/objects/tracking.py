"""Remembers what is made inside a scope, so that it can be given to the replicas.

While a scope is open, the constructors of torch's modules, parameters, optimizers, schedulers and
gradient scalers note what they make, as `copy.deepcopy` and `torch.load` of modules do; when it closes
they are put back as they were.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import torch

from stratagem import _torch
from stratagem._parallel_wrappers import refuse_wrapper
from stratagem.errors import StrategyError


@final
class Tracker:
    """The objects that were made in the scopes of one strategy, in the order of their making."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        self._known: dict[int, weakref.ref[Any]] = {}
        _trackers.add(self)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Notes what this thread makes inside the block."""
        with _watching_constructors():
            _thread.trackers.append(self)
            try:
                yield
            finally:
                _thread.trackers.remove(self)

    def note(self, *objects: Any) -> None:
        """Notes objects that were made elsewhere: modules with all that is in them, optimizers.

        Raises:
            StrategyError: One of them belongs to another strategy, which is still open, or does a strategy's work.
        """
        noted = [
            each
            for obj in objects
            for each in ([*obj.modules(), *obj.parameters()] if isinstance(obj, torch.nn.Module) else [obj])
        ]
        for each in noted:
            refuse_wrapper(each)
            self.refuse_if_elsewhere(each)
        for each in noted:
            self._note(each)

    def refuse_if_elsewhere(self, obj: Any) -> None:
        """Refuses an object of another strategy: it would be changed by both, each behind the other's back."""
        if any(other is not self and id(obj) in other._known for other in _trackers):
            raise StrategyError(
                f"{_described(obj)} belongs to another strategy, which is still open; use it with that one, close that "
                f"one first, or take a copy.deepcopy of the model"
            )

    def __contains__(self, obj: object) -> bool:
        return id(obj) in self._known

    def pending_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that were noted and have not been taken yet."""
        return [obj for obj in self.pending() if isinstance(obj, torch.nn.Parameter)]

    def pending(self) -> list[Any]:
        """All that was noted, still exists and has not been taken yet."""
        return [obj for reference in self._made if (obj := reference()) is not None]

    def let_go(self) -> None:
        """Forgets everything: other strategies may have it."""
        self._made, self._known = [], {}

    @property
    def has_news(self) -> bool:
        """Whether anything was noted that has not been taken."""
        return bool(self._made)

    def take(self) -> list[Any]:
        """What was made since the last call and still exists, with all that modules among it hold."""
        # A module that was made elsewhere is seen only in the one that holds it.
        self.note(*[obj for reference in self._made if isinstance(obj := reference(), torch.nn.Module)])
        made, self._made = self._made, []
        return [obj for reference in made if (obj := reference()) is not None]

    def put_back(self, made: list[Any]) -> None:
        """Takes back what could not be given out, for another attempt."""
        self._made = [self._known[id(obj)] for obj in made if id(obj) in self._known] + self._made

    def _note(self, obj: Any) -> None:
        if id(obj) not in self._known and not (_thread.num_untracked or _torch.compiling.is_in_compiler()):
            reference = weakref.ref(obj, functools.partial(self._forget, id(obj)))
            self._known[id(obj)] = reference
            self._made.append(reference)

    def _forget(self, key: int, _: Any) -> None:
        self._known.pop(key, None)


class _OfThread(threading.local):
    """Blocks that are open in one thread: those that note, and those in which the library makes what is its own."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []
        self.num_untracked = 0


_thread = _OfThread()


@contextlib.contextmanager
def untracked() -> Iterator[None]:
    """A block in which nothing that is made is noted, also inside a scope."""
    _thread.num_untracked += 1
    try:
        yield
    finally:
        _thread.num_untracked -= 1


# All of this process, so that no object comes to belong to two.
_trackers: weakref.WeakSet[Tracker] = weakref.WeakSet()


def pending_parameters() -> list[torch.nn.Parameter]:
    """The parameters that open strategies will distribute at their next run."""
    return [parameter for tracker in _trackers for parameter in tracker.pending_parameters()]


def _described(obj: Any) -> str:
    if isinstance(obj, torch.nn.Module):
        return f"model {type(obj).__name__}"
    if isinstance(obj, torch.Tensor):
        return f"a parameter of shape {tuple(obj.shape)}"
    return f"{type(obj).__name__}"


_TRACKED_BY_INIT = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)


class _Constructors:
    """How many blocks watch the constructors, in all threads, and how those are put back after the last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_blocks = 0
        self.put_back = contextlib.ExitStack()


_constructors = _Constructors()


@contextlib.contextmanager
def _watching_constructors() -> Iterator[None]:
    with _constructors.lock:
        _constructors.num_blocks += 1
        if _constructors.num_blocks == 1:
            for owner in _TRACKED_BY_INIT:
                _constructors.put_back.enter_context(_replaced(owner, "__init__", _noting_init))
            # A copy, or a module that was read from a file, is made without its constructor.
            _constructors.put_back.enter_context(_replaced(torch.nn.Module, "__setstate__", _noting_init))
            _constructors.put_back.enter_context(_replaced(torch.nn.Parameter, "__new__", _noting_new))
    try:
        yield
    finally:
        with _constructors.lock:
            _constructors.num_blocks -= 1
            if not _constructors.num_blocks:
                _constructors.put_back.close()


def _note_in_thread(obj: Any) -> None:
    for tracker in _thread.trackers:
        tracker._note(obj)


def _noting_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if _thread.trackers:
            refuse_wrapper(self)
        _note_in_thread(self)
        original(self, *args, **kwargs)

    return init


def _noting_new(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        if not made.is_meta:  # Keras makes such for a moment, to find out shapes; those of modules come with these
            _note_in_thread(made)
        return made

    return staticmethod(new)


@contextlib.contextmanager
def _replaced(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    own = owner.__dict__.get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
