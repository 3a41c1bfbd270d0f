"""What modules hold: parts, hooks, parametrizations."""

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize

__all__ = ["BatchNorm"]


def own_tensors(module: Any) -> tuple[torch.Tensor | None, ...]:
    """The parameters and buffers of a module itself; `None` where it has left one out."""
    return (*module._parameters.values(), *module._buffers.values())


def class_of(module: torch.nn.Module) -> type:
    """The class that a program gave a module; a parametrized one has another, made by torch for it alone."""
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        return type(module).__bases__[0]
    return type(module)


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

buffers_of: Final[Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]] = operator.attrgetter("_buffers")
"""The dict of a module's own buffers."""


def check_input_dim(kind: Any, module: torch.nn.Module, value: torch.Tensor) -> None:
    """Refuses an input that a class of batch normalizations does not take."""
    kind._check_input_dim(module, value)
