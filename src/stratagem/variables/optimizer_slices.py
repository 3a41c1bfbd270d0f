"""Optimizers over other tensors than those that they were made for: slices of parameters, or copies elsewhere.

Owns the table of optimizers that treat each element by itself, and what `optimizer.step()` consists of
around the update. Where the slices lie is the business of whoever calls.
"""

import inspect
import itertools
import operator
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.errors import StrategyError

BLOCK = 256 * 1024
"""Elements that are updated at a time: the passes of an optimizer over them, and what it allocates, stay in the cache.

For Adam with large layers that is more than twice as fast.
"""

# Optimizers that do the same to every element, whatever its neighbours: torch's class, and Keras' name.
_TABLE: tuple[tuple[type[torch.optim.Optimizer] | None, str | None], ...] = (
    (torch.optim.SGD, "SGD"),
    (torch.optim.Adam, "Adam"),
    (torch.optim.AdamW, "AdamW"),
    (torch.optim.NAdam, None),  # that of Keras also changes a number that is the same for all variables
    (torch.optim.RAdam, None),
    (torch.optim.Adamax, "Adamax"),
    (torch.optim.Adadelta, "Adadelta"),
    (torch.optim.Adagrad, "Adagrad"),
    (torch.optim.RMSprop, "RMSprop"),
    (torch.optim.Rprop, None),
    (None, "Lion"),
    (None, "Ftrl"),
)
ELEMENTWISE = {kind.__name__: kind for kind, _ in _TABLE if kind is not None}
"""Those of torch, by name."""
_OF_KERAS = frozenset(name for _, name in _TABLE if name is not None)

_NOT_TAKEN_OVER = frozenset({"defaults", "state", "param_groups", "step", "zero_grad", "state_dict", "load_state_dict"})


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer of torch or Keras does the same to every element, whatever its neighbours."""
    kind = type(optimizer)
    if kind.__module__.startswith("keras."):
        return kind.__name__ in _OF_KERAS
    return kind is ELEMENTWISE.get(kind.__name__)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, group after group."""
    return list(itertools.chain.from_iterable(map(_parameters, optimizer.param_groups)))


_parameters = operator.itemgetter("params")
_values = operator.methodcaller("values")


@final
class StateMark:
    """What the state of an optimizer consists of, to find out whether the program has changed it.

    Args:
        optimizer: The optimizer; it is not kept alive.
        versions: Whether writes in place count too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, versions: bool) -> None:
        state = optimizer.state
        self._ids = [id(state), *map(id, state)]
        self._held = list(itertools.chain.from_iterable(map(_values, state.values())))
        tensors = [each for each in self._held if isinstance(each, torch.Tensor)] if versions else []
        self._versions = list(map(_torch.tensors.version_of, tensors)) if versions else None

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still has this state."""
        other = StateMark(optimizer, versions=self._versions is not None)
        if (self._ids, self._versions) != (other._ids, other._versions) or len(self._held) != len(other._held):
            return False
        return all(map(operator.is_, self._held, other._held))


@final
class StateElsewhere(defaultdict[Any, Any]):
    """In the place of the state of an optimizer that another process has: says so when it is used.

    Args:
        words: What to say: the rule, and what to do.
        writes: Whether it may be written to, because who has the state does the same.
    """

    def __init__(self, words: str, *, writes: bool) -> None:
        super().__init__(dict)
        self._words, self._writes = words, writes

    def refuse(self, *_: Any, **__: Any) -> Any:
        """Says where the state is."""
        raise StrategyError(self._words)

    def _refuse_to_write(self, *_: Any, **__: Any) -> Any:
        return None if self._writes else self.refuse()

    __getitem__ = __iter__ = __len__ = __contains__ = get = items = keys = values = setdefault = refuse
    __setitem__ = __delitem__ = clear = pop = update = _refuse_to_write

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,)  # a process that comes later begins without any, and is then given what it needs


def over(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[torch.Tensor, dict[str, Any]] | None = None,
) -> Any:
    """An optimizer like another, over other tensors; its constructor does not run.

    It has the attributes that the class has added, and no hooks.

    Args:
        optimizer: The other.
        groups: With the tensors in the place of `params`.
        state: By these tensors.
    """
    inner = object.__new__(type(optimizer))
    own = {"defaults": optimizer.defaults, "state": defaultdict(dict, state or {}), "param_groups": list(groups)}
    inner.__setstate__(own)
    copy_attributes(optimizer, inner)
    return inner


def copy_attributes(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Gives an optimizer the attributes that the class of another has added."""
    for key, value in source.__dict__.items():
        if key not in _NOT_TAKEN_OVER and not key.startswith("_optimizer_"):  # these are hooks
            target.__dict__[key] = value


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Gives the groups of an optimizer the options that those of another have now."""
    for given, group in zip(source.param_groups, target.param_groups, strict=True):
        group.update({key: value for key, value in given.items() if key != "params"})


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class of optimizers without hooks; gradients must be off.

    Without torch's other wrappers too: they import its compiler, 800 modules that a child has no other use for.
    """
    is_torchs = kind.step.__module__.startswith("torch.optim.")
    # Of a class of the user's own the outermost alone: others may be the user's.
    bare: Callable[..., Any] = inspect.unwrap(
        kind.step, stop=lambda each: not is_torchs and not hasattr(each, "hooked")
    )
    return _torch.optimizer_parts.step_of_adagrad(bare) if issubclass(kind, torch.optim.Adagrad) else bare


def put_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Puts another step in the place of an optimizer's; where compiled code comes to it, it runs by itself."""

    def uncompiled(closure: Any = None) -> Any:
        return _torch.compiling.not_compiled(step, closure)

    _torch.optimizer_parts.mark_wrapped(uncompiled)
    uncompiled.owner = weakref.ref(optimizer)  # type: ignore[attr-defined]
    optimizer.step = uncompiled  # type: ignore[method-assign]


def in_every_replica(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as replicas call it: of the step of this process's optimizer, that of their own."""
    owner = getattr(function, "owner", None) if isinstance(function, types.FunctionType) else None
    optimizer = owner() if isinstance(owner, weakref.ref) else None
    if not isinstance(optimizer, torch.optim.Optimizer):
        return function

    def step(*args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    return step


def step_with_hooks(optimizer: torch.optim.Optimizer, update: Callable[[], None], closure: Any = None) -> Any:
    """What `optimizer.step(closure)` is, with another update in the place of the optimizer's.

    Returns:
        What the closure returns; `None` if there is none.
    """
    given = (optimizer,) if closure is None else (optimizer, closure)
    for hook in _torch.optimizer_parts.step_pre_hooks(optimizer):
        hook(optimizer, given, {})
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    update()
    for hook in _torch.optimizer_parts.step_post_hooks(optimizer):
        hook(optimizer, given, {})
    return loss
