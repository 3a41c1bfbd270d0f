"""The state of the random generators of this process: those of torch (on the CPU), NumPy and Python.

Owns what the state consists of, and its forms for the network and for checkpoints.
"""

import contextlib
import dataclasses
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stratagem import _tree

_PYTHON, _NUMPY = struct.Struct("<625I?d"), struct.Struct("<2496si?d")  # 624 keys of 4 bytes
_KEYS = np.dtype("<u4")


@dataclasses.dataclass(frozen=True, eq=False)
class RandomState:
    """What the generators will draw next."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    def is_same(self, other: "RandomState") -> bool:
        """Whether the generators will draw the same from both."""
        numpys = zip(_tree.leaves(self.numpy), _tree.leaves(other.numpy), strict=True)
        return (
            bool(self.torch.equal(other.torch))
            and self.python == other.python
            and all(np.array_equal(*pair) for pair in numpys)
        )


def current() -> RandomState:
    """Where the generators are."""
    return RandomState(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state())


def restore(state: RandomState, *, as_new: bool = False) -> None:
    """Puts the generators where they were.

    Args:
        state: Where.
        as_new: Whether strategies seed the replicas anew, also if the state is the same as before.
    """
    if as_new:
        torch.manual_seed(0)  # which they notice
    torch.set_rng_state(state.torch)
    random.setstate(state.python)
    np.random.set_state(state.numpy)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leaves the generators as they were before the block."""
    before = current()
    try:
        yield
    finally:
        restore(before)


def seed(number: int) -> None:
    """Starts all generators anew."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def draw() -> int:
    """Draws one number. Replicas are then seeded anew from the state that follows."""
    return int(torch.randint(2**62, ()).item())


def to_bytes(state: RandomState) -> bytes:
    """A state as it travels."""
    _, numbers, gauss = state.python
    _, keys, position, has_gauss, cached = state.numpy
    python = _PYTHON.pack(*numbers, gauss is not None, gauss or 0.0)
    numpy = _NUMPY.pack(np.asarray(keys).astype(_KEYS).tobytes(), position, bool(has_gauss), cached)
    return python + numpy + state.torch.numpy().tobytes()


def from_bytes(data: bytes) -> RandomState:
    """The state that travelled so."""
    *numbers, has_gauss, gauss = _PYTHON.unpack_from(data)
    python = 3, tuple(numbers), gauss if has_gauss else None
    keys, position, has_cached, cached = _NUMPY.unpack_from(data, _PYTHON.size)
    numpy = "MT19937", np.frombuffer(keys, dtype=_KEYS).astype(np.uint32), position, int(has_cached), cached
    rest = bytearray(data[_PYTHON.size + _NUMPY.size :])
    return RandomState(python, numpy, torch.frombuffer(rest, dtype=torch.uint8))


def to_values(state: RandomState) -> dict[str, Any]:
    """A state in values that a checkpoint keeps."""
    version, numbers, gauss = state.python
    kind, keys, position, has_gauss, cached = state.numpy
    return {
        "torch": state.torch,
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def from_values(values: dict[str, Any]) -> RandomState:
    """The state that a checkpoint has kept."""
    version, numbers, gauss = values["python"]
    kind, keys, position, has_gauss, cached = values["numpy"]
    return RandomState(
        (version, tuple(numbers.tolist()), gauss),
        (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached),
        values["torch"],
    )
