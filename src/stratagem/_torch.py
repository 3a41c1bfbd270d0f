"""Everything private of torch that stratagem relies on, under names of its own.

Torch may change these without notice; with a new torch this is the file to look through, with `_tree` for nestings.
What follows has been so since torch 2.2, unless it says otherwise. Aliases and `attrgetter`s cost no call of Python
where they are used for every tensor. The overrides of torch's symbolic shapes stay with their class, in
`graphs/symbolic_sizes.py`, and names of operations (`aten._to_copy`) are no private names.
"""

import contextlib
import importlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch._C import _len_torch_function_stack
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as _shapes_config
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import optimizer as _optimizers
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = ["BatchNorm", "DeviceContext", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "pin_memory"]

_any_torch: Final[Any] = torch  # whose annotations leave some of these out

# Tensors

version_of: Final[Callable[[Any], int]] = operator.attrgetter("_version")
"""How often a tensor was written to, by autograd's count; not of inference tensors, and not through `.data`."""

base_of: Final[Callable[[Any], torch.Tensor | None]] = operator.attrgetter("_base")
"""The tensor that a view is of; autograd keeps it."""

is_view: Final[Callable[[torch.Tensor], bool]] = torch.Tensor._is_view
"""Whether autograd knows a tensor as a view of another."""

sparse_values: Final[Callable[[torch.Tensor], torch.Tensor]] = _any_torch.Tensor._values
"""The values of a sparse COO tensor, coalesced or not; `values()` refuses the latter."""

wrapper_subclass: Final = _any_torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a form and no memory."""

post_accumulate_hooks: Final[Callable[[Any], Any]] = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_post_accumulate_grad_hook` on a parameter; `None` or empty without any."""

foreach_copy_: Final = torch._foreach_copy_
"""Writes a list of tensors into another in one call; as its fellows, what torch's optimizers are made of."""

foreach_lerp_: Final = torch._foreach_lerp_
foreach_zero_: Final = torch._foreach_zero_


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and objects hold the memory of a tensor; since torch 2.1."""
    return int(_any_torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# Modules

MODULE_PARTS: Final = ("_modules", "_parameters", "_buffers")
"""The dicts in which a module holds what is part of it."""

MODULE_HOOKS: Final = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks"),
)
"""The dicts in which it holds its hooks."""

buffers_of: Final[Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]] = operator.attrgetter("_buffers")
"""The dict of a module's own buffers."""


def check_input_dim(kind: Any, module: torch.nn.Module, value: torch.Tensor) -> None:
    """Refuses an input that a class of batch normalizations does not take."""
    kind._check_input_dim(module, value)


# Optimizers and schedulers


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


def set_compiling(flag: bool) -> bool:
    """Sets what `torch.compiler.is_compiling()` says, and returns what it said."""
    before: bool = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    return before


# Autograd

current_autograd_node: Final[Callable[[], Any]] = _any_torch._C._current_autograd_node
"""The node whose backward this thread runs; `None` outside a backward pass."""

next_sequence_number: Final[Callable[[], int]] = _any_torch.autograd._get_sequence_nr
"""The number that autograd's next node gets in this thread."""


def sequence_number(node: Any) -> int:
    """The number that a node of autograd got when it was made."""
    return int(node._sequence_nr())


# Operations and modes

schema_of: Final[Callable[[Any], Any]] = operator.attrgetter("_schema")
"""What an operation of `torch.ops` takes and returns."""

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


def nccl_options(timeout: timedelta) -> Any:
    """The options of a `ProcessGroupNCCL`."""
    options = _any_torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def set_timeout(group: Any, timeout: timedelta) -> None:
    """How long operations of a group may take from now on."""
    group._set_default_timeout(timeout)


def allgather_into(group: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
    """Begins to gather the tensors of all into one."""
    return group._allgather_base(target, source)
