"""Finds parameters of which replicas, that must have the same, have different copies.

A checksum of the bits of all of them is compared now and then (`check_copies_every`). Only if it differs are
values looked at: what different orders of summation make is put right, anything more is a `DriftError`.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from stratagem.collectives.collective import Collective
from stratagem.errors import DriftError
from stratagem.variables.aggregation import bits_of
from stratagem.variables.ledger import gather_numbers
from stratagem.variables.written import are_alike

_PIECE: Final = 2**20  # elements that are added up at a time: bounds the memory that this takes
_FACTOR: Final = 1_000_003
_QUARTER_BITS: Final = 16  # of a checksum, which has four: as much as any float holds as it is
_NUM_QUARTERS: Final = 4
_MAX_NAMED: Final = 3

Labelled = Sequence[tuple[str, torch.Tensor | None]]
"""Parameters with their labels, in one order for all replicas; `None` for those that the program has dropped."""


def checksum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A number for the bits of some tensors, on a device; the host waits for nothing."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for piece in _pieces(tensors):
        # Another factor for each element, and odd: whichever of them changes, the sum does.
        factors = torch.arange(1, 2 * piece.numel(), 2, device=piece.device)
        total = total * _FACTOR + (piece.to(torch.int64) * factors).sum().to(device)
    return total


def row_for_all(number: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A checksum as a row of floats, with zeros in the places of other replicas: the sum of all rows has all."""
    quarters, rest = [], number
    for _ in range(_NUM_QUARTERS):
        higher = rest >> _QUARTER_BITS
        quarters.append(rest - (higher << _QUARTER_BITS))
        rest = higher
    row = torch.zeros(size, _NUM_QUARTERS, device=number.device)
    row[rank] = torch.stack(quarters).float()
    return row.view(-1)


def differ_in(row: torch.Tensor) -> torch.Tensor:
    """Whether the sum of the rows of all replicas has different checksums; where it is."""
    rows = row.view(-1, _NUM_QUARTERS)
    return (rows != rows[0]).any()


@torch.no_grad()
def settle(parameters: Labelled, collective: Collective, step: int, who: str = "replica") -> None:
    """Gives all replicas what the first has, where they differ by rounding only; every one must come here.

    Args:
        parameters: What is compared.
        collective: How those who compare exchange tensors.
        step: After which step.
        who: What they are called.
    Raises:
        DriftError: They differ by more; in all of them.
    """
    own = [None if each is None else int(checksum([each], each.device)) for _, each in parameters]
    here = gather_numbers(collective, [each is not None for each in own]).amin(dim=0).tolist()
    sums = gather_numbers(collective, [each or 0 for each in own]).T.tolist()
    suspects = [number for number, row in enumerate(sums) if here[number] and len(set(row)) > 1]
    found: dict[int, list[float]] = {}
    for number in suspects:
        parameter = parameters[number][1]
        if parameter is None:
            raise RuntimeError("a parameter that is there in all replicas is there in this one")
        now = parameter.detach().cpu()
        theirs = collective.broadcast(now, 0)
        far = 0.0 if bool(are_alike(now, theirs).all()) else difference(now, theirs)
        apart = [float(each) for each in collective.all_gather(torch.tensor([far], dtype=torch.float64))]
        if any(apart):
            found[number] = apart
        elif collective.rank:
            parameter.copy_(theirs)
    if found:
        raise DriftError(_words([(parameters[number][0], apart) for number, apart in found.items()], who, step))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far two tensors are apart, as a part of the largest value of the other; infinite where one is no number."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    far = (first - second).abs().masked_fill(first.isnan() & second.isnan() | (first == second), 0.0)
    size = second.abs().nan_to_num(posinf=0.0).max()
    return float((far.max() / size).nan_to_num(nan=torch.inf, posinf=torch.inf))


def _words(found: Sequence[tuple[str, list[float]]], who: str, step: int) -> str:
    """Names the parameter that is the farthest apart, where it is, and what to do."""
    label, apart = max(found, key=lambda each: max(each[1]))
    others = [rank for rank, far in enumerate(apart) if far]
    named = ", ".join(str(each) for each in others[:_MAX_NAMED]) + " and others" * (len(others) > _MAX_NAMED)
    more = f", and so have {len(found) - 1} more parameters" if len(found) > 1 else ""
    return (
        f"copies of parameters must be the same in all replicas, and those of {label!r} have drifted apart by step "
        f"{step}: {who}{'s' * (len(others) > 1)} {named} and {who} 0 differ by {max(apart):.1e} of the largest value"
        f"{more}. Change weights alike in all replicas: by gradients, by what all_reduce gives, or with "
        f"a torch.Generator of the same seed in all, and never by a replica's own loss, rows or random numbers. "
        f"check_copies_every=0 ends these comparisons"
    )


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The bits of tensors: those of small ones together, those of large ones in parts."""
    waiting: list[torch.Tensor] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        bits = bits_of(tensor.detach()).view(-1)
        if waiting and (
            (waiting[0].dtype, waiting[0].device) != (bits.dtype, bits.device)
            or sum(each.numel() for each in waiting) + bits.numel() > _PIECE
        ):
            yield torch.cat(waiting)
            waiting = []
        if bits.numel() > _PIECE:
            yield from torch.split(bits, _PIECE)
        else:
            waiting.append(bits)
    if waiting:
        yield torch.cat(waiting)
