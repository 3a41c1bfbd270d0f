"""What values are compared by: tokens, which are equal as long as the values are."""

import types
import weakref
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
import torch

from stratagem import _torch

Token = Any
"""Stands for a value: equal as long as the value is."""

VALUES: Final = frozenset(
    {bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, type(...), types.CodeType}
    | {np.bool_, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}
)
"""What never changes and is compared by value."""

FLOATS: Final = frozenset({float, complex, *(np.dtype(code).type for code in np.typecodes["AllFloat"])})
"""Numbers that are compared by how they read, which tells 0.0 from -0.0."""

FIXED: Final = VALUES | FLOATS
"""What never changes."""

_MAX_KEPT: Final = 2**16  # characters or bytes

MAX_WALKED: Final = 1000
"""How many elements a container may have before it is compared as a whole."""


def is_long(value: Any) -> bool:
    """Whether a value that never changes is a text or bytes too long to be kept for a comparison."""
    return type(value) in (str, bytes) and len(value) > _MAX_KEPT


@final
class Same:
    """The token of what is compared by what it is; it keeps alive only what cannot be known otherwise."""

    def __init__(self, value: Any) -> None:
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._get() is not None and self._get() is other._get()

    __hash__ = None  # type: ignore[assignment]


@final
class Glance:
    """The token of a large container: which objects are in it, and how often its tensors were written to.

    Pickling thousands of objects twice in each run would cost more than most steps. What is written to a tensor in
    such a container through `.data` or numpy is not seen.

    Args:
        content: What is in the container, nested in tuples, lists and dicts.
        has_name: Tells what children know by itself: then this is not whole, and says nothing.
    """

    def __init__(self, content: Any, has_name: Callable[[Any], bool]) -> None:
        self._held: list[Any] = []
        self._versions: list[int] = []
        self._compared: tuple[weakref.ref[Glance] | None, bool] = None, False
        self.is_whole = self._look(content, has_name)

    def _look(self, value: Any, has_name: Callable[[Any], bool]) -> bool:
        kind = type(value)
        if kind in FIXED:
            self._held.append(value)
        elif kind is not tuple and has_name(value):
            return False
        elif kind is tuple or kind is list:
            self._held += (kind, len(value))
            return all(self._look(each, has_name) for each in value)
        elif kind is dict:
            self._held += (kind, len(value), *value)
            return all(self._look(each, has_name) for each in value.values())
        elif kind is torch.Tensor and not value.is_inference():
            self._held.append(value)
            self._versions.append(_torch.tensors.version_of(value))
        else:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Glance):
            return False
        last, is_equal = self._compared
        if last is None or last() is not other:  # it stands for every key of a dict
            is_equal = self._versions == other._versions and len(self._held) == len(other._held)
            is_equal = is_equal and all(map(_is_same, self._held, other._held))
            self._compared = weakref.ref(other), is_equal
        return is_equal

    __hash__ = None  # type: ignore[assignment]


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in VALUES and bool(one == other))
