"""Tensors as they were at one moment, to find out which have been replaced, given other memory or written to."""

import operator
import weakref
from collections.abc import Collection, Iterable, Mapping
from operator import call
from typing import Any, final

import torch

from stratagem import _torch


def mark(tensor: torch.Tensor | None) -> Any:
    """What `is_as_marked` compares with."""
    return () if tensor is None else (weakref.ref(tensor), _address(tensor), _torch.version_of(tensor))


def is_as_marked(tensor: torch.Tensor | None, known: Any) -> bool:
    """Whether a tensor is the one of a mark, and has been neither given other memory nor written to."""
    if tensor is None or not known:
        return tensor is None and known == ()
    return known[0]() is tensor and known[1:] == mark(tensor)[1:]


@final
class Marks:
    """Marks of many tensors, which are compared all at once.

    Args:
        tensors: The tensors by name; `None` where there is none.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor | None]) -> None:
        there = {name: each for name, each in tensors.items() if each is not None}
        self._names = list(there)
        self._references = list(map(weakref.ref, there.values()))
        self._addresses, self._versions = _looked_at(there.values())

    def differing(self, tensors: Mapping[int, torch.Tensor | None]) -> Iterable[int]:
        """The names of those that are not as they were."""
        there = {name: each for name, each in tensors.items() if each is not None}
        if (
            list(there) == self._names
            and all(map(operator.is_, there.values(), map(call, self._references)))
            and _looked_at(there.values()) == (self._addresses, self._versions)
        ):
            return ()
        each = zip(self._references, self._addresses, self._versions, strict=True)
        marks: dict[int, Any] = dict(zip(self._names, each, strict=True))
        return [name for name, tensor in tensors.items() if not is_as_marked(tensor, marks.get(name, ()))]


def _looked_at(tensors: Collection[torch.Tensor]) -> tuple[list[int], list[int]]:
    have_memory = set(map(_layout, tensors)) <= {torch.strided}
    addresses = map(torch.Tensor.data_ptr if have_memory else _address, tensors)
    return list(addresses), list(map(_torch.version_of, tensors))


_layout = operator.attrgetter("layout")


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
