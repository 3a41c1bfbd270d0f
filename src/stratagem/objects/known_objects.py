"""Objects that children have, as the main program remembers them: how each was sent, and what it was made of."""

import types
import weakref
from typing import Any, NamedTuple, final

import numpy as np
import torch

from stratagem.objects.comparing import Token
from stratagem.objects.kind import Kind
from stratagem.processes.packing import is_filled

_KEPT_IN_CELLS = (int, float, complex, str, bytes, type(None), tuple, list, dict, set, torch.Tensor, np.ndarray)


class Stamp(NamedTuple):
    """What an object was made of when it was last looked at closely.

    None of it can have given its place in memory to something else as long as it is kept, alive or known.
    """

    identities: tuple[int, ...]
    kept: list[Any]
    alive: list[weakref.ref[Any]]
    known: list["KnownObject"]

    def holds(self, identities: tuple[int, ...] | None) -> bool:
        """Whether the object, which has these identities now, is made of the same."""
        if identities != self.identities:
            return False
        for node in self.known:
            if node.is_dropped:
                return False
        return None not in [reference() for reference in self.alive]


@final
class KnownObject:
    """An object that children have, or are about to get."""

    __slots__ = ("is_dropped", "is_sent", "kind", "left_out", "name", "owners", "stamp", "state", "strong", "weak")

    def __init__(self, name: int, kind: Kind) -> None:
        self.name = name
        self.kind = kind
        self.state: dict[Any, Token] = {}
        self.left_out: set[Any] = set()  # members that cannot be sent
        self.stamp: Stamp | None = None
        self.is_sent = self.is_dropped = False
        self.strong: Any = None
        self.weak: weakref.ref[Any] | None = None
        self.owners: list[tuple[weakref.ref[types.FunctionType], int]] = []  # of a cell: who have it, at which place

    def get(self) -> Any:
        """The object, if it still exists."""
        if self.weak is not None:
            return self.weak()
        for reference, place in self.owners:
            if (function := reference()) is not None:
                return function.__closure__[place]  # type: ignore[index]
        return self.strong

    def let_go(self) -> None:
        """Keeps nothing of it: others may still know this one."""
        self.is_dropped = True
        self.state, self.stamp, self.strong = {}, None, None

    def keep_cell(self, cell: types.CellType) -> None:
        """Keeps a cell beyond its functions, for those defined anew; not one that could lead back to itself."""
        self.strong = cell if is_filled(cell) and isinstance(cell.cell_contents, _KEPT_IN_CELLS) else None
