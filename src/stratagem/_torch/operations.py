"""Operations of torch by name, their schemas and kernels."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

_any_torch: Final[Any] = torch  # whose annotations leave some of these out

schema_of: Final[Callable[[Any], Any]] = operator.attrgetter("_schema")
"""What an operation of `torch.ops` takes and returns."""

takes_numbers_for_tensors: Final[Callable[[str], bool]] = operator.attrgetter("_C._should_allow_numbers_as_tensors")(
    torch
)
"""Whether an operation of that name, called from Python, takes a number in the place of a tensor."""

overload_of: Final[Callable[[Any], str]] = operator.attrgetter("_overloadname")
"""Which overload of its packet an operation is."""

_CPU_ONLY: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


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
