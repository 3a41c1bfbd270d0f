"""What surrounds a run in the main program, and must surround it in every replica too.

Gradient mode and autocast hold until the function returns. What torch and the process are set to holds until the main
program sets it otherwise; filters of `warnings` that a step sets hold for its replica.
"""

import contextlib
import functools
import json
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import torch

from stratagem import _torch
from stratagem.devices import kind_table
from stratagem.placement import log, resolution
from stratagem.processes.packing import travels_by_value


class _Setting(NamedTuple):
    """Something that the whole process is set to, as a number, a text or a tuple of them."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


class Surroundings(NamedTuple):
    """What surrounds a run, in numbers and texts."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, str], ...]
    autocast_cache: bool
    settings: tuple[Any, ...]
    warnings: str
    logs: bool


def surroundings() -> Surroundings:
    """Those of this moment."""
    return Surroundings(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(
            (kind, _name(torch.get_autocast_dtype(kind)))
            for kind in kind_table.autocast_types()
            if torch.is_autocast_enabled(kind)
        ),
        torch.is_autocast_cache_enabled(),
        tuple([setting.read() for setting in _SETTINGS]),
        _plain_filters(tuple(warnings.filters)),
        bool(log.listening()),
    )


def surrounded_by(wanted: Surroundings) -> contextlib.AbstractContextManager[Any]:
    """Sets this process as another was: until the block ends, or for good what holds for the whole process."""
    for setting, value in zip(_SETTINGS, wanted.settings, strict=True):
        if setting.read() != value:
            setting.write(value)
    _filters.set(wanted.warnings)
    with contextlib.ExitStack() as put_back:
        if wanted.inference:
            put_back.enter_context(torch.inference_mode())
        if torch.is_grad_enabled() != wanted.grad:
            put_back.enter_context(torch.set_grad_enabled(wanted.grad))
        for kind, dtype in wanted.autocast:
            autocast = torch.autocast(kind, getattr(torch, dtype), cache_enabled=wanted.autocast_cache)
            put_back.enter_context(autocast)
        return put_back.pop_all()


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


_SMALLEST_NORMAL: Final = sys.float_info.min


def _flushes_denormal() -> bool:
    return _SMALLEST_NORMAL / 2 == 0.0  # torch does not say


def _arguments() -> tuple[str, ...]:
    return tuple(map(str, getattr(sys, "argv", ())))


def _set_arguments(arguments: tuple[str, ...]) -> None:
    sys.argv = list(arguments)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return None


def _enter_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


_SETTINGS: Final = (
    _Setting(lambda: _name(torch.get_default_dtype()), lambda name: torch.set_default_dtype(getattr(torch, name))),
    _Setting(_deterministic, lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1])),
    _Setting(_anomalies, lambda both: torch.autograd.set_detect_anomaly(*both)),
    _Setting(_flushes_denormal, torch.set_flush_denormal),
    _Setting(_torch.kernel_choice.precision_of_products, _torch.kernel_choice.set_precision_of_products),
    _Setting(_torch.kernel_choice.choice_of_kernels, _torch.kernel_choice.set_choice_of_kernels),
    _Setting(_arguments, _set_arguments),
    _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting(_folder, _enter_folder),
    _Setting(resolution.is_soft, resolution.set_soft),
    _Setting(log.is_printing, lambda prints: log.set_printing(prints, mapping=False)),
)


@functools.lru_cache(maxsize=8)
def _plain_filters(filters: tuple[Any, ...]) -> str:
    """The filters of `warnings` in one text, but for those of a category that replicas do not know by its name."""
    return json.dumps(
        [
            (action, _pattern(message), category.__module__, category.__qualname__, _pattern(module), line)
            for action, message, category, module, line in filters
            if not travels_by_value(category)
        ]
    )


def _pattern(text: str | re.Pattern[str] | None) -> str:
    return text.pattern if isinstance(text, re.Pattern) else text or ""


@final
class _Filters:
    """The filters of `warnings` that this process was given."""

    def __init__(self) -> None:
        self._plain = ""
        self._missing: list[str] = []  # modules of categories that are not loaded: so far nothing can warn so

    def set(self, plain: str) -> None:
        """Takes those of another process, if they are others or more of them can be taken than before."""
        if plain == self._plain and not any(home in sys.modules for home in self._missing):
            return
        wanted = json.loads(plain)
        warnings.resetwarnings()
        for action, message, home, name, module, line in wanted:
            category = _category(home, name)
            if category is not None:
                warnings.filterwarnings(action, message, category, module, line, append=True)
        self._plain, self._missing = plain, [each[2] for each in wanted if each[2] not in sys.modules]


_filters: Final = _Filters()


def _category(home: str, name: str) -> type[Warning] | None:
    """A category of warnings by its name; `None` where this process does not have it."""
    try:
        return operator.attrgetter(name)(sys.modules[home])  # type: ignore[no-any-return]
    except (KeyError, AttributeError):
        return None
