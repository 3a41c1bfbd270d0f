"""Makes tokens of values of any kind, in which objects that children know stand by their names."""

import collections
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from stratagem import _torch
from stratagem.objects import kinds
from stratagem.objects.comparing import FLOATS, MAX_WALKED, VALUES, Glance, Same, Token, is_long
from stratagem.objects.kind import CONTENT, Kind
from stratagem.processes.packing import pack, travels_by_value

DEFINITIONS = (types.FunctionType, type, types.ModuleType)


@final
class TokenMaker:
    """Makes tokens of values, of one moment."""

    def __init__(self, name_of: Callable[[Any], Any], knows: Callable[[Any], bool]) -> None:
        self._name_of = name_of
        self._knows = knows
        self._memo: dict[int, Token] = {}

    def state(self, kind: Kind, obj: Any) -> dict[Any, Token]:
        """What the members of an object are compared by; those of a large container all together."""
        if not is_large(obj):
            return kind.tokens(obj, self.token)
        # Not of itself, which travels as its name.
        is_dict = isinstance(obj, dict)
        content = tuple(obj.items() if is_dict else obj)
        seen = Glance(content, self._knows)
        return dict.fromkeys(obj if is_dict else (CONTENT,), seen if seen.is_whole else self._digest(content))

    def token(self, value: Any) -> Token:
        """What a value is compared by."""
        kind = type(value)
        if kind in VALUES:
            return (kind, len(value), hash(value)) if is_long(value) else (kind, value)
        if kind in FLOATS:
            return kind, repr(value)
        name = self._name_of(value)
        if name is not None:
            return name
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, DEFINITIONS) and not travels_by_value(value):
            return Same(value)
        how = kinds.kind_of(value)
        if how is None:
            parts = kinds.parts_of(value)
            return self._digest(value) if parts is None else self._of_parts(value, parts)
        self._memo[id(value)] = "inside", id(value)  # it may lead back to itself
        made = self._memo[id(value)] = id(value), tuple(self.state(how, value).items())
        return made

    def _of_parts(self, value: Any, parts: Sequence[Any]) -> Token:
        tokens = map(self.token, parts)
        if isinstance(value, frozenset):
            return frozenset, frozenset(tokens)
        return (type(value), *tokens) if parts else (type(value), id(value))

    def _digest(self, value: Any) -> Token:
        """Of what can only be compared as it travels; tensors of other devices and forms count their changes."""
        if isinstance(value, RemovableHandle):
            return Same(value)  # of hooks of this process
        if issubclass(type(value), torch.Tensor) and not value.is_inference():
            return Same(value), _torch.tensors.version_of(value)
        try:
            packed = pack(value, self._name_of)
        except Exception:
            return Same(value)
        return len(packed.data), zlib.crc32(packed.data), *(zlib.crc32(each) for each in packed.buffers)


def is_large(value: Any) -> bool:
    """Whether a container is compared as a whole."""
    return isinstance(value, list | dict | set | collections.deque) and len(value) > MAX_WALKED
