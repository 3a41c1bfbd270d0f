"""Tensors as they travel between tasks: a header that is checked, and bytes beside it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, cast, final

import torch

from stratagem import _dtypes
from stratagem.errors import ProtocolError, SessionError
from stratagem.graphs.nodes import Size

MOST_BYTES: Final = 2**36
_MOST_DIMENSIONS: Final = 64


@final
class PartSizes:
    """The sizes of a graph that a part refers to, each once."""

    def __init__(self, size_of: Callable[[Any], Size]) -> None:
        self._size_of = size_of
        self.found: dict[Size, int] = {}

    def refer_to(self, size: Any) -> dict[str, int]:
        """What stands for a size, or for a symbol of the graph, in a description."""
        known = size if isinstance(size, Size) else self._size_of(size)
        return {"size": self.found.setdefault(known, len(self.found))}


def header_of(tensor: torch.Tensor, sizes: "PartSizes | None" = None) -> dict[str, Any]:
    """The type and shape of a tensor; an unknown size as the number that goes with each run."""
    if why := _dtypes.why_not_sent(tensor.dtype):
        raise SessionError(why)
    shape = [each if sizes is None or type(each) is int else sizes.refer_to(each) for each in tensor.shape]
    return {"dtype": _dtypes.name_of(tensor.dtype), "shape": shape}


def empty_of(header: Any, device: str = "cpu", numbers: Sequence[int | float] = ()) -> torch.Tensor:
    """A tensor without values that has the type and shape of a header.

    Args:
        header: What came.
        device: Where it is made.
        numbers: The unknown sizes.

    Raises:
        ProtocolError: It is no header, or one of a tensor that is too large.
    """
    if not isinstance(header, dict) or header.keys() != {"dtype", "shape"} or not isinstance(header["shape"], list):
        refuse("the header of a tensor")
    shape = [_size(each, numbers) for each in header["shape"]]
    dtype = _dtypes.DTYPES.get(header["dtype"]) if isinstance(header["dtype"], str) else None
    if not _is_shape(shape) or dtype is None or math.prod(shape) * dtype.itemsize > MOST_BYTES:
        refuse("the type or size of a tensor")
    return torch.empty(shape, dtype=dtype, device=device)


def _size(size: Any, numbers: Sequence[int | float]) -> Any:
    """A size, or the number that it refers to."""
    match size:
        case {"size": int(number), **rest} if not rest and 0 <= number < len(numbers):
            return numbers[number]
    return size


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the memory of the host; of one that is contiguous, without a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())) if flat.numel() else memoryview(b"")


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= _MOST_DIMENSIONS
        and all(type(each) is int and 0 <= each < 2**48 for each in shape)
    )


def require(holds: bool, what: str) -> None:
    """Refuses what does not hold."""
    if not holds:
        refuse(what)


def refuse(what: str) -> NoReturn:
    """Raises the error of something that came and breaks a rule."""
    raise ProtocolError(f"{what} is not what it may be")
