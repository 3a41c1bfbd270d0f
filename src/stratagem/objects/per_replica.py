"""Values that differ from replica to replica, and how results of a run come to the controller.

Small results travel with the answer; large tensors stay in their replica until somebody asks.
"""

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import numpy as np
import torch

from stratagem import _torch, _tree
from stratagem.devices import kind_table
from stratagem.errors import PerReplicaError, StrategyError
from stratagem.processes.packing import Raw

_INLINE_BYTES = 64 * 1024

InTurn = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a block that one thread at a time is in."""


@final
class Remote:
    """A tensor that is still in its replica."""

    def __init__(self, number: int) -> None:
        self.number = number


class Deferred:
    """A value that its replica makes itself when a run needs it: data that is loaded where it is used."""

    # Not an abstract class: every argument of every run is asked whether it is one, and those answer slowly.
    def load(self) -> Any:
        """The value, in the replica."""
        raise NotImplementedError


def load_deferred(value: Any) -> Any:
    """A nesting of values with everything loaded that the replica makes itself."""
    return _tree.map_only(Deferred, _loaded, value)


def _loaded(value: Deferred) -> Any:
    return value.load()


def brought(value: Any, device: torch.device, *, computes_on: torch.device) -> Any:
    """A nesting of values with its tensors brought to a device; as it is where a replica computes on the CPU.

    Args:
        value: The nesting.
        device: Where to.
        computes_on: The device of the replica.
    """
    if computes_on.type == "cpu":
        return value
    return _tree.map_only(torch.Tensor, lambda each: _brought(each, device), value)


def _brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; on its way there the host does not wait for it, if it can be pinned."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad
    if is_plain and tensor.device.type == "cpu" and kind_table.copies_from_pinned_memory(device.type):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@final
class PerReplica:
    """One value for each replica. `values` is the tuple of them, in the order of the replicas.

    Args:
        values: The values, or functions that fetch them.
        counts: How many examples each replica had, if the values came from a distributed batch.
    Example:
        >>> PerReplica([1, 2]).values
        (1, 2)
    """

    def __init__(self, values: Sequence[Any], counts: tuple[int, ...] | None = None) -> None:
        self._values = list(values)
        self.counts = counts

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of all replicas, fetched or loaded now if they are not here yet."""
        return tuple(self[replica] for replica in range(len(self)))

    @property
    def held(self) -> tuple[Any, ...]:
        """The values that are here, without waiting for others."""
        return tuple([each for each in self._values if not isinstance(each, _Later)])

    def part(self, replica: int) -> Any:
        """What one replica is given: its value, or what it makes its value of."""
        value = self._values[replica]
        if isinstance(value, _Later):
            value = self._values[replica] = value.fetch()
        return value

    def __getitem__(self, replica: int) -> Any:
        value = self.part(replica)
        if isinstance(value, Deferred):
            value = self._values[replica] = value.load()
        return value

    def __len__(self) -> int:
        return len(self._values)

    __hash__ = object.__hash__  # it is found by what it is, in a set and as a key, whatever it holds

    def __reduce__(self) -> tuple[Any, ...]:
        return PerReplica, (self.values, self.counts)  # a copy does not wait for replicas

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


def _refusal(value: PerReplica | None, what: str) -> PerReplicaError:
    whose = "all replicas" if value is None else "1 replica" if len(value) == 1 else f"{len(value)} replicas"
    return PerReplicaError(
        f"{what} was asked of a PerReplica, which has the values of {whose}; make it one value with "
        f"strategy.reduce('mean', value), take them with strategy.local_results(value), or compute with it inside the "
        f"function of strategy.run"
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: PerReplica, *_: object) -> NoReturn:
        raise _refusal(self, name.strip("_"))

    return refuse


for _name in (
    *("float", "int", "complex", "bool", "index", "neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"),
    *("lt", "le", "gt", "ge", "eq", "ne", "contains", "divmod", "rdivmod"),
    *(
        side + name
        for name in (
            *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
            *("lshift", "rshift"),
        )
        for side in ("", "r", "i")
    ),
):
    setattr(PerReplica, f"__{_name}__", _refusing(_name))


@final
class _Later:
    def __init__(self, fetch: Callable[[], Any], forget: Callable[[], None], in_turn: InTurn) -> None:
        self._fetch = fetch
        self._forget = weakref.finalize(self, forget)
        self._in_turn = in_turn
        self._fetched: list[Any] = []

    def fetch(self) -> Any:
        # It can be fetched once. No lock of its own: a thread that has the turn would wait for one that waits for it.
        with self._in_turn():
            if not self._fetched:
                self._forget.detach()
                self._fetched.append(self._fetch())
            return self._fetched[0]


def pack_result(result: Any, kept: Any) -> Any:
    """Prepares what a replica's function returned for its way: large tensors stay."""

    def pack(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = _as_it_is_now(value)
        if not _is_plain(value) or value.nbytes <= _INLINE_BYTES:
            return Raw(value) if _is_ordinary(value) else value
        kept.next_number += 1
        kept.values[kept.next_number] = value
        return Remote(kept.next_number)

    return _tree.map(pack, result)


def kept_result(result: Any) -> Any:
    """What a function returned in this process, as later steps do not change it."""

    def keep(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value if value.base is None else value.copy()
        return _as_it_is_now(value) if isinstance(value, torch.Tensor) else value

    return _tree.map(keep, result)


def join_results(
    results: Sequence[Any],
    counts: tuple[int, ...] | None,
    fetch: Callable[[int, int], Any],
    forget: Callable[[tuple[int, int]], None] = lambda _: None,
    in_turn: InTurn = contextlib.nullcontext,
) -> Any:
    """Turns the results of all replicas, of equal structure, into one structure of per-replica values.

    Args:
        results: What each replica returned, packed (`pack_result`) or kept (`kept_result`).
        counts: How many examples each replica had.
        fetch: Brings a value that stayed in its replica, by rank and number.
        forget: Told of a value that nobody will ask for any more, likewise; lives as long as the value.
        in_turn: A block in which one thread at a time fetches.
    """
    flat = [_tree.flatten(result) for result in results]
    form = flat[0][1]
    for rank, (_, structure) in enumerate(flat):
        if structure is not form and structure != form:
            raise StrategyError(
                f"replica 0 returned {_outline(results[0])}, replica {rank} returned {_outline(results[rank])}; "
                f"return the same structure in every replica"
            )

    def later(rank: int, number: int) -> _Later:
        return _Later(functools.partial(fetch, rank, number), functools.partial(forget, (rank, number)), in_turn)

    def leaf(values: tuple[Any, ...]) -> PerReplica:
        held = [later(rank, value.number) if isinstance(value, Remote) else value for rank, value in enumerate(values)]
        return PerReplica(held, counts)

    leaves = list(map(leaf, zip(*[leaves for leaves, _ in flat], strict=True)))
    return _tree.unflatten(leaves, form)


def select(value: Any, replica: int, *, sent: bool = False) -> Any:
    """The part of a nesting of values that one replica gets.

    Args:
        value: The nesting.
        replica: Which replica.
        sent: Whether its tensors are to be sent there: each is then on its own, without the others' memory.
    """

    def part(each: PerReplica) -> Any:
        own = each.part(replica)
        return Raw(own) if sent and isinstance(own, torch.Tensor) and _is_ordinary(own) else own

    return _tree.map_only(PerReplica, part, value)


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


def counts_of(values: Sequence[Any]) -> tuple[int, ...] | None:
    """How many examples each replica has in the distributed batch among some values, if there is one."""
    return next((each.counts for each in values if isinstance(each, PerReplica) and each.counts), None)


def reduce(op: str, value: PerReplica, axis: int | None = None, *, weighted: bool) -> Any:
    """One value of all, along an axis if one is given: replicas without examples count for nothing."""
    op = require_op(op)
    if axis is not None:
        return _reduce_along(op, value, axis)
    counts = value.counts or (1,) * len(value)
    tensors = as_tensors(f"reduce({op!r})", value)
    tensors = [each for each, count in zip(tensors, counts, strict=True) if count > 0]
    if not tensors:
        return torch.as_tensor(float("nan"))
    if any(each.is_nested for each in tensors):
        raise StrategyError(
            "reduce needs tensors of one shape, replicas returned nested tensors; use gather to join them"
        )
    if len({each.shape for each in tensors}) > 1:
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        raise StrategyError(f"reduce needs tensors of one shape, replicas returned {shapes}; use gather to join them")
    weights = [count if weighted else 1 for count in counts if count > 0]
    if op == "mean" and all(each.dim() == 0 and each.dtype == torch.float32 for each in tensors):
        # A loss, of every step: numbers are quicker than tensors.
        total = sum(weights)
        numbers = [each.item() * (weight / total) for each, weight in zip(tensors, weights, strict=True)]
        return torch.tensor(sum(numbers), dtype=torch.float32)
    if any(each.is_sparse for each in tensors) and op in ("sum", "mean"):
        parts = [weight / sum(weights) if op == "mean" else 1 for weight in weights]
        return functools.reduce(operator.add, [each * part for each, part in zip(tensors, parts, strict=True)])
    stacked = torch.stack([each.to_dense() for each in tensors])
    if op in ("max", "min") and stacked.is_complex():
        raise StrategyError(f"complex numbers have no {op}, replicas returned {stacked.dtype}; reduce their abs()")
    if op == "sum":
        return stacked.sum(dim=0)
    if op != "mean":
        return stacked.amax(dim=0) if op == "max" else stacked.amin(dim=0)
    shares = torch.tensor(weights, dtype=torch.float64)
    wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
    mean = (wide * (shares / shares.sum()).view(-1, *[1] * (stacked.dim() - 1))).sum(dim=0)
    return mean.to(stacked.dtype) if stacked.is_floating_point() or stacked.is_complex() else mean


def _reduce_along(op: str, value: PerReplica, axis: int) -> torch.Tensor:
    """One value of the tensors of all replicas, joined along an axis, without that axis."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise StrategyError(f"axis is None or the number of an axis, got {axis!r}")
    whole = torch.as_tensor(gather(value, axis))
    if op == "mean" and not (whole.is_floating_point() or whole.is_complex()):
        whole = whole.double()
    if op in ("max", "min"):
        return whole.amax(axis) if op == "max" else whole.amin(axis)
    return whole.sum(axis) if op == "sum" else whole.mean(axis)


def require_op(op: str) -> str:
    """The name of a reduction, as it is known; refuses those that there are not."""
    if isinstance(op, PerReplica | torch.Tensor):
        raise StrategyError(
            f"the name of the reduction comes first, got {type(op).__name__}; write reduce('mean', value)"
        )
    name = op.lower() if isinstance(op, str) else op
    if name not in _OPS:
        raise StrategyError(f"no reduction named {op!r}; known: {', '.join(_OPS)}")
    return name


def gather(value: PerReplica, axis: int, pad: float | None = None) -> Any:
    """The tensors of all replicas with examples, one after the other; single numbers become a vector, lists a list.

    Args:
        value: Those of all replicas.
        axis: Along which they are joined.
        pad: What fills those that are shorter along another axis; an error if `None`.
    """
    own = [value[place] for place in with_examples(value)] or value.values
    if all(type(each) is list or type(each) is tuple for each in own):
        return [each for part in own for each in part]
    tensors = [as_vector(each) for each in as_tensors("gather", PerReplica(own))]
    if any(each.is_nested for each in tensors):
        return torch.nested.nested_tensor([row for each in tensors for row in each.unbind()], layout=tensors[0].layout)
    for each in tensors:
        require_axis(axis, each)
    return torch.cat(_as_wide(tensors, axis, pad), dim=axis)


def _as_wide(tensors: list[torch.Tensor], axis: int, pad: float | None) -> list[torch.Tensor]:
    """Tensors that are equally wide along all axes but one, filled up if need be."""
    num_axes = {each.dim() for each in tensors}
    joined = axis % max(num_axes)
    forms = {(*each.shape[:joined], 0, *each.shape[joined + 1 :]) for each in tensors}
    if len(forms) == 1:
        return tensors
    if len(num_axes) > 1 or pad is None:
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        raise StrategyError(
            f"gather joins tensors along axis {axis} that are alike along all others, replicas returned {shapes}; "
            + ("return as many axes in every replica" if len(num_axes) > 1 else "gather(value, pad=0) fills them up")
        )
    widest = [max(sizes) for sizes in zip(*forms, strict=True)]

    def filled(each: torch.Tensor) -> torch.Tensor:
        missing = [0 if at == joined else widest[at] - size for at, size in enumerate(each.shape)]
        ends = [number for number in reversed(missing) for number in (0, number)]
        return torch.nn.functional.pad(each, ends, value=pad)

    return [filled(each) for each in tensors]


def local_results(value: Any) -> tuple[Any, ...]:
    """What each replica with examples has of a nesting; the nesting itself where nothing in it is of several."""
    leaves = _tree.leaves(value, is_leaf=lambda each: isinstance(each, PerReplica))
    several = next((each for each in leaves if isinstance(each, PerReplica)), None)
    if several is None:
        return (value,)
    return tuple(load_deferred(select(value, place)) for place in with_examples(several))


def joined(what: str, tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Tensors of all replicas, one after the other."""
    try:
        return torch.cat(list(tensors), dim=axis)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        raise StrategyError(
            f"{what} joins tensors that differ along axis {axis} alone, replicas have {shapes}; pad them to one shape, "
            f"or exchange them one by one"
        ) from error


def as_vector(value: torch.Tensor) -> torch.Tensor:
    """A tensor that has an axis: a single number is a vector of one."""
    return value if value.dim() else value.reshape(1)


def require_axis(axis: int, value: torch.Tensor) -> None:
    """Refuses what is no axis of a tensor."""
    if type(axis) is not int or not -value.dim() <= axis < value.dim():
        raise StrategyError(
            f"axis is a whole number from {-value.dim()} to {value.dim() - 1} for shape {tuple(value.shape)}, "
            f"got {axis!r}"
        )


def with_examples(value: PerReplica) -> list[int]:
    """The places of the replicas that have examples; all where nobody knows."""
    return [place for place, count in enumerate(value.counts or (1,) * len(value)) if count]


_OPS = ("sum", "mean", "max", "min")


def as_tensors(what: str, value: PerReplica) -> list[torch.Tensor]:
    """The values of all replicas as tensors; refuses what cannot be one."""
    return [_as_tensor(what, each) for each in value.values]


def _as_tensor(what: str, value: Any) -> torch.Tensor:
    is_number = isinstance(value, torch.Tensor | bool | int | float | complex | np.ndarray | np.generic)
    try:
        made = torch.as_tensor(value).detach().to("cpu") if is_number else None
    except (TypeError, ValueError, RuntimeError):  # an array of texts, a number that no tensor holds
        made = None
    if made is None or made.is_quantized:
        raise StrategyError(
            f"cannot {what} {type(value).__name__} {value!r}; return tensors or numbers from the function, "
            f"or take the values with local_results"
        )
    return made


def _as_it_is_now(value: torch.Tensor) -> torch.Tensor:
    """A result that later runs do not change: what others hold and small tensors are copied, fresh large ones kept."""
    is_copied = not _is_plain(value) or value.nbytes <= _INLINE_BYTES or _is_held_elsewhere(value)
    return value.detach().clone() if is_copied else value.detach()


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested."""
    return value.layout == torch.strided and not value.is_nested


def _is_held_elsewhere(value: torch.Tensor) -> bool:
    """Whether something else may write to a tensor's memory: it is a parameter, a view of one, or its `.data`."""
    if _torch.tensors.is_view(value):
        return value.is_leaf or ((base := _torch.tensors.base_of(value)) is not None and base.is_leaf)
    if not value.is_leaf:
        return False
    # A tensor of its own has the only count but that of the object that is asked.
    return value.requires_grad or _torch.storages.num_storage_users(value) > 2


def _is_ordinary(value: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are all that there is to a tensor."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.is_cpu:
        return False
    return value.is_contiguous() and not (
        value.requires_grad or value.is_nested or value.is_quantized or value.is_conj() or value.is_neg()
    )


def _outline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(repr(key) for key in value) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
