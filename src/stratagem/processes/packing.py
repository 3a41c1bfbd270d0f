"""Turns objects into bytes and back, for the pipe between the controller and its own children.

The only place where anything is unpickled: both ends are processes of one user's one program, and
nothing else can hold the pipe (where Ray carries what is said, both ends belong to its cluster).
Tensors never pass through the pickle: they travel as raw bytes beside it. Distributed objects travel
as references (`Registry`); functions and classes of the user's own modules travel by value, so that
no module of the user's is ever run a second time.
"""

import dis
import functools
import importlib
import io
import os
import pickle
import re
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar, final

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from stratagem import _torch
from stratagem.devices.strict.backend import strict_device
from stratagem.devices.strict.slot import HELD
from stratagem.devices.vendors import out_of_tree
from stratagem.errors import StratagemError, StrategyError
from stratagem.processes.region import Region

_TINY_BYTES = 1024
_NAMES_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
ALIGN = 64
"""Where each large buffer of a message begins, in bytes."""


@final
class Raw:
    """A tensor that arrives as a tensor of its own: dtype, shape and bytes.

    Args:
        tensor: A contiguous one in the memory of this machine.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor
        # As a flat row, whatever steps axes of length 1 have.
        content: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
        data = content.tobytes() if len(content) <= _TINY_BYTES else pickle.PickleBuffer(content)
        return _from_bytes, (_form(tensor.dtype, tensor.shape), data)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache
def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The form of a tensor in a message: most batches have that of the one before."""
    return plain_bytes((_name(dtype), tuple(shape)))


@functools.lru_cache
def _form_of(data: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = plain_values(data)
    return getattr(torch, dtype), shape


def _from_bytes(form: bytes, data: Any) -> torch.Tensor:
    dtype, shape = _form_of(form)
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    own: Any = bytearray(data) if type(data) is bytes else data
    return torch.frombuffer(own, dtype=dtype).view(shape)


@final
class Packed:
    """An object ready to be sent: its pickle, and the raw bytes of its tensors beside it."""

    def __init__(self, data: bytes, buffers: list[memoryview], regions: list[Region]) -> None:
        self.data = data
        self.buffers = buffers
        self.regions = regions

    def followed_by(self, rest: "Packed") -> "Packed":
        """A tuple and the rest of it as one message; only one of them may have shared memory."""
        if self.regions and rest.regions:
            raise ValueError("both parts of a message have shared memory, which they would name alike")
        return Packed(self.data + rest.data, [*self.buffers, *rest.buffers], self.regions or rest.regions)


def pack(message: object, reference: Callable[[Any], Any] = lambda _: None) -> Packed:
    """Turns an object into bytes. Raises what pickle raises, naming what cannot be sent."""
    buffers: list[memoryview] = []
    if _is_plain(message, reference):
        data = pickle.dumps(message, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
        return Packed(data, buffers, [])
    file = io.BytesIO()
    pickler = _Pickler(file, reference, buffers)
    pickler.dump(message)
    pickler.cut_storages()
    return Packed(file.getvalue(), buffers, pickler.regions)


def unpack(
    data: bytes | bytearray | memoryview,
    buffers: Sequence[memoryview | bytearray],
    resolve: Callable[[Any], Any] | None,
    descriptors: Sequence[int] = (),
    *,
    keeps_classes: bool = False,
) -> Any:
    """Makes an object of what `pack` made of it.

    Args:
        data: Its pickle.
        buffers: What came beside it.
        resolve: Gives the object of a name on this side.
        descriptors: Of the shared memory that came with it, if descriptors can be handed over at all.
        keeps_classes: Whether classes that this side has stay as they are.
    """
    file, left = io.BytesIO(data), iter(buffers)
    message = _Unpickler(file, left, descriptors, resolve, keeps_classes).load()
    if file.tell() == len(data):
        return message
    return *message, *_Unpickler(file, left, descriptors, resolve, keeps_classes).load()


def _is_plain(message: object, reference: Callable[[Any], Any]) -> bool:
    """Whether a message is made of parts that never have a name on the way, and of lists and dicts without one.

    Then nothing has to be asked for each of its parts on the way. What is long is not looked through.
    """
    left = [message]
    for _ in range(_MOST_PLAIN):
        if not left:
            return True
        each: Any = left.pop()
        kind = type(each)
        if kind in _TUPLES:
            left += each
        elif kind is list or kind is dict:
            if reference(each) is not None:
                return False
            left += each if kind is list else [*each, *each.values()]
        elif kind not in _PLAIN and not (kind is FunctionType and each in _own_functions):
            return False
    return False


def plain_bytes(values: Any) -> bytes:
    """Numbers, texts and tuples as bytes: in a message they cost less so than one by one."""
    return pickle.dumps(values, protocol=5)


def plain_values(data: bytes) -> Any:
    """What `plain_bytes` was given."""
    return pickle.loads(data)  # noqa: S301  # part of a message of this program's own


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
        return type(copy).__name__ == type(error).__name__ and str(copy) == str(error)
    except Exception:
        return False


# How objects of other libraries travel: given an object, what pickle's `__reduce__` returns, or `NotImplemented`.
reducers: list[Callable[[Any], Any]] = [_torch.compiling.reduce_compiled, _torch.module_parts.reduce_parametrized]

_PLAIN: set[type] = {int, float, bool, str, bytes, type(None), Raw}
_TUPLES: set[type] = {tuple}
_MOST_PLAIN = 64
_NEVER_NAMED: set[type] = {*_PLAIN, *_TUPLES}
_REDUCED: set[type] = {Raw}
_own_functions: set[FunctionType] = set()  # that have travelled, by their names

_T = TypeVar("_T", bound=type)


def part_of_messages(kind: _T) -> _T:
    """Marks a class of the library: its objects travel as their `__reduce__` says, and nothing else is asked."""
    _NEVER_NAMED.add(kind)
    _REDUCED.add(kind)
    if issubclass(kind, tuple):
        _TUPLES.add(kind)
    return kind


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
        kind = type(obj)
        if kind in _NEVER_NAMED or (kind is FunctionType and obj in _own_functions):
            return None
        if (kind is FunctionType or kind is type) and _is_ours(obj):
            return None
        if kind is Region:
            number = next((each for each, known in enumerate(self.regions) if known is obj), len(self.regions))
            if number == len(self.regions):
                self.regions.append(obj)
            return Region, number, obj.num_bytes
        return self._reference(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _REDUCED:
            return obj.__reduce_ex__(5)
        if (kind is FunctionType and obj in _own_functions) or (isinstance(obj, FunctionType | type) and _is_ours(obj)):
            return NotImplemented  # a name is enough
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, torch.optim.Optimizer):
            # Its own way leaves out what subclasses add; methods replaced on the instance stay here.
            methods = _torch.optimizer_parts.OPTIMIZER_METHODS
            state = {key: value for key, value in obj.__dict__.items() if key not in methods}
            _send_by_value_if_users(type(obj).__module__)
            return _build_optimizer, (type(obj), state)
        if type(obj) is types.CellType:
            # Not by its content: a function may be in a variable that it uses itself.
            content = ((obj.cell_contents,), None, None, _fill_cell) if is_filled(obj) else ()
            return types.CellType, (), *content
        if type(obj) is functools._lru_cache_wrapper and travels_by_value(obj.__wrapped__):
            return _cache, (obj.__wrapped__, tuple(obj.cache_parameters().values()))
        if type(obj) in _WAYS:
            return _WAYS[type(obj)](obj)
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

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        way: Any = super()._dynamic_function_reduce(func)
        if self._reference(func.__globals__) is None:
            return way
        # Its globals and variables are those of other functions too.
        make, _, (state, slots), *rest = way
        given: Any = getattr(self._reference, "new_globals", None)
        new = given(func.__globals__) if given is not None else ()
        used = {name: each for name, each in slots["__globals__"].items() if name in new}
        slots |= {"__globals__": used, "__closure__": None}
        return make, (func.__code__, func.__globals__, None, None, func.__closure__), (state, slots), *rest

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
        if (
            tensor.layout != torch.strided
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return NotImplemented
        storage = tensor.untyped_storage()
        # Views of one storage stay views of one storage on the other side.
        holder = self._storages.get(storage.data_ptr())
        if holder is None:
            holder = self._storages[storage.data_ptr()] = _Storage(storage)
            holder.number = len(self._buffers)  # its buffers are the next ones
        holder.use(tensor)
        form = (_name(tensor.dtype), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _build_tensor, (holder, *form, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))


_found: dict[tuple[str, str], Any] = {}  # what messages name of the library, which stays as it is


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        buffers: Iterator[memoryview | bytearray],
        descriptors: Sequence[int],
        resolve: Callable[[Any], Any] | None,
        keeps_classes: bool,
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._descriptors = descriptors
        self._regions: dict[int, Region] = {}
        self._resolve = resolve
        self._keeps_classes = keeps_classes
        self._kept: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        if (known := _found.get((module, name))) is not None:
            return known
        found = super().find_class(module, name)
        if module.startswith("stratagem."):
            _found[module, name] = found
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
            if name[1] not in self._regions:  # one that is mentioned twice came once
                self._regions[name[1]] = Region(self._descriptors[name[1]], name[2])
            return self._regions[name[1]]
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


def _cache(function: Callable[..., Any], options: tuple[Any, ...]) -> Any:
    return functools.lru_cache(*options)(function)


def _fill_cell(cell: types.CellType, content: tuple[Any]) -> None:
    cell.cell_contents = content[0]


def _reduce_device(device: torch.device) -> Any:
    """The other side may not know strict devices, or those of a vendor's package, yet."""
    if HELD.has(device.type):
        return strict_device, (HELD.kind, device.index)
    module = None if device.type == "cpu" else out_of_tree.module_of(device.type)
    return NotImplemented if module is None else (out_of_tree.device, (device.type, device.index, module))


# A lock guards what is in one process.
_WAYS: dict[type, Callable[[Any], Any]] = {
    torch.device: _reduce_device,
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
}


def _build_optimizer(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = object.__new__(kind)
    optimizer.__setstate__({key: state.pop(key) for key in ("defaults", "state", "param_groups")})
    optimizer.__dict__.update(state)
    return optimizer


_INSTALLED = tuple(
    os.path.realpath(sysconfig.get_paths()[kind]) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Packages that are found in another way: in the user's own folder, by a `.pth` file, by PYTHONPATH.
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_probed: list[ModuleType] = []  # modules whose members are being tried, one inside the other
_known_modules: set[str] = {"__main__", "builtins"}


def travels_by_value(obj: Any) -> bool:
    """Whether a function, class or module is sent whole, and not as the name of one that children import."""
    _send_by_value_if_users(obj.__name__ if isinstance(obj, ModuleType) else getattr(obj, "__module__", None))
    return not cloudpickle.cloudpickle._should_pickle_by_reference(obj)


def _is_ours(obj: Any) -> bool:
    """Whether a function or class is one of stratagem's own, found by its name."""
    is_ours = (obj.__module__ or "").startswith("stratagem.") and "<" not in obj.__qualname__
    if is_ours and type(obj) is FunctionType:
        _own_functions.add(obj)
    return is_ours


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
    path = os.path.realpath(file)
    return not path.startswith(_INSTALLED) and not _PACKAGES.search(path)


def pack_for(whom: str, message: Any, reference: Callable[[Any], Any]) -> Packed:
    """A message as it travels.

    Args:
        whom: Who it is for, in words.
        message: Any object.
        reference: How objects are named on the way; may refuse some.

    Raises:
        StrategyError: A part of it cannot be sent; it says which.
    """
    try:
        return pack(message, reference)
    except StratagemError:
        raise
    except Exception as error:
        raise refusal(whom, message, reference, error, "Make it inside the function, or leave it out") from error


def refusal(whom: str, value: Any, reference: Callable[[Any], Any], error: Exception, instead: str) -> StrategyError:
    """What is said of a value that cannot be sent: which part of it, where that is, why, and what to do.

    Args:
        whom: Who it is for, in words.
        value: What is to be sent.
        reference: How objects are named on the way.
        error: What became of it.
        instead: What to do.
    """
    part, where = find_unsendable(value, lambda each: can_be_packed(each, reference))
    place = f" ({where})" if where else ""
    return StrategyError(f"a {type(part).__name__} cannot be sent to {whom}{place}: {error}. {instead}")


def find_unsendable(value: Any, can_be_sent: Callable[[Any], bool]) -> tuple[Any, str]:
    """The innermost part of a value that cannot be sent, and where it was found."""
    try:
        return _innermost(value, can_be_sent, "", {id(value): value}) or (value, "")
    except RecursionError:  # nested too deep to be looked into, which is why it cannot be sent
        return value, ""


def _innermost(
    value: Any, can_be_sent: Callable[[Any], bool], where: str, seen: dict[int, Any]
) -> tuple[Any, str] | None:
    """The same, of one that cannot be sent; `None` if that is only because of parts that have been looked into."""
    leads_back = False
    for part, place in _places(value):
        if id(part) in seen:
            leads_back = True
        elif not can_be_sent(part):
            seen[id(part)] = part
            found = _innermost(part, can_be_sent, f"{where}, {place}" if where and place else where or place, seen)
            if found is not None:
                return found
            leads_back = True
    return None if leads_back else (value, where)


def _places(value: Any) -> Iterator[tuple[Any, str]]:
    if _torch.compiling.is_compiled(value):
        yield _torch.compiling.uncompiled(value), ""
    elif isinstance(value, tuple | list | set | frozenset):
        yield from ((each, "") for each in value)
    elif isinstance(value, dict):
        yield from ((key, "a key of a dict") for key in value)
        yield from ((each, f"under the key {key!r}") for key, each in value.items())
    elif isinstance(value, types.FunctionType):
        name, cells = value.__name__, zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((cell.cell_contents, f"captured as {free!r} by {name}") for free, cell in cells if is_filled(cell))
        used = [each for each in global_names(value.__code__) if each in value.__globals__]
        yield from ((value.__globals__[each], f"the global {each!r} of {name}") for each in used)
        yield from ((each, f"a default of {name}") for each in value.__defaults__ or ())
    elif isinstance(value, types.CellType):
        yield from [(value.cell_contents, "")] if is_filled(value) else []
    elif isinstance(value, types.MethodType):
        yield value.__self__, f"the object of the method {value.__name__}"
    elif isinstance(value, functools.partial):
        yield from ((each, "in a partial") for each in (value.func, value.args, value.keywords))
    elif isinstance(value, type):
        own = vars(value).items() if travels_by_value(value) else ()
        yield from ((each, f"{name!r} of the class {value.__name__}") for name, each in own)
    elif not isinstance(value, types.ModuleType) and hasattr(value, "__dict__"):
        state = next((way[2] for reduce in reducers if (way := reduce(value)) is not NotImplemented), vars(value))
        yield from ((each, f"the attribute {name!r} of a {type(value).__name__}") for name, each in state.items())
        yield type(value), ""


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that code may use, that of inner functions included; attributes are not among them."""
    names = dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname in _NAMES_GLOBAL)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(global_names(constant))
    return tuple(names)


def is_filled(cell: types.CellType) -> bool:
    """Whether a cell of a closure has content."""
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True
