"""Values that differ from replica to replica, and how results of a run come to the controller.

Small results travel with the answer; large tensors stay in their replica until somebody asks.
"""

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import numpy as np
import torch

from stratagem import _torch, _tree
from stratagem.errors import StrategyError
from stratagem.processes.packing import Raw

_INLINE_BYTES = 64 * 1024


@final
class Remote:
    """A tensor that is still in its replica."""

    def __init__(self, number: int) -> None:
        self.number = number


class Deferred(ABC):
    """A value that its replica makes itself when a run needs it: data that is loaded where it is used."""

    @abstractmethod
    def load(self) -> Any:
        """The value, in the replica."""


def load_deferred(value: Any) -> Any:
    """A nesting of values with everything loaded that the replica makes itself."""
    return _tree.map(lambda each: each.load() if isinstance(each, Deferred) else each, value)


@final
class PerReplica:
    """One value for each replica; `values` gives them, in the order of the replicas.

    Args:
        values: The values, or functions that fetch them.
        counts: How many examples each replica had, if the values came from a distributed batch.
    """

    def __init__(self, values: Sequence[Any], counts: tuple[int, ...] | None = None) -> None:
        self._values = list(values)
        self.counts = counts

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of all replicas, fetched now if they are not here yet."""
        return tuple(self[replica] for replica in range(len(self)))

    def __getitem__(self, replica: int) -> Any:
        value = self._values[replica]
        if isinstance(value, _Later):
            value = self._values[replica] = value.fetch()
        return value

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # whoever asks only looks whether there is one
        raise _refusal(self, f".{name}")

    def __format__(self, form: str) -> str:
        if form:
            raise _refusal(self, f"format {form!r}")
        return repr(self)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(self, "numpy")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _refusal(None, f"torch's {getattr(function, '__name__', function)}")

    def __repr__(self) -> str:
        inside = ", ".join("..." if isinstance(each, _Later) else repr(each) for each in self._values)
        return f"PerReplica({inside})"


class _SeveralValuesError(StrategyError, TypeError, AttributeError):
    """The values of all replicas were used as if they were one."""


def _refusal(value: PerReplica | None, what: str) -> _SeveralValuesError:
    number = "all" if value is None else str(len(value))
    return _SeveralValuesError(
        f"{what} was asked of a PerReplica, which has the values of {number} replicas; make it one value with "
        f"strategy.reduce('mean', value), take them with strategy.local_results(value), or compute with it inside the "
        f"function of strategy.run"
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: PerReplica, *_: object) -> NoReturn:
        raise _refusal(self, name.strip("_"))

    return refuse


for _name in (
    *("float", "int", "complex", "index", "neg", "pos", "abs", "invert", "round", "lt", "le", "gt", "ge"),
    *(
        side + name
        for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
        for side in ("", "r", "i")
    ),
):
    setattr(PerReplica, f"__{_name}__", _refusing(_name))


@final
class _Later:
    def __init__(self, fetch: Callable[[], Any], forget: Callable[[], None]) -> None:
        self._fetch = fetch
        self._forget = weakref.finalize(self, forget)

    def fetch(self) -> Any:
        self._forget.detach()
        return self._fetch()


def pack_result(result: Any, kept: Any) -> Any:
    """Prepares what a replica's function returned for its way: large tensors stay."""

    def pack(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = _as_it_is_now(value)
        if value.nbytes <= _INLINE_BYTES:
            return Raw(value) if _is_ordinary(value) else value
        kept.next_number += 1
        kept.values[kept.next_number] = value
        return Remote(kept.next_number)

    return _tree.map(pack, result)


def join_results(
    results: Sequence[Any],
    counts: tuple[int, ...] | None,
    fetch: Callable[[int, int], Any],
    forget: Callable[[tuple[int, int]], None] = lambda _: None,
) -> Any:
    """Turns the results of all replicas, of equal structure, into one structure of per-replica values.

    Args:
        results: What each replica returned, packed.
        counts: How many examples each replica had.
        fetch: Brings a value that stayed in its replica, by rank and number.
        forget: Told of a value that nobody will ask for any more, likewise; lives as long as the value.
    """
    own = _tree.map(_kept, results[0])
    flat = [_tree.flatten(result) for result in (own, *results[1:])]
    for rank, (_, structure) in enumerate(flat):
        if structure != flat[0][1]:
            raise StrategyError(
                f"replica 0 returned {_outline(results[0])}, replica {rank} returned {_outline(results[rank])}; "
                f"return the same structure in every replica"
            )

    def later(rank: int, number: int) -> _Later:
        return _Later(functools.partial(fetch, rank, number), functools.partial(forget, (rank, number)))

    def leaf(values: tuple[Any, ...]) -> PerReplica:
        held = [later(rank, value.number) if isinstance(value, Remote) else value for rank, value in enumerate(values)]
        return PerReplica(held, counts)

    leaves = [leaf(values) for values in zip(*(leaves for leaves, _ in flat), strict=True)]
    return _tree.unflatten(leaves, flat[0][1])


def select(value: Any, replica: int, *, sent: bool = False) -> Any:
    """The part of a nesting of values that one replica gets.

    Args:
        value: The nesting.
        replica: Which replica.
        sent: Whether its tensors are to be sent there: each is then on its own, without the others' memory.
    """

    def part(each: Any) -> Any:
        if not isinstance(each, PerReplica):
            return each
        own = each[replica]
        return Raw(own) if sent and isinstance(own, torch.Tensor) and _is_ordinary(own) else own

    return _tree.map(part, value)


def copied(value: Any, is_reference: Callable[[Any], bool]) -> Any:
    """A nesting of what is to be sent, as it is now: a program may fill the same tensors and arrays anew.

    Args:
        value: What `select` gave.
        is_reference: Whether an object travels as a reference, and is not copied.
    """

    def copy(each: Any) -> Any:
        if is_reference(each):
            return each
        if type(each) is Raw:
            return Raw(each.tensor.clone())
        if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter):
            return each.detach().clone().requires_grad_(each.requires_grad)
        return each.copy() if isinstance(each, np.ndarray) else each

    return _tree.map(copy, value)


def counts_of(*values: Any) -> tuple[int, ...] | None:
    """How many examples each replica has in the distributed batch among some values, if there is one."""
    return next((each.counts for each in _tree.leaves(values) if isinstance(each, PerReplica) and each.counts), None)


def reduce(op: str, value: PerReplica, *, weighted: bool) -> Any:
    """One value of all: replicas without examples count for nothing."""
    require_op(op)
    counts = value.counts or (1,) * len(value)
    tensors = as_tensors(f"reduce({op!r})", value)
    tensors = [each for each, count in zip(tensors, counts, strict=True) if count > 0]
    if not tensors:
        return torch.as_tensor(float("nan"))
    if len({each.shape for each in tensors}) > 1:
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        raise StrategyError(f"reduce needs tensors of one shape, replicas returned {shapes}; use gather to join them")
    weights = [count if weighted else 1 for count in counts if count > 0]
    if op == "mean" and all(each.dim() == 0 and each.dtype == torch.float32 for each in tensors):
        # A loss, of every step: numbers are quicker than tensors.
        total = sum(weights)
        numbers = [each.item() * (weight / total) for each, weight in zip(tensors, weights, strict=True)]
        return torch.tensor(sum(numbers), dtype=torch.float32)
    stacked = torch.stack(tensors)
    if op == "sum":
        return stacked.sum(dim=0)
    if op != "mean":
        return stacked.amax(dim=0) if op == "max" else stacked.amin(dim=0)
    parts = torch.tensor(weights, dtype=torch.float64)
    wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
    mean = (wide * (parts / parts.sum()).view(-1, *[1] * (stacked.dim() - 1))).sum(dim=0)
    return mean.to(stacked.dtype) if stacked.is_floating_point() or stacked.is_complex() else mean


def require_op(op: str) -> None:
    """Refuses reductions that there are not."""
    if op not in _OPS:
        raise StrategyError(f"no reduction named {op!r}; known: {', '.join(_OPS)}")


def gather(value: PerReplica, axis: int) -> torch.Tensor:
    """The tensors of all replicas, one after the other; single numbers become a vector."""
    tensors = as_tensors("gather", PerReplica(load_deferred(value.values)))
    return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in tensors], dim=axis)


_OPS = ("sum", "mean", "max", "min")


def as_tensors(what: str, value: PerReplica) -> list[torch.Tensor]:
    """The values of all replicas as tensors; refuses what cannot be one."""
    for each in value.values:
        if not isinstance(each, torch.Tensor | bool | int | float | complex | np.ndarray | np.generic):
            raise StrategyError(
                f"cannot {what} {type(each).__name__} {each!r}; return tensors or numbers from the function, "
                f"or take the values with local_results"
            )
    return [torch.as_tensor(each).detach().to("cpu") for each in value.values]


def _as_it_is_now(value: torch.Tensor) -> torch.Tensor:
    """A result that later runs do not change: what others hold and small tensors are copied, fresh large ones kept."""
    return value.detach().clone() if value.nbytes <= _INLINE_BYTES or _is_held_elsewhere(value) else value.detach()


def _is_held_elsewhere(value: torch.Tensor) -> bool:
    """Whether something else may write to a tensor's memory: it is a parameter, a view of one, or its `.data`."""
    if _torch.is_view(value):
        return value.is_leaf or ((base := _torch.base_of(value)) is not None and base.is_leaf)
    if not value.is_leaf or value.layout != torch.strided:
        return False
    # A tensor of its own has the only count but that of the object that is asked.
    return value.requires_grad or _torch.num_storage_users(value) > 2


def _kept(value: Any) -> Any:
    """A result of this process that later runs do not change."""
    if isinstance(value, np.ndarray):
        return value if value.base is None else value.copy()
    return _as_it_is_now(value) if isinstance(value, torch.Tensor) else value


def _is_ordinary(value: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are all that there is to a tensor."""
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.is_contiguous() and not (
        value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg()
    )


def _outline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(repr(key) for key in value) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
