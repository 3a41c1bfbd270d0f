"""The rules that the arguments of `strategy.run` obey, and what to write instead of what breaks one."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from stratagem import _torch, _tree, inputs
from stratagem._checks import require_count
from stratagem.errors import StrategyError
from stratagem.objects.per_replica import PerReplica


class Runs(inputs.InputHost, Protocol):
    """What the rules need of a strategy."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas train together."""


def require_call(strategy: Runs, fn: Any, args: Any, kwargs: Any, num_steps: Any) -> None:
    """Refuses what is not a function with its arguments, and values of another strategy's replicas."""
    if num_steps is not None:
        require_count(num_steps=num_steps)
    if not callable(fn):
        raise StrategyError(f"run calls a function in every replica, got {type(fn).__name__} {fn!r}")
    if _comes_back_later(fn):
        raise StrategyError(
            f"run calls a function that is finished when it returns, got {getattr(fn, '__name__', fn)} with yield "
            f"or async; return the values, in a list if there are several"
        )
    if not isinstance(args, tuple | list | inputs.Pass | inputs.Distributed):
        instead = _instead_of(args, kwargs, fn)
        raise StrategyError(f"args is a tuple of arguments, got {type(args).__name__}; {instead}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise StrategyError(f"kwargs is a dict of keyword arguments, got {type(kwargs).__name__} {kwargs!r}")
    if kwargs and not all(isinstance(name, str) for name in kwargs):
        raise StrategyError(f"kwargs has the names of arguments as its keys, got {list(kwargs)!r}")
    num_here = len(strategy.replicas_here)
    for each in _tree.leaves((args, kwargs)):
        if type(each) is PerReplica:
            if len(each) != num_here:
                raise StrategyError(
                    f"run takes batches of its own strategy: {type(strategy).__name__} has {num_here} "
                    f"replica(s) here, and was given values of a strategy with {len(each)}, so that rows would be "
                    f"lost or missing; use the strategy whose distribute made the batch, or distribute the data "
                    f"with this"
                )
            continue
        if isinstance(each, inputs.Distributed):
            raise StrategyError(
                f"run takes one batch, got distributed data, which has many; write `for batch in data: "
                f"strategy.run(step, args={_as_args('batch', fn)})`, or for several steps in one call `iterator = "
                f"iter(data)` once, then `strategy.run(step, args={_as_args('iterator', fn)}, num_steps=16)`"
            )
        if strategy.num_replicas_in_sync > 1 and isinstance(each, _torch.loading_parts.DataLoaderIterator):
            raise StrategyError(
                f"run takes one batch, got {type(each).__name__}, which only the main program can read; "
                f"{_of_distribute(fn)}"
            )
        if isinstance(each, inputs.Pass):
            _require_own(strategy, each, num_steps, fn)


def _require_own(strategy: Runs, iterator: inputs.Pass, num_steps: int | None, fn: Callable[..., Any]) -> None:
    """Refuses an iterator for which nothing says how many steps it is for, and that of another strategy."""
    if num_steps is None:
        raise StrategyError(
            f"run was given an iterator over distributed data without the number of steps; write "
            f"`strategy.run(step, args={_as_args('iterator', fn)}, num_steps=16)`, or give it one batch: "
            f"`strategy.run(step, args={_as_args('next(iterator)', fn)})`"
        )
    if iterator.host is not strategy:
        raise StrategyError(
            f"run of {type(strategy).__name__} was given an iterator over data that another "
            f"{type(iterator.host).__name__} has distributed; use the strategy whose distribute made it, or "
            f"distribute the data with this one"
        )


def _of_distribute(fn: Callable[..., Any]) -> str:
    return f"write `for batch in strategy.distribute(loader): strategy.run(step, args={_as_args('batch', fn)})`"


def _as_args(batch: str, fn: Callable[..., Any]) -> str:
    """How a batch is written in `args`: its parts are the arguments, or it is the only argument of the function."""
    return f"({batch},)" if _takes(fn, 1) and not _takes(fn, 2) else batch


def _takes(fn: Callable[..., Any], number: int) -> bool:
    """Whether a function can be called with so many arguments, as far as it says."""
    try:
        inspect.signature(fn).bind(*range(number))
    except (TypeError, ValueError):
        return False
    return True


def _instead_of(args: Any, kwargs: Any, fn: Callable[..., Any]) -> str:
    """What to write where `args` is not a tuple."""
    if kwargs is not None and not isinstance(kwargs, dict):
        return "the arguments of the function stand in one tuple: write `strategy.run(step, args=(x, y))`"
    if isinstance(args, PerReplica | torch.Tensor):
        return "a batch that is one tensor is one argument: write `strategy.run(step, args=(batch,))`"
    if isinstance(args, dict):
        return (
            "write `strategy.run(step, args=(batch,))`, or `strategy.run(step, kwargs=batch)` if its keys are the "
            "names of arguments"
        )
    if isinstance(args, torch.utils.data.DataLoader | torch.utils.data.Dataset | Iterator):
        return _of_distribute(fn)
    return "write run(step, args=(x, y)), args=(x,), or args=() if the function takes nothing"


def misfit(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> str:
    """Says that a function does not take these arguments, and what to write; nothing if it does."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # one of C, which does not say
        return ""
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        name = f"{getattr(fn, '__name__', type(fn).__name__)}({', '.join(signature.parameters)})"
        words = f"run calls {name} with {len(args)} argument(s) in args, and that does not fit: {error}"
        (only,) = args if len(args) == 1 else (None,)
        if isinstance(only, inputs.Pass):
            return f"{words}; args=(iterator,) is one argument, the whole batch: write args=iterator for its parts"
        if isinstance(only, torch.utils.data.DataLoader):
            return f"{words}; {_of_distribute(fn)}"
        if isinstance(only, tuple | list):
            return f"{words}; args=(batch,) is one argument, the whole batch: write args=batch for its parts"
        return f"{words}; write run(step, args=(x, y)), with as many arguments as the function takes"
    return ""


_LATER: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _comes_back_later(fn: Callable[..., Any]) -> bool:
    """Whether a function is not finished when it returns."""
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    if not isinstance(fn, types.FunctionType):
        return False
    return bool(fn.__code__.co_flags & _LATER) or (bool(fn.__dict__) and inspect.iscoroutinefunction(fn))
