"""Carries Python objects between the controller and its own children, over the pipe each inherited.

The only place where anything is unpickled: both ends are processes of one user's one program, and
nothing else can hold the pipe (where Ray carries what is said, speak as one of its cluster). Tensors
never pass through the pickle: they travel as raw bytes beside it, large ones in anonymous shared
memory that the receiver maps. Distributed objects travel as references (`Registry`); functions and
classes of the user's own modules travel by value, so that no module of the user's is ever run a
second time.
"""

import contextlib
import functools
import importlib
import io
import mmap
import os
import pickle
import socket
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, final

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from stratagem.replicas.memory import Region
from stratagem.replicas.outgoing import ALIGN, Outgoing, padded
from stratagem.replicas.values import Raw

_HEAD = struct.Struct("<QIQ")  # length of the pickle, number of buffers, bytes in shared memory
_LENGTH = struct.Struct("<Q")
_OPTIMIZER_METHODS = ("step", "state_dict", "load_state_dict", "zero_grad")
_LARGE_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 64


@final
class Wire:
    """One end of the pipe between the controller and a child.

    Args:
        sock: A connected stream socket; the wire owns it from now on.
        reference: Gives the name of an object that both sides have, or `None`.
        resolve: Gives the object of such a name on this side.
        keeps_classes: Whether classes that this side already has stay as they are when they come
            back: the controller's do, a child takes over what the controller changed in them.
    """

    def __init__(
        self,
        sock: socket.socket,
        reference: Callable[[Any], Any] = lambda _: None,
        resolve: Callable[[Any], Any] | None = None,
        *,
        keeps_classes: bool = False,
    ) -> None:
        self._socket = sock
        self._reference = reference
        self._resolve = resolve
        self._keeps_classes = keeps_classes
        self._sending = threading.Lock()  # threads of a replica may print

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Sends any object; blocks until the other side has room for it."""
        self.send_packed(pack(message, self._reference))

    def send_packed(self, packed: "Packed") -> None:
        """Sends what `pack` made; the same may go to several children."""
        small = [buffer for buffer in packed.buffers if len(buffer) < _LARGE_BYTES]
        large = [buffer for buffer in packed.buffers if len(buffer) >= _LARGE_BYTES]
        region = Outgoing(large)
        lengths = b"".join(_LENGTH.pack(len(buffer)) for buffer in packed.buffers)
        head = _HEAD.pack(len(packed.data), len(packed.buffers), region.num_bytes) + lengths + packed.data
        descriptors = [each.descriptor for each in packed.regions] + [region.descriptor] * (region.num_bytes > 0)
        try:
            with self._sending:
                if descriptors:
                    sent = socket.send_fds(self._socket, [head], descriptors)
                    head = head[sent:]
                self._socket.sendall(head)
                for buffer in small:
                    self._socket.sendall(buffer)
        finally:
            region.close()

    def receive(self) -> Any:
        """Waits for the next object. Raises `EOFError` when the other side is gone."""
        first, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MAX_DESCRIPTORS)
        if not first:
            raise EOFError("the other end of the pipe is closed")
        num_pickled, num_buffers, num_shared_bytes = _HEAD.unpack(first + self._read(_HEAD.size - len(first)))
        lengths = [_LENGTH.unpack(self._read(_LENGTH.size))[0] for _ in range(num_buffers)]
        data = self._read(num_pickled)
        shared = memoryview(b"")
        if num_shared_bytes:
            descriptor = descriptors.pop()
            shared = memoryview(mmap.mmap(descriptor, num_shared_bytes, mmap.MAP_PRIVATE))
            os.close(descriptor)
        buffers: list[memoryview | bytearray] = []
        for length in lengths:
            if length >= _LARGE_BYTES:
                buffers.append(shared[:length])
                shared = shared[padded(length) :]
            else:
                buffers.append(self._read(length))
        return _Unpickler(data, buffers, descriptors, self._resolve, self._keeps_classes).load()

    def shut(self) -> None:
        """Tells the other side that nothing more will come; never blocks."""
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError("the other end of the pipe closed in the middle of a message")
            view = view[received:]
        return data


@final
class Packed:
    """An object ready to be sent: its pickle, and the raw bytes of its tensors beside it."""

    def __init__(self, data: bytes, buffers: list[memoryview], regions: list[Region]) -> None:
        self.data = data
        self.buffers = buffers
        self.regions = regions


def pack(message: object, reference: Callable[[Any], Any] = lambda _: None) -> Packed:
    """Turns an object into bytes. Raises what pickle raises, naming what cannot be sent."""
    file = io.BytesIO()
    buffers: list[memoryview] = []
    pickler = _Pickler(file, reference, buffers)
    pickler.dump(message)
    pickler.cut_storages()
    return Packed(file.getvalue(), buffers, pickler.regions)


def unpack(
    data: bytes, buffers: list[memoryview | bytearray], resolve: Callable[[Any], Any], *, keeps_classes: bool = False
) -> Any:
    """Makes an object of what `pack` made of it; for children to which no descriptors can be handed."""
    return _Unpickler(bytearray(data), buffers, [], resolve, keeps_classes).load()


def can_be_packed(value: object, reference: Callable[[Any], Any]) -> bool:
    """Whether an object can be turned into bytes."""
    try:
        pack(value, reference)
    except Exception:
        return False
    return True


def survives(error: BaseException) -> bool:
    """Whether an error of this process comes out on the other side as itself."""
    try:
        copy = pickle.loads(cloudpickle.dumps(error.with_traceback(None)))  # noqa: S301  # made in this line
    except Exception:
        return False
    return type(copy).__name__ == type(error).__name__ and str(copy) == str(error)


# How objects of other libraries travel: given an object, what pickle's `__reduce__` returns, or `NotImplemented`.
reducers: list[Callable[[Any], Any]] = []

_NEVER_NAMED = frozenset({int, float, bool, str, bytes, type(None), tuple, list, dict})


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    def __init__(self, file: io.BytesIO, reference: Callable[[Any], Any], buffers: list[memoryview]) -> None:
        self.regions: list[Region] = []
        self._reference = reference
        self._storages: dict[int, _Storage] = {}
        self._buffers = buffers
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))

    def cut_storages(self) -> None:
        """Leaves out what no tensor of the message uses: a slice of a large tensor travels alone."""
        for storage in self._storages.values():
            storage.cut(self._buffers)

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _NEVER_NAMED:
            return None
        if isinstance(obj, Region):
            self.regions.append(obj)
            return Region, len(self.regions) - 1, obj.num_bytes
        return self._reference(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Raw:
            return obj.reduced(pickle.PickleBuffer)
        if isinstance(obj, FunctionType | type) and _is_ours(obj):
            return NotImplemented  # its name is enough
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, torch.optim.Optimizer):
            # Its own way leaves out what subclasses add; methods replaced on the instance stay here.
            state = {key: value for key, value in obj.__dict__.items() if key not in _OPTIMIZER_METHODS}
            _send_by_value_if_users(type(obj).__module__)
            return _build_optimizer, (type(obj), state)
        if isinstance(obj, ModuleType):
            if travels_by_value(obj):
                return self._reduce_module(obj)
            if sys.modules.get(obj.__name__) is obj:
                return importlib.import_module, (obj.__name__,)  # also of a kind of its own, as torch.backends.cpu
        for reduce in reducers:
            if (way := reduce(obj)) is not NotImplemented:
                _send_by_value_if_users(type(obj).__module__)
                return way
        _send_by_value_if_users(getattr(obj, "__module__", None))
        return super().reducer_override(obj)

    def _reduce_module(self, module: ModuleType) -> Any:
        """A module of the user's, without what cannot be sent: most functions use little of their modules."""
        members: dict[str, Any] = {}
        if module not in _probed:
            _probed.append(module)
            try:
                members = {name: each for name, each in vars(module).items() if self._can_be_sent(name, each)}
            finally:
                _probed.remove(module)
        return cloudpickle.cloudpickle.dynamic_subimport, (module.__name__, members)

    def _can_be_sent(self, name: str, member: Any) -> bool:
        if name in ("__builtins__", "__spec__", "__loader__"):
            return False
        return can_be_packed(member, self._reference)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return NotImplemented
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        storage = tensor.untyped_storage()
        # Views of one storage stay views of one storage on the other side.
        holder = self._storages.get(storage.data_ptr())
        if holder is None:
            holder = self._storages[storage.data_ptr()] = _Storage(storage)
            holder.number = len(self._buffers)  # its buffers are the next ones
        holder.use(tensor)
        form = (str(tensor.dtype).removeprefix("torch."), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _build_tensor, (holder, *form, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytearray,
        buffers: list[memoryview | bytearray],
        descriptors: list[int],
        resolve: Callable[[Any], Any] | None,
        keeps_classes: bool,
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._descriptors = descriptors
        self._resolve = resolve
        self._keeps_classes = keeps_classes
        self._kept: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if not self._keeps_classes or module != cloudpickle.cloudpickle.__name__:
            return found
        if name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return functools.partial(self._make_class, found)
        return functools.partial(self._fill_class, found) if name == "_class_setstate" else found

    def _make_class(self, make: Callable[..., type], *args: Any) -> type:
        known = set(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        made = make(*args)
        if made in known:
            self._kept.add(made)
        return made

    def _fill_class(self, fill: Callable[[type, Any], type], kind: type, state: Any) -> type:
        return kind if kind in self._kept else fill(kind, state)

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, tuple) and name[0] is Region:
            return Region(self._descriptors[name[1]], name[2])
        if self._resolve is None:
            raise pickle.UnpicklingError(f"this end of the pipe knows no distributed objects, got {name!r}")
        return self._resolve(name)


@final
class _Storage:
    """The memory of a tensor on its way.

    Its range travels beside the pickle like its bytes, so that it can be set when all tensors are known.
    """

    def __init__(self, storage: torch.UntypedStorage, start: int = 0) -> None:
        self.storage = storage
        self.start = start
        self._range = np.array([storage.nbytes(), 0])
        self.number = 0

    def use(self, tensor: torch.Tensor) -> None:
        """Notes the bytes that a tensor needs."""
        if tensor.numel():
            first = tensor.storage_offset()
            last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            self._range[0] = min(self._range[0], first * tensor.itemsize // ALIGN * ALIGN)
            self._range[1] = max(self._range[1], (last + 1) * tensor.itemsize)

    def cut(self, buffers: list[memoryview]) -> None:
        """Leaves only the bytes that were noted in the buffers of a message."""
        start, end = self._range
        buffers[self.number + 1] = buffers[self.number + 1][start : max(start, end)]

    def __reduce_ex__(self, protocol: object) -> Any:
        flat = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        whole: Any = flat.numpy()
        own: Any = self._range
        return _build_storage, (pickle.PickleBuffer(own), pickle.PickleBuffer(whole))


def _build_storage(span: Any, buffer: Any) -> _Storage:
    start = int(np.frombuffer(span, dtype=np.int64)[0])
    if not len(buffer):
        return _Storage(torch.empty(0, dtype=torch.uint8).untyped_storage(), start)
    return _Storage(torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage(), start)


def _build_tensor(
    holder: _Storage, dtype: str, offset: int, shape: Any, stride: Any, requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=getattr(torch, dtype))
    offset -= holder.start // tensor.itemsize
    tensor = tensor.set_(holder.storage, offset if 0 not in shape else 0, shape, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _build_optimizer(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = object.__new__(kind)
    optimizer.__setstate__({key: state.pop(key) for key in ("defaults", "state", "param_groups")})
    optimizer.__dict__.update(state)
    return optimizer


_INSTALLED = tuple(
    os.path.realpath(sysconfig.get_paths()[kind]) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_probed: list[ModuleType] = []  # modules whose members are being tried, one inside the other
_known_modules: set[str] = {"__main__", "builtins"}


def travels_by_value(obj: Any) -> bool:
    """Whether a function, class or module is sent whole, and not as the name of one that children import."""
    _send_by_value_if_users(obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None))
    return not cloudpickle.cloudpickle._should_pickle_by_reference(obj)


def _is_ours(obj: Any) -> bool:
    """Whether a function or class is one of stratagem's own, found by its name."""
    return (obj.__module__ or "").startswith("stratagem.") and "<" not in obj.__qualname__


def _send_by_value_if_users(name: str | None) -> None:
    """Lets functions and classes of a user's own module travel by value.

    A module that is not part of Python, of an installed package or of stratagem is the user's; a
    child that imported it would run it a second time.
    """
    if name is None or name in _known_modules:
        return
    _known_modules.add(name)
    module = sys.modules.get(name)
    if isinstance(module, ModuleType) and _is_users(module):
        cloudpickle.register_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] in ("stratagem", "torch", "numpy", "keras"):
        return False
    return not os.path.realpath(file).startswith(_INSTALLED)
