"""Tensors without values, and sizes that are symbols."""

import contextlib
import importlib
import logging
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as _shapes_config

__all__ = ["FakeTensor", "FakeTensorMode"]

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
