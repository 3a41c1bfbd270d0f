"""How the values that replicas have of one variable become one; `sg.aggregate` chooses it for a buffer."""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

import torch

from stratagem.collectives.collective import Collective
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


def join_in_one_sum(
    sum_up: Callable[[torch.Tensor], torch.Tensor],
    means: Sequence[tuple[torch.Tensor, torch.Tensor]],
    firsts: Sequence[torch.Tensor],
    share: float,
    is_first: bool,
) -> None:
    """Gives buffers the value of all replicas, in place, without a look at any; every one must come here.

    The same as `joined` and `with_infinite_left_out`, for devices that the host had better not wait for.

    Args:
        sum_up: Sums a flat tensor over the replicas.
        means: Buffers that become the mean, each with what all had.
        firsts: Those that become what the first replica with examples has.
        share: The weight of this replica in a mean; 0 if it has no examples.
        is_first: Whether it is that first one.
    """
    numbers = [*_numbers_of_means(means, share), *_numbers_of_firsts(firsts, is_first)]
    parts = iter(torch.split(sum_up(torch.cat(numbers)), [each.numel() for each in numbers]))
    if means:
        finite, weight, infinite, changes = (next(parts) for _ in range(4))
        mean = torch.where((infinite != 0) & (weight > 0), finite / weight, finite + infinite)
        before = _flat_doubles(before for _, before in means)
        _give_out(torch.where(changes == 0, before, mean), [now for now, _ in means])
    for each in firsts:
        high, low = next(parts).to(torch.int64), next(parts).to(torch.int64)
        bits = _bits_of(each)
        whole = (high * 2**_HALF_BITS + low).to(bits.dtype).view(bits.shape)
        each.copy_(torch.view_as_complex(_seen_as(whole, each)) if each.is_complex() else _seen_as(whole, each))


def _numbers_of_means(means: Sequence[tuple[torch.Tensor, torch.Tensor]], share: float) -> list[torch.Tensor]:
    """What is finite, its weight, what is not, and where anything has changed: what nobody changed keeps its bits."""
    if not means:
        return []
    now, before = _flat_doubles(each for each, _ in means), _flat_doubles(each for _, each in means)
    if not share:
        return [torch.zeros_like(now)] * 4
    is_infinite = now.isinf()
    changed = (now != before) & ~(now.isnan() & before.isnan())
    finite, infinite = now.masked_fill(is_infinite, 0.0), now.masked_fill(~is_infinite, 0.0)
    return [finite * share, (~is_infinite).double() * share, infinite, changed.double()]


def _numbers_of_firsts(firsts: Sequence[torch.Tensor], is_first: bool) -> list[torch.Tensor]:
    """The bits of values in two halves, each of which a float64 holds as it is; zeros in all replicas but the first."""
    numbers = []
    for each in firsts:
        bits = _bits_of(each).reshape(-1).to(torch.int64)
        high = bits >> _HALF_BITS
        halves = [high, bits - high * 2**_HALF_BITS]
        numbers += [half.double() if is_first else torch.zeros_like(half, dtype=torch.float64) for half in halves]
    return numbers


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_BITS[real.itemsize])


def _seen_as(bits: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return bits.view(like.dtype.to_real() if like.is_complex() else like.dtype)


def _flat_doubles(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in tensors]).double()


def _give_out(row: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    for each, part in zip(targets, torch.split(row, [each.numel() for each in targets]), strict=True):
        each.copy_(part.view(each.shape))


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
