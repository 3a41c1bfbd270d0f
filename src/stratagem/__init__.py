"""One training program on one device, on many devices or on many machines, by choosing a strategy.

Names are loaded when they are first used, so that `import stratagem` is instant and starts nothing.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem import config as config
    from stratagem import devices as devices
    from stratagem import errors as errors
    from stratagem.devices import DeviceSpec as DeviceSpec
    from stratagem.devices import LogicalDevice as LogicalDevice
    from stratagem.devices import OutOfMemoryError as OutOfMemoryError
    from stratagem.devices import PhysicalDevice as PhysicalDevice
    from stratagem.errors import StratagemError as StratagemError

__version__ = "0.1.0.dev0"

# What `sg.NAME` is: a module of its own, or a name inside one.
_MODULES = ("config", "devices", "errors")
_NAMES = {
    "DeviceSpec": "devices",
    "LogicalDevice": "devices",
    "OutOfMemoryError": "devices",
    "PhysicalDevice": "devices",
    "StratagemError": "errors",
}

__all__ = [*_MODULES, *_NAMES, "__version__"]  # noqa: PLE0604  # all are names


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"stratagem.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"stratagem.{_NAMES[name]}"), name)
    close = difflib.get_close_matches(name, __all__, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(__all__)}"
    raise AttributeError(f"module 'stratagem' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
