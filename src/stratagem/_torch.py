"""Everything private of torch that stratagem relies on, under names of its own.

Torch may change these without notice; with a new torch this is the file to look through, with `_tree` for nestings.
What follows has been so since torch 2.2, unless it says otherwise. Aliases and `attrgetter`s cost no call of Python
where they are used for every tensor. The overrides of torch's symbolic shapes stay with their class, in
`graphs/symbolic_sizes.py`, and names of operations (`aten._to_copy`) are no private names.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import logging
import operator
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed
from torch._C import _len_torch_function_stack
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as _shapes_config
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize
from torch.optim import optimizer as _optimizers
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

from stratagem.errors import StrategyError

__all__ = ["BatchNorm", "DataLoaderIterator", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "pin_memory"]

_any_torch: Final[Any] = torch  # whose annotations leave some of these out

if torch.__version__.startswith("2.9."):  # which warns, once, of the setting that it has itself by default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.get_float32_matmul_precision()

# Tensors

requires_grad_of: Final[Callable[[Any], bool]] = operator.attrgetter("requires_grad")
gradient_of: Final[Callable[[Any], Any]] = operator.attrgetter("grad")
version_of: Final[Callable[[Any], int]] = operator.attrgetter("_version")
"""How often a tensor was written to, by autograd's count; not of inference tensors, and not through `.data`."""

data_of: Final[Callable[[Any], torch.Tensor]] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
"""`tensor.data`, and how it is set, for the library: `DataReads` does not note it."""

set_data: Final[Callable[[Any, torch.Tensor], None]] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]

numpy_of: Final[Callable[[Any], Any]] = torch._C.TensorBase.numpy
"""`tensor.numpy()`, for the library: likewise."""

base_of: Final[Callable[[Any], torch.Tensor | None]] = operator.attrgetter("_base")
"""The tensor that a view is of; autograd keeps it."""

is_view: Final[Callable[[torch.Tensor], bool]] = torch.Tensor._is_view
"""Whether autograd knows a tensor as a view of another."""


def own_tensors(module: Any) -> tuple[torch.Tensor | None, ...]:
    """The parameters and buffers of a module itself; `None` where it has left one out."""
    return (*module._parameters.values(), *module._buffers.values())


sparse_values: Final[Callable[[torch.Tensor], torch.Tensor]] = _any_torch.Tensor._values
"""The values of a sparse COO tensor, coalesced or not; `values()` refuses the latter."""

wrapper_subclass: Final = _any_torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a form and no memory."""

hooks_of: Final[Callable[[Any], Any]] = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks of `register_hook` and of `register_post_accumulate_grad_hook` on a tensor; `None` or empty without any."""


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


class LibraryHook(NamedTuple):
    """A hook of stratagem's own on a parameter: it stays where the program's are taken off."""

    function: Callable[[torch.Tensor], None]

    def __call__(self, parameter: torch.Tensor) -> None:
        self.function(parameter)


class TensorHooks(NamedTuple):
    """The program's hooks of one parameter, in the dicts that torch calls them from."""

    before: list[tuple[dict[int, Any], int, Any]]
    after: list[tuple[dict[int, Any], int, Any]]

    def put_back(self) -> None:
        """Lets torch call them again."""
        for own, number, hook in (*self.before, *self.after):
            own[number] = hook

    def call(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that `register_hook`'s make of another."""
        for _, _, hook in self.before:
            made = hook(gradient)
            gradient = gradient if made is None else made
        return gradient

    def call_after(self, parameter: torch.Tensor) -> None:
        """Calls those that wait for the gradient to be accumulated."""
        for _, _, hook in self.after:
            hook(parameter)


def program_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]] | None:
    """The hooks that the program has put on a tensor, of both kinds; `None` if there are none."""
    before, after = hooks_of(tensor)
    if not before and not after:
        return None
    found = tuple([hook for hook in (own or {}).values() if type(hook) is not LibraryHook] for own in (before, after))
    return found if any(found) else None  # type: ignore[return-value]


def set_program_hooks(tensor: torch.Tensor, hooks: tuple[list[Any], list[Any]] | None) -> None:
    """Puts such hooks in the place of those that a tensor has."""
    take_hooks(tensor)
    before, after = hooks or ((), ())
    for hook in before:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after:
        tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def drop_hooks(tensor: Any) -> None:
    """Takes all hooks off a tensor, and what torch keeps for more."""
    tensor._backward_hooks = None
    tensor._post_accumulate_grad_hooks = None


def take_hooks(parameter: torch.Tensor) -> TensorHooks | None:
    """Takes the program's hooks off a parameter; `None` if it has none."""
    before, after = hooks_of(parameter)
    if not before and not after:
        return None
    taken = TensorHooks([], [])
    for own, found in ((before, taken.before), (after, taken.after)):
        for number, hook in list((own or {}).items()):
            if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook."):
                raise StrategyError(
                    "register_multi_grad_hook waits for gradients inside a backward pass, and those of the global "
                    "batch are there after it; register a hook on each parameter, or look at .grad after backward()"
                )
            if type(hook) is not LibraryHook:
                found.append((own, number, hook))
                del own[number]
    return taken if taken.before or taken.after else None


def reduce_parametrized(obj: Any) -> Any:
    """How a parametrized module travels, which torch lets nobody send; `NotImplemented` for all else."""
    if not isinstance(obj, torch.nn.Module) or not parametrize.is_parametrized(obj):
        return NotImplemented
    parametrizations: Any = obj.parametrizations
    base = parametrize.type_before_parametrizations(obj)
    return _build_parametrized, (base, tuple(parametrizations.keys())), obj.__dict__


def _build_parametrized(kind: type[torch.nn.Module], names: tuple[str, ...]) -> torch.nn.Module:
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


foreach_copy_: Final = torch._foreach_copy_
"""Writes a list of tensors into another in one call; as its fellows, what torch's optimizers are made of."""

foreach_lerp_: Final = torch._foreach_lerp_
foreach_zero_: Final = torch._foreach_zero_


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


# Modules

MODULE_PARTS: Final = ("_modules", "_parameters", "_buffers")
"""The dicts in which a module holds what is part of it."""

parts_of: Final[Callable[[Any], tuple[dict[str, Any], ...]]] = operator.attrgetter(*MODULE_PARTS)
"""Those dicts of a module."""

parts_in: Final[Callable[[dict[str, Any]], tuple[dict[str, Any], ...]]] = operator.itemgetter(*MODULE_PARTS)
"""Those dicts, of the attributes of a module."""

MODULE_HOOKS: Final = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks"),
)
"""The dicts in which it holds its hooks."""

hooks_in: Final[Callable[[dict[str, Any]], tuple[dict[int, Any], ...]]] = operator.itemgetter(*MODULE_HOOKS)
"""Those dicts, of the attributes of a module."""

OPTIMIZER_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The dicts in which an optimizer holds the hooks of its `step`."""

OPTIMIZER_METHODS: Final = ("step", "state_dict", "load_state_dict", "zero_grad")
"""Methods that somebody may replace on one optimizer."""

OPTIMIZER_MARKS: Final = ("_opt_called",)
"""What schedulers put on it."""

own_parameters_of: Final[Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]] = operator.attrgetter(
    "_parameters"
)
"""The dict of a module's own parameters; layers of Keras do more in `parameters()` than to tell them."""
buffers_of: Final[Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]] = operator.attrgetter("_buffers")
"""The dict of a module's own buffers."""


def check_input_dim(kind: Any, module: torch.nn.Module, value: torch.Tensor) -> None:
    """Refuses an input that a class of batch normalizations does not take."""
    kind._check_input_dim(module, value)


# What torch.compile makes


def is_compiled(value: object) -> bool:
    """Whether it is a function that `torch.compile` made; a compiled module is none."""
    own = vars(value) if isinstance(value, FunctionType) else {}
    return "_torchdynamo_orig_callable" in own and not own.get("_torchdynamo_disable", False)


def is_compiled_module(value: object) -> bool:
    """Whether it is what `torch.compile` made of a module; one that `module.compile()` has changed is none."""
    return type(value).__module__ == _COMPILER_MODULE and type(value).__name__ == "OptimizedModule"


def uncompiled(value: Any) -> Any:
    """What a compiled function or module was made of."""
    if is_compiled_module(value):
        return value._orig_mod
    plain = value._torchdynamo_orig_callable
    # Around what is torch's, or has no frame of Python's, torch puts a function of its own.
    around = importlib.import_module("torch._dynamo.external_utils").__file__
    while getattr(getattr(plain, "__code__", None), "co_filename", None) == around:
        plain = plain.__wrapped__
    return plain


def reduce_compiled(value: Any) -> Any:
    """How compiled functions and modules travel: as what they were made of; they are compiled where they arrive."""
    if is_compiled(value):
        refuse_compiled_step(value)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        compiler = next(each for each in cells if type(each).__module__ == _COMPILER_MODULE)
        return _compiled_by, (compiler, uncompiled(value))
    if is_compiled_module(value):
        return _compiled_by, (value.dynamo_ctx, value._orig_mod)
    if type(value).__module__ == _COMPILER_MODULE and hasattr(value, "_dynamic"):
        # Torch's own way leaves `fullgraph`, `dynamic` and the limit of recompilations out.
        frames = value.callback._torchdynamo_orig_backend
        options = {
            "nopython": value.fullgraph,
            "dynamic": value._dynamic,
            "guard_filter_fn": getattr(value._hooks, "guard_filter_fn", None),
            "recompile_limit": getattr(frames, "_recompile_limit", None),
        }
        given = {key: option for key, option in options.items() if option is not None}
        return _compiler, (_innermost_backend(frames), given, _compiler_settings())
    return NotImplemented


def _innermost_backend(frames: Any) -> Any:
    while hasattr(frames, "_torchdynamo_orig_backend"):
        frames = frames._torchdynamo_orig_backend
    return frames


def _compiled_by(compiler: Any, plain: Any) -> Any:
    return compiler(plain)


def _compiler(backend: Any, options: dict[str, Any], settings: dict[str, dict[str, Any]]) -> Any:
    for name, values in settings.items():
        module = importlib.import_module(name)
        for key, value in values.items():
            setattr(module, key, value)
    made: Any = importlib.import_module("torch._dynamo").optimize(backend, **options)
    keep_out_of_compiled_code()
    return made


def _compiler_settings() -> dict[str, dict[str, Any]]:
    """What the program has set of torch's compiler: limits, fallbacks, the random numbers of compiled code."""
    loaded = {name: sys.modules[name] for name in _SETTINGS_OF_COMPILER if name in sys.modules}
    changed = {name: module._get_dict(skip_default=True) for name, module in loaded.items()}
    return {
        name: {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}
        for name, values in changed.items()
        if values
    }


def is_in_compiler() -> bool:
    """Whether this thread is in torch's compiler, which makes modules of its own."""
    return CompileContext.try_get() is not None


def keep_out_of_compiled_code() -> None:
    """Lets torch's compiler stop where a step comes to the library, which then runs as it does otherwise."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and _OWN_FOLDER not in rules.SKIP_DIRS:
        rules.SKIP_DIRS.append(_OWN_FOLDER)
        rules._recompile_re()


def not_compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function of the library, and all that it calls, outside the compiled code that may have come to it."""
    compiler: Any = sys.modules.get(_COMPILER_MODULE)
    if compiler is None:
        return function(*args, **kwargs)
    before = compiler.set_eval_frame(None)
    try:
        return function(*args, **kwargs)
    finally:
        compiler.set_eval_frame(before)


_COMPILER_MODULE: Final = "torch._dynamo.eval_frame"
_SETTINGS_OF_COMPILER: Final = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
_OWN_FOLDER: Final = f"{Path(__file__).parent}/"


# Optimizers and schedulers

_COMPILER: Final = "torch._dynamo"
_WITHOUT_COMPILER: Final = "__dynamo_disable"  # where torch keeps what it has made of a function
_COMPILED_NEVER: Final = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def spare_compiler() -> None:
    """Lets optimizers be made and used without torch's compiler, as long as nothing else has loaded it.

    Torch loads it, 800 modules in 0.7 s, to say that it shall leave some methods of optimizers alone. While it is not
    loaded, nothing is compiled, and they can be called as they are.
    """
    for name in _COMPILED_NEVER:
        wrapped = getattr(torch.optim.Optimizer, name)
        bare = getattr(wrapped, "__wrapped__", None)
        if bare is not None and not hasattr(bare, _WITHOUT_COMPILER):
            setattr(bare, _WITHOUT_COMPILER, functools.partial(_call_bare, wrapped, bare))


def _call_bare(wrapped: Callable[..., Any], bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _COMPILER not in sys.modules:
        return bare(*args, **kwargs)
    vars(bare).pop(_WITHOUT_COMPILER, None)  # torch makes its own now
    return wrapped(*args, **kwargs)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Those of all optimizers and of `register_step_pre_hook`, which torch calls in its wrapper around `step`."""
    own: dict[int, Callable[..., Any]] = optimizer._optimizer_step_pre_hooks
    return [*_optimizers._global_optimizer_pre_hooks.values(), *own.values()]


def step_post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Those of `register_step_post_hook` and of all optimizers, likewise."""
    own: dict[int, Callable[..., Any]] = optimizer._optimizer_step_post_hooks
    return [*own.values(), *_optimizers._global_optimizer_post_hooks.values()]


def mark_stepped(optimizer: Any) -> None:
    """Tells schedulers that the optimizer has made a step, else they warn; since torch 2.4."""
    optimizer._opt_called = True


def mark_wrapped(step: Any) -> None:
    """Keeps schedulers from putting a wrapper of theirs around a `step`; since torch 2.4."""
    step._wrapped_by_lr_sched = True


def refuse_compiled_step(function: Any) -> None:
    """Refuses a compiled `step` of an optimizer, also of one that the library or a scheduler has put there.

    Raises:
        StrategyError: It is one.
    """
    if not is_compiled(function):
        return
    plain = uncompiled(function)
    if isinstance(getattr(plain, "__self__", None), torch.optim.Optimizer) or hasattr(plain, "_wrapped_by_lr_sched"):
        raise StrategyError(
            "a replica calls optimizer.step() as it is, because replicas share an update or give it to others; got one "
            "that torch.compile made. Leave torch.compile out there: fused=True of the optimizer makes one kernel of "
            "its update, and the model or the whole step may be compiled"
        )


def set_compiling(flag: bool) -> bool:
    """Sets what `torch.compiler.is_compiling()` says, and returns what it said."""
    before: bool = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    return before


def step_of_adagrad(bare: Callable[..., Any]) -> Callable[..., Any]:
    """A step of Adagrad that makes the state of tensors that have none; since torch 2.12 it does so itself."""
    if torch.__version__ >= "2.12":
        return bare

    def step(optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        first = optimizer.defaults["initial_accumulator_value"]
        for group in optimizer.param_groups:
            dtype = _optimizers._get_scalar_dtype(is_fused=group["fused"])  # type: ignore[no-untyped-call]
            for each in group["params"]:
                if each.grad is not None and not (state := optimizer.state[each]):
                    state["step"] = torch.zeros((), dtype=dtype, device=each.device if group["fused"] else "cpu")
                    state["sum"] = torch.full_like(each, complex(first, first) if each.is_complex() else first)
        return bare(optimizer, *args)

    return step


# Autograd


def _shown_to_modes(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.autograd.backward` as a function that a `TorchFunctionMode` sees; since torch 2.11 it is one."""

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        asked = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        if torch.overrides.has_torch_function(asked):
            torch.overrides.handle_torch_function(backward, asked, tensors, *args, **kwargs)
        else:
            original(tensors, *args, **kwargs)

    return backward


# Here, so that it is what strategies wrap, whichever of them or of placement comes first.
if torch.__version__ < "2.11":
    _any_torch.autograd.backward = _shown_to_modes(torch.autograd.backward)


current_autograd_node: Final[Callable[[], Any]] = _any_torch._C._current_autograd_node
"""The node whose backward this thread runs; `None` outside a backward pass."""

next_sequence_number: Final[Callable[[], int]] = _any_torch.autograd._get_sequence_nr
"""The number that autograd's next node gets in this thread."""


def sequence_number(node: Any) -> int:
    """The number that a node of autograd got when it was made."""
    return int(node._sequence_nr())


def call_before_clips(function: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Lets a function be called with what `clip_grad_norm_` and its fellows are about to use, however imported.

    These are parameters; for `get_total_norm` they are gradients. `GradScaler` comes there before it unscales, too.
    """
    found: Any = importlib.import_module("torch.nn.utils.clip_grad")
    for each in (found.clip_grad_norm_, found.clip_grad_value_, found._get_total_norm):
        cell = each.__closure__[each.__code__.co_freevars.index("func")]  # of the wrapper around it, since torch 2.6
        cell.cell_contents = _with_list_first(function, cell.cell_contents)
    scaler_kind: Any = torch.amp.GradScaler
    original = scaler_kind._unscale_grads_

    @functools.wraps(original)
    def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        function([each for group in optimizer.param_groups for each in group["params"]])
        return original(scaler, optimizer, *args, **kwargs)

    scaler_kind._unscale_grads_ = unscale


def _with_list_first(function: Callable[[list[torch.Tensor]], None], original: Any) -> Any:
    """Calls a function with the tensors that another is given first, before that."""
    name = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.pop(name)
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        function(tensors)
        return original((each for each in tensors) if isinstance(given, Iterator) else given, *args[1:], **kwargs)

    return wrapped


def is_in_backward_pass() -> bool:
    """Whether this thread computes a part of a backward pass, its hooks and what is recomputed included."""
    return int(torch._C._current_graph_task_id()) != -1


# Operations and modes

schema_of: Final[Callable[[Any], Any]] = operator.attrgetter("_schema")
"""What an operation of `torch.ops` takes and returns."""

takes_numbers_for_tensors: Final[Callable[[str], bool]] = operator.attrgetter("_C._should_allow_numbers_as_tensors")(
    torch
)
"""Whether an operation of that name, called from Python, takes a number in the place of a tensor."""

overload_of: Final[Callable[[Any], str]] = operator.attrgetter("_overloadname")
"""Which overload of its packet an operation is."""

without_dispatch_modes: Final = _disable_current_modes
"""A block in which no `TorchDispatchMode` of this thread counts."""

num_function_modes: Final[Callable[[], int]] = _len_torch_function_stack
"""How many `TorchFunctionMode`s this thread has."""

push_function_mode: Final[Callable[[Any], None]] = _push_mode
"""Puts a `TorchFunctionMode` on top of the others of this thread."""

pop_function_mode: Final[Callable[[], Any]] = _pop_mode
"""Takes the top one away and returns it."""


def default_device_mode() -> Any:
    """The mode of `torch.set_default_device` in this thread, if there is one; a `with torch.device(...)` is another."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def functions_with_device() -> frozenset[Any]:
    """The functions of torch that make a tensor on a device that they are told."""
    return frozenset(importlib.import_module("torch.utils._device")._device_constructors())


python_dispatcher: Final = enable_python_dispatcher
"""A block in which operations that torch has in Python too run in Python, which takes symbolic sizes."""


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """A block in which torch does not take operations of oneDNN; `torch.backends.mkldnn.flags` sets more than that."""
    before = _any_torch._C._get_mkldnn_enabled()
    _any_torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _any_torch._C._set_mkldnn_enabled(before)


# How exactly float32 is multiplied, and by which kernels, in the whole process

_PRODUCTS: Final = [(backend, each) for backend in ("cuda", "mkldnn") for each in ("matmul", "conv", "rnn")]


def precision_of_products() -> tuple[str | None, ...]:
    """By `torch.set_float32_matmul_precision`, and by each `fp32_precision` of `torch.backends`."""
    try:
        of_all = torch.get_float32_matmul_precision()
    except (
        RuntimeError
    ):  # the program has set one of the others, which torch then does not say in the words of this one
        of_all = None
    return of_all, *[_any_torch._C._get_fp32_precision_getter(*each) for each in _PRODUCTS]


def set_precision_of_products(those: tuple[str | None, ...]) -> None:
    """What `precision_of_products` gave."""
    of_all, *others = those
    if of_all is not None:
        torch.set_float32_matmul_precision(of_all)
    for each, precision in zip(_PRODUCTS, others, strict=True):
        if _any_torch._C._get_fp32_precision_getter(*each) != precision:
            _any_torch._C._set_fp32_precision_setter(*each, precision)


_KERNELS: Final = (  # how each choice is read and made
    *[
        (getattr(_any_torch._C, f"_get_{name}"), getattr(_any_torch._C, f"_set_{name}"))
        for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled")
    ],
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


def choice_of_kernels() -> tuple[bool, ...]:
    """By `torch.backends.cudnn.benchmark`, `torch.backends.cuda.enable_flash_sdp` and the like."""
    return tuple([read() for read, _ in _KERNELS])


def set_choice_of_kernels(choice: tuple[bool, ...]) -> None:
    """What `choice_of_kernels` gave."""
    for (_, choose), chosen in zip(_KERNELS, choice, strict=True):
        choose(chosen)


# Symbolic sizes

fake_tensor_log: Final = logging.getLogger("torch._subclasses.fake_tensor")
"""Where torch tells what it could not compute without values."""


def any_size() -> contextlib.AbstractContextManager[Any]:
    """A block in which what is recorded for a symbolic size holds for 0 and 1 too; since torch 2.8."""
    made: contextlib.AbstractContextManager[Any] = _shapes_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return made


def constant_source(name: str) -> Any:
    """Where a symbol comes from, for torch's messages; loads torch's compiler."""
    return importlib.import_module("torch._dynamo.source").ConstantSource(name)


expression_of: Final[Callable[[torch.SymInt], Any]] = operator.attrgetter("node._expr")
"""The expression of sympy behind a symbolic size, as it was made."""


# Process groups, which torch.distributed calls by these names


def gloo_options(timeout: timedelta, devices: Sequence[Any]) -> Any:
    """The options of a `ProcessGroupGloo`."""
    options = _any_torch.distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = list(devices)
    return options


def group_options(group: Any, timeout: timedelta) -> Any:
    """The options of a group of one of torch's own backends, such as `ProcessGroupNCCL`."""
    options = group.Options()
    options._timeout = timeout
    return options


def is_group_registered(name: str) -> bool:
    """Whether a package beside torch has registered a backend of torch.distributed by this name."""
    return name.upper() in _any_torch.distributed.Backend._plugins


def registered_group_of(torch_type: str) -> str | None:
    """The backend of torch.distributed that a package has registered for a type of device."""
    name: str | None = _any_torch.distributed.Backend.default_device_backend_map.get(torch_type)
    return name if name is not None and is_group_registered(name) else None


def registered_group(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of a backend that a package has registered, apart from torch's default group."""
    registered = _any_torch.distributed.Backend._plugins[name.upper()]
    store = _any_torch.distributed.PrefixStore(name, store)
    if not registered.extended_api:
        return registered.creator_fn(store, rank, size, timeout)
    options = _any_torch._C._distributed_c10d._DistributedBackendOptions()
    options.store, options.timeout = store, timeout
    options.group_rank, options.group_size = rank, size
    options.group_id, options.global_ranks_in_group = name, list(range(size))
    return registered.creator_fn(options, None)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """How long operations of a group may take from now on."""
    group._set_default_timeout(timeout)


def allgather_into(group: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
    """Begins to gather the tensors of all into one."""
    return group._allgather_base(target, source)


# A backend in Python: strict devices are one (`devices/strict`); since torch 2.10

without_function_modes: Final[Callable[[], contextlib.AbstractContextManager[Any]]] = torch._C.DisableTorchFunction
"""A block in which no `TorchFunctionMode` of this thread counts, nor what subclasses say."""

_CPU_ONLY: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


identity_of: Final[Callable[[Any], int]] = operator.attrgetter("_cdata")
"""The same number for all objects of Python that stand for one generator."""


def run_kernel_of_cpu(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the CPU's kernel of an operation, whatever its tensors are on."""
    return operation.redispatch(_CPU_ONLY, *args, **kwargs)


@contextlib.contextmanager
def below_autocast(key: str) -> Iterator[None]:
    """A block in which an autocast such as `AutocastPrivateUse1` does nothing."""
    with _any_torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_any_torch._C._dispatch_key_parse(key))):
        yield


def operations_of(key: str) -> Iterator[Any]:
    """The operations of aten that have a kernel of their own for a dispatch key such as `CPU`."""
    for name in sorted(set(_any_torch._C._dispatch_get_registrations_for_dispatch_key(key))):
        operation = operation_named(name)
        if operation is not None and name.startswith("aten::"):
            yield operation


def foreach_operations() -> Iterator[Any]:
    """The operations on lists of tensors that optimizers are made of."""
    for name in _any_torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_") and (operation := operation_named(name)) is not None:
            yield operation


def operation_named(name: str) -> Any:
    """The operation of a name such as `aten::add.Tensor`; `None` if torch does not show it."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def private_slot_holder() -> str | None:
    """The name of the backend that holds torch's one private slot, if one does."""
    name: str = _any_torch._C._get_privateuse1_backend_name()
    taken = name != _FREE_SLOT or hasattr(torch, name) or _any_torch._C._accelerator_getAccelerator() == _slot()
    return name if taken else None


def knows_device_type(name: str) -> bool:
    """Whether torch has a type of device by this name: its own, or that of the backend in the private slot."""
    return name in _OWN_TYPES or name == _any_torch._C._get_privateuse1_backend_name()


_OWN_TYPES: Final = frozenset(("cpu", "cuda", "xpu", "mps", "hpu", "mtia"))
_FREE_SLOT: Final = "privateuseone"


def _slot() -> torch.device:
    return torch.device(_FREE_SLOT)


def take_private_slot(name: str, module: Any) -> None:
    """Makes a module the backend in torch's private slot, for the life of this process."""
    registration = importlib.import_module("torch.utils.backend_registration")
    registration._setup_privateuseone_for_python_backend(name, backend_module=module, device_guard=_new_private_guard())
    importlib.import_module("torch.utils._device")._device_constructors()  # cached: some are about to be replaced


def number_device_contexts(numbered: Callable[[Any], Any]) -> None:
    """Lets `with torch.device(...)` and `torch.set_default_device` take what a function makes of their device."""
    kind: Any = importlib.import_module("torch.utils._device").DeviceContext
    original = kind.__init__

    @functools.wraps(original)
    def init(context: Any, device: Any) -> None:
        original(context, device)
        context.device = numbered(context.device)

    kind.__init__ = init


class _ErrorSetAside(threading.local):
    """An error that was under way in a thread when torch asked for the type of the private slot's devices."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def take(self) -> BaseException | None:
        """Hands it over."""
        error, self.error = self.error, None
        return error


_set_aside = _ErrorSetAside()
_raise_what_is_under_way: Final[Callable[[], object]] = ctypes.PYFUNCTYPE(ctypes.c_void_p)(
    ("PyErr_Occurred", ctypes.pythonapi)
)
"""Raises the error that C++ has not yet turned into one of its own, if there is one."""


def _new_private_guard() -> Any:
    """What torch asks about the devices of the private slot: only their type, and that often.

    It also asks while an error of a hook or a kernel leaves a node of autograd. A call that succeeds while an error is
    under way is an error to Python, and there torch can only end the process. So the error is set aside; torch then
    says that there was one and does not know which, and who has called the engine puts it back.
    """

    class PrivateGuard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            try:
                _raise_what_is_under_way()
            except BaseException as error:
                _set_aside.error = error
            return _PRIVATE_TYPE

    return PrivateGuard()


_PRIVATE_TYPE: Final[Any] = _any_torch._C._autograd.DeviceType.PrivateUse1


class _Trigger(torch.autograd.Function):
    """A node of autograd that does what it is told when a backward pass comes to it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, told: list[Callable[[], None]]) -> torch.Tensor:
        ctx.told = told
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        ctx.told[0]()
        return None, None


class _TriggerOfThread(threading.local):
    """The trigger of a thread: backward passes of two threads do not get into each other's way."""

    def __init__(self) -> None:
        self.told: list[Callable[[], None]] = []
        self.node: torch.Tensor | None = None
        self.is_inside = False


class EngineOfPrivateSlot:
    """Runs backward passes of devices in the private slot, in the thread that torch has for its first device.

    Torch's guard for backends in Python says that there is one device, and torch's engine has a thread for each that
    the guard knows; a node on a second device is an internal error. So the pass is begun as one on the first device,
    whose one node runs the real pass with torch's threads switched off. Torch carries the state of the calling thread
    over, as it does on an accelerator; what is not torch's is carried by a function. A process that made a backward
    pass before it had the devices has no such thread at all; its passes run in the thread that asks for them.
    """

    def __init__(self, device: torch.device, carry: Callable[[], Callable[[], None]]) -> None:
        self._carry = carry
        self._engine: Any = _any_torch.autograd.Variable._execution_engine
        self._device = device
        self._here = _TriggerOfThread()
        self._has_thread: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        outcome: Future[Any] = Future()
        arrive = self._carry()

        def run() -> None:
            arrive()
            _set_aside.take()  # what is left of an error that somebody has dealt with
            was_inside, self._here.is_inside = self._here.is_inside, True
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    outcome.set_result(self._engine.run_backward(*args, **kwargs))
            except BaseException as error:
                outcome.set_exception((isinstance(error, SystemError) and _set_aside.take()) or error)
            finally:
                self._here.is_inside = was_inside

        if self._here.is_inside or not self._finds_thread():
            run()
        else:
            self._pull(run)
        return outcome.result()

    def _finds_thread(self) -> bool:
        if self._has_thread is None:
            try:
                self._pull(lambda: None)
                self._has_thread = True
            except RuntimeError as error:
                if "device_ready_queues_" not in str(error):
                    raise
                self._has_thread = False
        return self._has_thread

    def _pull(self, run: Callable[[], None]) -> None:
        here = self._here
        if here.node is None:
            with without_function_modes(), without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
                trigger: Any = _Trigger
                here.node = trigger.apply(torch.zeros((), device=self._device, requires_grad=True), here.told)
        here.told[:] = [run]
        roots, gradients = (here.node,), (here.node.detach(),)
        try:
            self._engine.run_backward(
                roots, gradients, True, False, (), allow_unreachable=True, accumulate_grad=True
            )  # which keeps the trigger for the next time
        finally:
            here.told.clear()


def run_backward_of_private_slot(device: torch.device, carry: Callable[[], Callable[[], None]]) -> None:
    """Lets all backward passes of this process go by `EngineOfPrivateSlot`.

    Args:
        device: The first device of the slot.
        carry: Called in the thread that asks for a pass; gives what to call in the thread that runs it.
    """
    _any_torch.autograd.Variable._execution_engine = EngineOfPrivateSlot(device, carry)


def let_data_move(type_: str) -> None:
    """Lets `tensor.data = ...`, and with it `module.to(device)`, keep its tensor when that moves to a type of device.

    Torch does so between the types that it knows to be alike, and the private slot's is not one of them.
    """
    are_alike, data = torch._has_compatible_shallow_copy_type, _any_torch.Tensor.data

    def crosses(old: torch.Tensor, new: torch.Tensor) -> bool:
        return old.device.type != new.device.type and type_ in (old.device.type, new.device.type)

    def can_be_set(input: torch.Tensor, from_: torch.Tensor) -> bool:  # torch's compiler compares the names
        return crosses(input, from_) or are_alike(input, from_)

    def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if crosses(tensor, value):
            _move(tensor, value)
        data.__set__(tensor, value)

    _any_torch._has_compatible_shallow_copy_type = can_be_set
    _any_torch.Tensor.data = property(data.__get__, put)


def _move(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes a tensor one on the device of another, with its gradient and its hooks."""
    target: Any = tensor
    gradient, target.grad = target.grad, None
    # Torch keeps hooks with the memory, and looks for them in these dicts, which handles that remove hooks know too.
    before, after = hooks_of(target)
    target._backward_hooks = target._post_accumulate_grad_hooks = None
    _any_torch._C._swap_tensor_impl(target, value.detach().requires_grad_(tensor.requires_grad))
    target._backward_hooks, target._post_accumulate_grad_hooks = before, after
    target.grad = None if gradient is None else gradient.to(value.device, value.dtype)


def replace_accelerator_functions(functions: dict[str, Callable[..., Any]]) -> None:
    """Lets `torch.accelerator` ask these, which torch's guard for backends in Python answers with constants."""
    for name, function in functions.items():
        setattr(torch._C, f"_accelerator_{name}", function)


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is marked as the negative of what lies in its memory."""
    found: torch.Tensor = _any_torch._neg_view(tensor)
    return found
