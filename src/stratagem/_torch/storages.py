"""The memory of tensors: who else has it, and who takes it past autograd's count of writes."""

import functools
import gc
import operator
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import torch

_any_torch: Final[Any] = torch  # whose annotations leave some of these out


class DataReads:
    """Notes whose memory the program takes or sets, and what is in it then: torch does not count writes to it.

    Of parameters, and of tensors that are followed one by one, `.data` tells; of those whose memory is followed, also
    `numpy()`, and both of whatever else lies in it.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._num_watching = 0
        self._followed: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors that are no parameters
        # For each that wants to know: tensors by the key of their storage, and the `id`s of those that are elsewhere.
        self._owners: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[torch.Tensor]]] = weakref.WeakKeyDictionary()
        self._elsewhere: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._own: dict[str, Any] = {}  # what torch.Tensor had itself, while others stand in its place
        self._asking = threading.RLock()  # any thread may take the memory of a tensor

    def watch(self) -> None:
        """Begins to note, for the whole process."""
        self._num_watching += 1
        if self._num_watching > 1:
            return
        data: Any = torch.Tensor.data

        def take(parameter: torch.Tensor) -> torch.Tensor:
            self._note(parameter)
            return data.__get__(parameter)  # type: ignore[no-any-return]

        def put(parameter: torch.Tensor, value: torch.Tensor) -> None:
            self._note(parameter)
            data.__set__(parameter, value)

        torch.nn.Parameter.data = property(take, put)  # type: ignore[assignment]

    def unwatch(self) -> None:
        """Ends that."""
        self._num_watching -= 1
        if not self._num_watching:
            del torch.nn.Parameter.data
            self._by_id.clear()
            self._followed.clear()
            self._stand_back()

    def follow(self, tensor: torch.Tensor) -> None:
        """Notes the same of a tensor that is no parameter, until nobody watches."""
        if not self._num_watching:
            return
        self._stand_in()
        key = id(tensor)
        self._followed[key] = weakref.ref(tensor, lambda _: self._followed.pop(key, None))

    def follow_memory(self, asker: Any, tensors: Collection[torch.Tensor]) -> None:
        """Notes the same of tensors as they are now, whatever takes their memory, until the same asker names others.

        Of those that are not on the CPU, which have no arrays of numpy, only their own `.data`.
        """
        if tensors:
            self._stand_in()
        here = [each for each in tensors if each.is_cpu and each.layout is torch.strided]
        with self._asking:
            self._owners[asker] = {each.untyped_storage()._cdata: weakref.ref(each) for each in here}
            self._elsewhere[asker] = set(map(id, tensors)).difference(map(id, here))
        self.are_known(tensors if self._by_id else ())

    def follow_memory_no_more(self, asker: Any) -> None:
        """Ends that."""
        with self._asking:
            self._owners.pop(asker, None)
            self._elsewhere.pop(asker, None)
            self._stand_back()

    def _look_at(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that is followed, and the one whose memory it lies in."""
        with self._asking:
            elsewhere, owners = list(self._elsewhere.values()), list(self._owners.values())
        if id(tensor) in self._followed or any(id(tensor) in own for own in elsewhere):
            self._note(tensor)
        if not owners or not tensor.is_cpu or tensor.layout is not torch.strided:
            return
        try:
            key = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError, ValueError):  # it has none, or none yet
            return
        for own in owners:
            owner = own[key]() if key in own else None
            if owner is not None:
                self._note(owner)

    def _stand_in(self) -> None:
        """Puts what notes in the place of torch's own."""
        if self._own:
            return
        self._own = {name: vars(torch.Tensor).get(name) for name in ("data", "numpy", "__dlpack__")}
        data, to_numpy, to_dlpack = (getattr(_any_torch.Tensor, name) for name in self._own)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            self._look_at(tensor)
            return data.__get__(tensor)  # type: ignore[no-any-return]

        def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
            self._look_at(tensor)
            data.__set__(tensor, value)

        @functools.wraps(to_numpy)
        def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._look_at(tensor)
            return to_numpy(tensor, *args, **kwargs)

        @functools.wraps(to_dlpack)
        def dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._look_at(tensor)
            return to_dlpack(tensor, *args, **kwargs)

        _any_torch.Tensor.data, _any_torch.Tensor.numpy = property(take, put), numpy
        _any_torch.Tensor.__dlpack__ = dlpack

    def _stand_back(self) -> None:
        """Takes it away, if nobody is followed."""
        if self._followed or any(self._owners.values()) or any(self._elsewhere.values()):
            return
        own, self._own = self._own, {}
        for name, value in own.items():
            if value is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, value)

    def are_known(self, parameters: Iterable[torch.Tensor]) -> None:
        """What was written to some parameters is known; those whose memory others still hold stay noted."""
        for parameter in parameters:
            if self._by_id.pop(id(parameter), None) is not None and num_storage_users(parameter) > NUM_OWN_USERS:
                self._note(parameter)

    def has_written(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is not what it was when its `.data` was first taken."""
        _, before = self._by_id.get(id(parameter), (None, None))
        if before is None:
            return False
        return before.device != parameter.device or not torch.equal(before, parameter.detach())

    def _note(self, parameter: torch.Tensor) -> None:
        key = id(parameter)
        if key not in self._by_id and not torch.nn.parameter.is_lazy(parameter):
            reference = weakref.ref(parameter, lambda _: self._by_id.pop(key, None))
            self._by_id[key] = reference, parameter.detach().clone()


NUM_OWN_USERS: Final = 2  # of a storage: its tensor, and the object that is asked

data_reads: Final = DataReads()


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and objects hold the memory of a tensor; since torch 2.1."""
    return int(_any_torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_alone_in_memory(gradient: torch.Tensor) -> bool:
    """Whether a gradient that a hook of its parameter sees has its memory to itself, and all of it."""
    if num_storage_users(gradient) > NUM_OWN_USERS or gradient.is_conj() or gradient.is_neg():
        return False  # or what lies there is not what it means
    storage = gradient.untyped_storage()
    return storage.nbytes() == gradient.nbytes and bool(storage.resizable())  # memory of numpy's is not


class StorageUsers:
    """Finds out which storages have got more users than those that they have now; one look at all of them.

    Args:
        tensors: One in each storage, which must live as long as this does.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._keys = [each.untyped_storage()._cdata for each in tensors]
        self._own = self._count()

    def _count(self) -> list[int]:
        return list(map(_any_torch._C._storage_Use_Count, self._keys))

    def more(self) -> list[tuple[int, int]]:
        """The places of those storages in the list that have more: tensors, also those that arrays of numpy hold.

        Each with how many there are.
        """
        counts = self._count()
        if counts == self._own:
            return []
        more = enumerate(map(operator.sub, counts, self._own))
        return [(place, number) for place, number in more if number > 0]


def move_aliases(tensors: Sequence[torch.Tensor]) -> None:
    """Gives all other tensors in the storages of some new ones with the same values, which they share as before."""
    if not tensors:
        return
    others = {each.untyped_storage()._cdata: each.clone().untyped_storage() for each in tensors}
    staying = set(map(id, tensors))
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout == torch.strided:
            other = others.get(found.untyped_storage()._cdata)
            if other is not None and id(found) not in staying:
                place = found.storage_offset(), found.size(), found.stride()
                found.data = torch.empty(0, dtype=found.dtype).set_(other, *place)
