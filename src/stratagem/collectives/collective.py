"""What every collective does, whatever carries the tensors.

Every replica calls the same operation in the same order with tensors of the same type and shape
(`all_gather`: of any shape). The result is new, the argument is left as it was, and the order of
summation is that of the replicas.
"""

import cmath
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import torch

from stratagem.errors import CollectiveError

OPERATIONS: Final = ("sum", "mean", "max", "min")

# What torch cannot add or compare, or only with a loss, is combined as a wider type.
_WIDER: Final = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,  # sums wrap around to the same bits
}
_AS_BITS: Final = (torch.uint64,)  # compared by its bits
_SIGN_BIT: Final = -(2**63)
_SHAPE: Final = " with shape "


class MismatchError(CollectiveError):
    """Replicas do not take part in the same exchange."""


class Collective(ABC):
    """How one replica exchanges tensors with the others.

    Args:
        rank: Which replica this is.
        size: How many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The sum, mean, max or min over all replicas, for each."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """The tensor of one replica, for each; the others give one of the same type and shape."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all replicas, which may differ in shape."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every replica has called it."""

    @abstractmethod
    def close(self) -> None:
        """Gives up what it holds."""

    def reduce(self, tensor: torch.Tensor, op: str = "sum", root: int = 0) -> torch.Tensor | None:
        """The sum, mean, max or min over all replicas, for one of them; `None` for the others."""
        check_root(root, self.size)
        total = self.all_reduce(tensor, op)
        return total if self.rank == root else None

    def sum_as(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum over all replicas of a tensor that travels as a type, for each in its own type."""
        return self.all_reduce(tensor.to(dtype)).to(tensor.dtype)

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """This replica's part, along the first axis, of the sum, mean, max or min over all."""
        if tensor.dim() == 0 or tensor.shape[0] % self.size:
            raise CollectiveError(
                f"reduce_scatter divides the first axis over {self.size} replicas, got shape {tuple(tensor.shape)}; "
                f"give a multiple of {self.size}"
            )
        return self.all_reduce(tensor, op).chunk(self.size)[self.rank].clone()


def check_operation(tensor: torch.Tensor, op: str) -> None:
    """Refuses an operation that does not exist, or not for this type."""
    if op not in OPERATIONS:
        raise CollectiveError(f"no reduction named {op!r}; known: {', '.join(OPERATIONS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CollectiveError(f"cannot average {tensor.dtype}; convert it to a float first, or use 'sum'")
    if op in ("max", "min") and tensor.is_complex():
        raise CollectiveError(f"{tensor.dtype} has no {op}; reduce its real and imaginary parts, or its absolute value")


def check_root(root: int, size: int) -> None:
    """Refuses a replica that does not exist."""
    if not 0 <= root < size:
        raise CollectiveError(f"no replica {root!r} to be the root; there are replicas 0 to {size - 1}")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in one row, without its history; a view where that is possible."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        form = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CollectiveError(f"replicas exchange dense tensors, got a {form} one; convert it first")
    row = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A single element counts as contiguous whatever its stride, but does not view as bytes then.
    return row if row.stride() == (1,) else row.as_strided(row.shape, (1,))


def describe_call(call: str, tensor: torch.Tensor | None = None) -> str:
    """One line on what a replica is about to do, for the others to compare with what they do."""
    if tensor is None:
        return call
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{call} of {str(tensor.dtype).removeprefix('torch.')}{where}{_SHAPE}{tuple(tensor.shape)}"


def check_calls(
    calls: Sequence[str], *, any_shape: bool = False, name: Callable[[int], str] = "replica {}".format
) -> None:
    """Makes sure that all replicas do the same to tensors of the same type and shape.

    Args:
        calls: What each does.
        any_shape: Whether shapes may differ.
        name: What to call them in errors.

    Raises:
        MismatchError: They do not; it says what two of them do.
    """
    for rank, call in enumerate(calls):
        if _key(call, any_shape) != _key(calls[0], any_shape):
            raise MismatchError(
                f"{name(0)} and {name(rank)} do not take part in the same exchange: {name(0)} called {calls[0]}, "
                f"{name(rank)} called {call}; all have to make the same calls in the same order"
            )


def shapes_of(calls: Sequence[str]) -> list[tuple[int, ...]]:
    """The shapes that the lines of `describe_call` tell."""
    texts = [call.rpartition(_SHAPE)[2].strip("()") for call in calls]
    return [tuple(int(each) for each in text.split(",") if each) for text in texts]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type in which it is combined; where that is its own, as it is."""
    return tensor if tensor.dtype in _AS_BITS else tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def combine(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of equal tensors, in order; low precision is summed in float32."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        stacked = torch.stack(list(parts))
        return stacked.all(dim=0) if op == "min" else stacked.any(dim=0)
    if op in ("max", "min"):
        if dtype == torch.uint64:
            # Without its first bit turned over, a large number would compare as a negative one.
            signed = [part.view(torch.int64) ^ _SIGN_BIT for part in parts]
            return (combine(signed, op) ^ _SIGN_BIT).view(dtype)
        stacked = torch.stack([part.to(_WIDER.get(dtype, dtype)) for part in parts])
        return (stacked.amax(dim=0) if op == "max" else stacked.amin(dim=0)).to(dtype)
    total = parts[0].to(_WIDER.get(dtype, dtype), copy=True)
    for part in parts[1:]:
        total.add_(part.to(total.dtype))
    if op == "mean":
        total.div_(len(parts))
    return total.to(dtype)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are.

    One number shows for many whether any is not; only then (a sum may also be too large) is it worth ten times as
    long to look at each.
    """
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8, which torch cannot add
    return cmath.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def _key(call: str, any_shape: bool) -> str:
    return call.rpartition(_SHAPE)[0] if any_shape and _SHAPE in call else call
