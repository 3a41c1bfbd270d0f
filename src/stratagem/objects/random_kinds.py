"""Generators of random numbers that steps use: each replica draws its own, reproducibly."""

import random
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import numpy as np
import torch

from stratagem.objects.kind import Kind, Whole

_SEED_STEP = 1_000_003
_STATE = "state"  # the key of a state that is not made into one of its own


class _Random(Whole):
    """A generator of random numbers: each replica draws its own, reproducibly; replica 0 what one device would."""

    is_seeded = True

    def replace(self, obj: Any, content: Any, replica: int) -> None:
        self.seed(obj, zlib.crc32(content) + _SEED_STEP * replica)

    def seed(self, obj: Any, seed: int) -> None:
        raise NotImplementedError


@final
class _TorchRandom(_Random):
    def content(self, obj: Any) -> Any:
        return obj.get_state().numpy().tobytes()

    def seed(self, obj: Any, seed: int) -> None:
        obj.manual_seed(seed)

    def write(self, obj: Any, members: Mapping[Any, Any], removed: Iterable[Any], replica: int) -> None:
        if _STATE in members:
            obj.set_state(torch.frombuffer(bytearray(members[_STATE]), dtype=torch.uint8))
        else:
            super().write(obj, members, removed, replica)


@final
class _GivenRandom(Kind):
    """A generator that the program has made for one replica: it goes on where it was."""

    def read(self, obj: Any) -> Mapping[Any, Any]:
        return {_STATE: obj.get_state().numpy().tobytes()}


@final
class _NumpyRandom(_Random):
    def content(self, obj: Any) -> Any:
        return repr(obj.bit_generator.state).encode()

    def seed(self, obj: Any, seed: int) -> None:
        obj.bit_generator.state = type(obj.bit_generator)(seed).state


@final
class _PythonRandom(_Random):
    def content(self, obj: Any) -> Any:
        return repr(obj.getstate()).encode()

    def seed(self, obj: Any, seed: int) -> None:
        obj.seed(seed)


BY_TYPE: Final[dict[type, Kind]] = {
    torch.Generator: _TorchRandom(),
    np.random.Generator: _NumpyRandom(),
    random.Random: _PythonRandom(),
}
GIVEN_RANDOM: Final = _GivenRandom()
"""The kind of a `torch.Generator` in a `PerReplica`."""
