"""Tensors as they were at one moment, to find out which have been replaced, given other memory or written to."""

import operator
import weakref
from collections.abc import Collection, Iterable, Mapping, Set
from operator import call
from typing import Any, final

import torch

from stratagem import _torch


def mark(tensor: torch.Tensor | None) -> Any:
    """What `is_as_marked` compares with."""
    return () if tensor is None else (weakref.ref(tensor), _address(tensor), _torch.tensors.version_of(tensor))


def is_as_marked(tensor: torch.Tensor | None, known: Any) -> bool:
    """Whether a tensor is the one of a mark, and has been neither given other memory nor written to."""
    if tensor is None or not known:
        return tensor is None and known == ()
    return known[0]() is tensor and known[1:] == mark(tensor)[1:]


@final
class Marks:
    """Marks of many tensors, which are compared all at once.

    Torch does not count what is written through `.data` or `numpy()`. Tensors of which somebody wants to know that too
    are copied when the program takes their memory (`_torch.storages.DataReads`), or at once if it has it already.
    """

    def __init__(self) -> None:
        self._names: list[int] = []
        self._references: list[weakref.ref[torch.Tensor]] = []
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._values: dict[int, torch.Tensor] = {}
        self._followed: Set[int] = frozenset()

    def note(self, tensors: Mapping[int, torch.Tensor], where: list[int], uncounted: Set[int], home: Set[int]) -> None:
        """Takes tensors by name as they are now.

        Args:
            tensors: All of them.
            where: Their `addresses`.
            uncounted: Those of which writes are to be found that torch does not count.
            home: Those in whose storage the library has one more tensor.
        """
        self._names = list(tensors)
        self._references = list(map(weakref.ref, tensors.values()))
        self._addresses, self._versions = where, list(map(_torch.tensors.version_of, tensors.values()))
        held = {name: tensors[name] for name in uncounted if _is_held(tensors[name], int(name in home))}
        self._values = {name: _copied(_values(each), self._values.get(name)) for name, each in held.items()}
        if uncounted or self._followed:
            self._followed = uncounted - held.keys()
            _torch.storages.data_reads.follow_memory(self, [tensors[name] for name in self._followed])

    def close(self) -> None:
        """Ends it."""
        _torch.storages.data_reads.follow_memory_no_more(self)

    def differing(self, tensors: Mapping[int, torch.Tensor | None]) -> Iterable[int]:
        """The names of those that are not as they were."""
        there = {name: each for name, each in tensors.items() if each is not None}
        written = {name for name, before in self._values.items() if name in there and not _is(there[name], before)}
        followed = {name: there[name] for name in self._followed if name in there}
        written |= {name for name, each in followed.items() if _torch.storages.data_reads.has_written(each)}
        if (
            list(there) == self._names
            and all(map(operator.is_, there.values(), map(call, self._references)))
            and list(map(_torch.tensors.version_of, there.values())) == self._versions
            and addresses(there.values()) == self._addresses
        ):
            return written
        each = zip(self._references, self._addresses, self._versions, strict=True)
        marks: dict[int, Any] = dict(zip(self._names, each, strict=True))
        return {name for name, tensor in tensors.items() if not is_as_marked(tensor, marks.get(name, ()))} | written


def addresses(tensors: Collection[torch.Tensor]) -> list[int]:
    """Where tensors lie; of those that have no one place in memory, what they are."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # sparse ones are among them
        return list(map(_address, tensors))


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def _is_held(tensor: torch.Tensor, num_more: int) -> bool:
    """Whether anything else lies in the memory of the host that a tensor has; of a sparse one, that is not known."""
    if not tensor.is_cpu:
        return False
    num_own_users = _torch.storages.NUM_OWN_USERS + num_more
    return tensor.layout is not torch.strided or _torch.storages.num_storage_users(tensor) > num_own_users


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.layout is torch.strided else _torch.tensors.sparse_values(tensor.detach())


def _copied(values: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """A copy, in memory of an earlier one if it has the same form."""
    if before is None or before.is_inference() or _form(before) != _form(values):
        return values.clone()
    return before.copy_(values)


def _form(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.size(), tensor.stride()


def _is(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether the values of a tensor have the same bits as a copy."""
    return torch.equal(*(_bytes(each) for each in (_values(tensor), before)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # whatever steps axes of length 1 have
