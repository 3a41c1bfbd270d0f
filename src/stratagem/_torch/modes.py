"""Modes that see or change what torch computes."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C import _len_torch_function_stack
from torch._dispatch.python import enable_python_dispatcher
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode"]

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

without_function_modes: Final[Callable[[], contextlib.AbstractContextManager[Any]]] = torch._C.DisableTorchFunction
"""A block in which no `TorchFunctionMode` of this thread counts, nor what subclasses say."""
