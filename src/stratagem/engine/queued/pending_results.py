"""Results that are not there yet: what `run`, `reduce`, `gather` and `local_results` give while workers compute.

A program that reads each loss only now and then keeps all workers busy: nothing waits before a value is read.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, final

import numpy as np
import torch

from stratagem import _tree
from stratagem._parallel_wrappers import advise
from stratagem.engine.queued.step import QueuedStep
from stratagem.errors import StrategyError
from stratagem.objects import per_replica
from stratagem.processes.losses import leave_users_frames

_DEEPEST = 50  # sums of results that wait for each other; longer ones are computed on the way


@final
class PendingResult:
    """A value that workers may not have computed yet; it stands for the value itself, and waits when it is read.

    To read is to look at its number, text, type, length or attributes, or to give it to a function of torch or numpy.
    Sums, products and the like of values that are not there yet are not there either. If a step has failed, its error
    is raised by whoever reads. The result of a step that one worker has made can be used as the number or tensor that
    it is, without `reduce`.

    Args:
        make: Gives the value; waits.
        steps: Those that it needs.
        gives_parts: Whether a part of it is a pending value as well, and not waited for.
        num_parts: How many it will have, as far as anybody can know; else it is waited for to unpack it.
        depth: How many others are computed on the way.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        steps: Sequence[QueuedStep],
        *,
        gives_parts: bool = False,
        num_parts: int | None = None,
        depth: int = 0,
    ) -> None:
        self._make: Callable[[], Any] | None = make
        self._steps = steps
        self._gives_parts = gives_parts
        self._num_parts = num_parts
        self._depth = depth
        self._value: Any = None

    @property
    def is_done(self) -> bool:
        """Whether it can be read without waiting."""
        return all(step.is_done for step in self._steps)

    def wait(self) -> Any:
        """The value itself."""
        if self._make is not None:
            try:
                self._value = self._make()
            except BaseException as error:
                advise(error)
                leave_users_frames(error)
                raise
            self._make, self._steps, self._depth = None, (), 0
        return self._value

    def __getitem__(self, key: Any) -> Any:
        return pending(operator.getitem, self, key, gives_parts=True) if self._gives_parts else self.wait()[key]

    def __len__(self) -> int:
        value = self.wait()
        if isinstance(value, torch.Tensor) and not value.dim():
            raise TypeError(
                "a single number has no length, and torch.tensor(results) asks for it; use torch.stack(results)"
            )
        return len(value)

    def __iter__(self) -> Iterator[Any]:
        if self._make is None or self._num_parts is None:
            return iter(self.wait())
        number = self._num_parts
        return iter([pending(_part_of, self, place, number, gives_parts=True) for place in range(number)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # whoever asks only looks whether there is one
        value = self.wait()
        return getattr(value if hasattr(type(value), name) else _only(value), name)

    @property  # type: ignore[misc]  # so that `isinstance` sees the value
    def __class__(self) -> Any:
        return type(self.wait())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(_only(self.wait()), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _as_it_is, (self.wait(),)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_as_operands(args), **_as_operands(kwargs or {}))


def pending(function: Callable[..., Any], *given: Any, gives_parts: bool = False) -> Any:
    """What a function makes of values of which some are not there yet, and of others as they are now.

    They may be inside nestings.
    """
    needed = [each for each in _tree.leaves(given) if type(each) is PendingResult]
    steps = [step for each in needed for step in each._steps if not step.is_done or step.has_failed]
    depth = 1 + max(each._depth for each in needed)
    kept = _tree.map(_as_it_is_now, given)
    made = PendingResult(lambda: function(*waited_for(kept)), steps, gives_parts=gives_parts, depth=depth)
    if depth >= _DEEPEST:
        made.wait()
    return made


def is_pending(value: Any) -> bool:
    """Whether a nesting has values in it that workers may not have computed yet."""
    return any(type(each) is PendingResult for each in _tree.leaves(value))


def waited_for(value: Any) -> Any:
    """A nesting with everything in it that workers still compute."""
    return _tree.map(lambda each: each.wait() if type(each) is PendingResult else each, value)


def _as_operands(value: Any) -> Any:
    """The same for who computes: with the value of a result that one worker has made, and not that of each worker."""
    return _tree.map(lambda each: _only(each.wait()) if type(each) is PendingResult else each, value)


def _only(value: Any) -> Any:
    """What a worker has returned, if it is the only one; workers that go at their own pace make each step alone."""
    return value[0] if isinstance(value, per_replica.PerReplica) and len(value) == 1 else value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """What a function makes of results: at once of those that are there, later of the others."""
    if not is_pending(value):
        return function(value)
    return _tree.map(lambda each: pending(function, each) if type(each) is PendingResult else function(each), value)


def joined(results: Sequence[Any], counts: tuple[int, ...] | None) -> Any:
    """The results of workers, of equal structure, as one structure of per-replica values."""
    return per_replica.join_results(list(results), counts, _nothing_stays)


def _nothing_stays(rank: int, number: int) -> NoReturn:
    raise LookupError(f"value {number} of worker {rank} has been sent")


def _part_of(value: Any, place: int, num_parts: int) -> Any:
    if len(value) != num_parts:
        raise StrategyError(
            f"a step returned {len(value)} values, but an earlier step of the same function returned {num_parts}; "
            f"return the same number of values in every step, or call wait() on a result before you unpack it"
        )
    return value[place]


def _as_it_is(value: Any) -> Any:
    return value


def _as_it_is_now(value: Any) -> Any:
    """What the program may write to before a result is read, as a copy; gradients still flow to the original."""
    if type(value) is PendingResult:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(self.wait(), *waited_for(others))


def _reading_only(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(*_as_operands(operands))


def _computing(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: pending(lambda *given: function(*map(_only, given)), *operands)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: pending(lambda *given: function(*map(_only, given)), other, self)


for _function in (hash, str, repr, dir):
    setattr(PendingResult, f"__{_function.__name__}__", _reading(_function))
for _name, _function in {
    **{each.__name__: each for each in (float, int, complex, bool, format, round)},
    **{name: getattr(operator, name) for name in ("index", "eq", "ne", "lt", "le", "gt", "ge", "contains", "setitem")},
}.items():
    setattr(PendingResult, f"__{_name}__", _reading_only(_function))
for _name in ("neg", "pos", "abs", "invert", "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"):
    setattr(PendingResult, f"__{_name}__", _computing(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"):
    setattr(PendingResult, f"__r{_name}__", _reflected(getattr(operator, _name)))
