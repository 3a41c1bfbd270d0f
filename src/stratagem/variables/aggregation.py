"""How the values that replicas have of one variable become one; `sg.aggregate` chooses it for a buffer."""

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, final

import torch

from stratagem.collectives.collective import Collective, combine
from stratagem.collectives.differentiable import neutral
from stratagem.errors import StrategyError
from stratagem.variables.buffers import Held, held_by


@final
class Aggregation(enum.StrEnum):
    """How the values of all replicas become one."""

    SUM = "sum"  # the value before, and the changes of all
    MEAN = "mean"  # by the rows of each replica
    MIN = "min"
    MAX = "max"
    FIRST = "first"  # that of the first replica with examples: replica 0, but for batches of few rows


# Counters and metrics: those of all also while replicas train alone.
COUNTED: Final = (Aggregation.SUM, Aggregation.MIN, Aggregation.MAX)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_HALF_BITS: Final = 32
_CHOSEN: Final = "_stratagem_aggregations"  # of a module: texts, which travel with it
_EXTREMES: Final = {"min_val": Aggregation.MIN, "max_val": Aggregation.MAX}
# Modules of torch's whose buffers are no means; their subclasses too.
_KNOWN: Final = {
    "torch.ao.quantization.observer.MinMaxObserver": _EXTREMES,
    "torch.ao.quantization.observer.PerChannelMinMaxObserver": _EXTREMES,
}


def aggregate(module: torch.nn.Module, name: str, how: str) -> None:
    """Says how the replicas' values of a buffer become one value at the end of each step.

    Without it, a buffer of floats becomes the mean over all rows, and any other buffer takes the value of the first
    replica with rows.

    Args:
        module: A module, before or after it is distributed.
        name: The name of a buffer in it: `"stats.num_rows"`.
        how: `"sum"`: the value before the step plus the changes of all replicas, for counters. `"mean"`, `"min"` or
            `"max"` of the values. `"first"`: the value of the first replica with rows.
    Raises:
        StrategyError: There is no such buffer, or its type has no such aggregation.
    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> model.register_buffer("num_rows", torch.tensor(0))
        >>> aggregate(model, "num_rows", "sum")
    """
    path, _, key = name.rpartition(".")
    owner = dict(module.named_modules()).get(path)
    buffer = dict(owner.named_buffers(recurse=False)).get(key) if owner is not None else None
    if owner is None or buffer is None:
        known = ", ".join(each for each, _ in module.named_buffers()) or "none"
        raise StrategyError(f"{type(module).__name__} has no buffer {name!r} to aggregate; its buffers: {known}")
    if how not in list(Aggregation):
        raise StrategyError(f"no aggregation named {how!r} for {name!r}; known: {', '.join(Aggregation)}")
    is_number = buffer.is_floating_point() or buffer.is_complex()
    if (how == "mean" and not is_number) or (how in ("min", "max") and buffer.is_complex()):
        raise StrategyError(f"{name!r} is {buffer.dtype}, which has no {how}; use 'sum' or 'first', or another dtype")
    others = [each for each in getattr(owner, _CHOSEN, ()) if not each.startswith(f"{key}=")]
    setattr(owner, _CHOSEN, (*others, f"{key}={how}"))


def chosen_in(held: Iterable[Held]) -> dict[int, Aggregation]:
    """How buffers are joined that modules hold, by `id`, where that is not as their type says."""
    found = {}
    for module, key, buffer in held:
        own = module.__dict__.get(_CHOSEN, ())
        how = next((each.partition("=")[2] for each in own if each.startswith(f"{key}=")), None)
        if how is not None:
            found[id(buffer)] = Aggregation(how)
        elif key in _EXTREMES and (known := _of_class(type(module))):
            found[id(buffer)] = known[key]
    return found


def is_chosen(module: torch.nn.Module) -> bool:
    """Whether a module or one in it has a buffer of which a program has said how it is joined."""
    return any(_CHOSEN in each.__dict__ for each in module.modules())


def is_agreed_on(module: torch.nn.Module) -> bool:
    """Whether replicas that train alone have the same in a module after each step, as in a metric."""
    if next(module.parameters(), None) is not None:
        return False
    held = held_by(module.modules())
    chosen = chosen_in(held)
    return bool(held) and all(chosen.get(id(buffer)) in COUNTED for _, _, buffer in held)


def _of_class(kind: type) -> dict[str, Aggregation]:
    names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
    return next((_KNOWN[name] for name in names if name in _KNOWN), {})


def default_of(dtype: torch.dtype) -> Aggregation:
    """How buffers of a type are joined."""
    return Aggregation.MEAN if dtype.is_floating_point else Aggregation.FIRST


def joined(
    collective: Collective, how: Aggregation, before: torch.Tensor, now: torch.Tensor, share: float, first: int
) -> torch.Tensor:
    """The value of all replicas; every one must come here.

    Args:
        collective: How they exchange tensors.
        how: Which.
        before: What all had.
        now: What this one has.
        share: Its weight in a mean; 0 if it has no examples, so that what it has counts for nothing.
        first: The first replica with examples.
    """
    if how is Aggregation.SUM:
        now = now if share else before
        if before.is_complex():
            return before + collective.all_reduce(now - before)
        wide = torch.float64 if before.is_floating_point() else torch.int64
        return (before.to(wide) + collective.all_reduce(_change(before, now, wide))).to(before.dtype)
    if how in (Aggregation.MIN, Aggregation.MAX):
        return collective.all_reduce(now if share else neutral(now, how), how)
    if how is Aggregation.MEAN:
        # The change is averaged, not the value: what nobody changed stays as it is to the last bit.
        change = _change(before, now, torch.float64)
        result = before.double() + collective.all_reduce(change * share if share else torch.zeros_like(change))
        return with_infinite_left_out(collective, result, now, share, before.isinf() & (result != before))
    return collective.broadcast(now, first)


class Joining(NamedTuple):
    """One replica, as it takes part in a sum that joins buffers.

    Attributes:
        rank: Its number.
        size: How many there are.
        share: Its weight in a mean; 0 if it has no examples, so that what it has counts for nothing.
        is_first: Whether it is the first with examples.
    """

    rank: int
    size: int
    share: float
    is_first: bool


Buffer = tuple[torch.Tensor, torch.Tensor]
"""A buffer, and what all had in it."""


def join_in_one_sum(
    sum_up: Callable[[torch.Tensor], torch.Tensor], buffers: Mapping[Aggregation, Sequence[Buffer]], replica: Joining
) -> None:
    """Gives buffers the value of all replicas, in place, without a look at any; every one must come here.

    The same as `joined` and `with_infinite_left_out`, for devices that the host had better not wait for.

    Args:
        sum_up: Sums a flat tensor over the replicas.
        buffers: Which become what.
        replica: This one.
    """
    parts: list[_JoinedPart] = (
        [_JoinedMeans(buffers[Aggregation.MEAN], replica.share)] if buffers.get(Aggregation.MEAN) else []
    )
    parts += [
        _KINDS[how](buffer, replica, how)
        for how, of_kind in buffers.items()
        if how is not Aggregation.MEAN
        for buffer in of_kind
    ]
    rows = [row for part in parts for row in part.rows]
    sums = iter(torch.split(sum_up(torch.cat(rows)), [each.numel() for each in rows]))
    for part in parts:
        part.take(*itertools.islice(sums, len(part.rows)))


class _JoinedPart(Protocol):
    """Some buffers in a sum of rows of float64.

    Attributes:
        rows: What this replica adds.
    """

    rows: list[torch.Tensor]

    def take(self, *sums: torch.Tensor) -> None:
        """Gives the buffers what came of it."""


@final
class _JoinedMeans:
    """What is finite, its weight, what is not, and where anything has changed: what nobody changed keeps its bits."""

    def __init__(self, buffers: Sequence[Buffer], share: float) -> None:
        self._buffers = buffers
        now, self._before = _flat_doubles(each for each, _ in buffers), _flat_doubles(each for _, each in buffers)
        if not share:
            self.rows = [torch.zeros_like(now)] * 4
            return
        is_infinite = now.isinf()
        changed = (now != self._before) & ~(now.isnan() & self._before.isnan())
        finite, infinite = now.masked_fill(is_infinite, 0.0), now.masked_fill(~is_infinite, 0.0)
        self.rows = [finite * share, (~is_infinite).double() * share, infinite, changed.double()]

    def take(self, *sums: torch.Tensor) -> None:
        finite, weight, infinite, changes = sums
        mean = torch.where((infinite != 0) & (weight > 0), finite / weight, finite + infinite)
        targets = [now for now, _ in self._buffers]
        parts = torch.split(torch.where(changes == 0, self._before, mean), [each.numel() for each in targets])
        for each, part in zip(targets, parts, strict=True):
            each.copy_(part.view(each.shape))


@final
class _JoinedFirst:
    """The bits of one replica's values; zeros in the others."""

    def __init__(self, buffer: Buffer, replica: Joining, how: Aggregation) -> None:
        self._now, _ = buffer
        halves = _halves(bits_of(self._now).reshape(-1).to(torch.int64))
        self.rows = halves if replica.is_first else [torch.zeros_like(half) for half in halves]

    def take(self, *sums: torch.Tensor) -> None:
        self._now.copy_(_with_bits(_whole(*sums), self._now))


@final
class _JoinedSum:
    """What each replica has added to what all had; whole numbers as halves, whose sums are exact."""

    def __init__(self, buffer: Buffer, replica: Joining, how: Aggregation) -> None:
        self._now, self._before = buffer
        self._is_number = self._now.is_floating_point() or self._now.is_complex()
        before, now = self._seen(self._before, self._now)
        change = _change(before, now, torch.float64 if self._is_number else torch.int64)
        change = (change if replica.share else torch.zeros_like(change)).reshape(-1)
        self.rows = [change] if self._is_number else _halves(change)

    def take(self, *sums: torch.Tensor) -> None:
        total = sums[0] if self._is_number else _whole(*sums)
        before, now = self._seen(self._before, self._now)
        now.copy_((before.to(total.dtype) + total.view(before.shape)).to(now.dtype))

    @staticmethod
    def _seen(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]


@final
class _JoinedExtreme:
    """The bits of every replica's values, each in its own place; what is wanted of them each finds itself."""

    def __init__(self, buffer: Buffer, replica: Joining, how: Aggregation) -> None:
        self._now, self._how, self._size = buffer[0], how, replica.size
        own = self._now if replica.share else neutral(self._now, how)
        halves = _halves(bits_of(own).reshape(-1).to(torch.int64))
        self.rows = [torch.zeros(replica.size, half.numel(), dtype=half.dtype, device=half.device) for half in halves]
        for row, half in zip(self.rows, halves, strict=True):
            row[replica.rank] = half
        self.rows = [row.view(-1) for row in self.rows]

    def take(self, *sums: torch.Tensor) -> None:
        everyones = _whole(*sums).view(self._size, -1)
        self._now.copy_(combine([_with_bits(each, self._now) for each in everyones], self._how))


_KINDS: Final[Mapping[Aggregation, Callable[[Buffer, Joining, Aggregation], _JoinedPart]]] = {
    Aggregation.FIRST: _JoinedFirst,
    Aggregation.SUM: _JoinedSum,
    Aggregation.MIN: _JoinedExtreme,
    Aggregation.MAX: _JoinedExtreme,
}


def _halves(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Whole numbers in two halves, each of which a float64 holds as it is."""
    high = numbers >> _HALF_BITS
    return [high.double(), (numbers - high * 2**_HALF_BITS).double()]


def _whole(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    upper: torch.Tensor = high.to(torch.int64) * 2**_HALF_BITS
    return upper + low.to(torch.int64)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor's values, one after the other, as whole numbers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_BITS[real.itemsize])


def _with_bits(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What has these bits, in the form of a tensor."""
    bits = bits_of(like)
    whole = numbers.to(bits.dtype).view(bits.shape)
    seen: torch.Tensor = whole.view(like.dtype.to_real() if like.is_complex() else like.dtype)
    return torch.view_as_complex(seen) if like.is_complex() else seen


def _flat_doubles(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in tensors]).double()


def with_infinite_left_out(
    collective: Collective, result: torch.Tensor, now: torch.Tensor, share: float, odd: torch.Tensor
) -> torch.Tensor:
    """A mean in which values that are infinite, as a running minimum is before its first row, do not count.

    Args:
        collective: How replicas exchange tensors.
        result: The mean of all.
        now: What this replica has.
        share: Its weight.
        odd: Where to look; the same in all replicas.
    """
    if not odd.any():
        return result
    counts = ~now.isinf() if share else torch.zeros_like(odd)
    own = torch.stack([counts.double(), now.double().masked_fill(~counts, 0.0)]) * share
    weight, total = collective.all_reduce(own)
    return torch.where(odd & (weight > 0), total / weight, result)


def _change(before: torch.Tensor, now: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What was added; nothing where a value that is not finite has stayed."""
    one, other = before.to(dtype), now.to(dtype)
    return (other - one).masked_fill_((one == other) | (one.isnan() & other.isnan()), 0)
