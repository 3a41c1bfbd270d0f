"""Any other accelerator that torch reports through `torch.accelerator`, such as a backend that took the private slot.

Its vendor names it by `torch.utils.rename_privateuse1_backend`, gives it a module after the model of `torch.cuda` and
registers a backend of torch.distributed for it; all of that is found through torch.
"""

import importlib
import sys
from typing import Any, Final

import torch

from stratagem import _torch
from stratagem.devices.accelerators import TorchAccelerator
from stratagem.errors import DeviceNotFoundError

_torch_modules: Final[Any] = torch


def accelerator(kind: str) -> TorchAccelerator:
    """Those of this machine, by torch's own count."""
    torch_type = kind.lower()
    return TorchAccelerator(kind, torch_type, _Counted(getattr(_torch_modules, torch_type, None)))


class _Counted:
    """The vendor's module, with the number of devices that `torch.accelerator` reports."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def device_count(self) -> int:
        try:
            return int(torch.accelerator.device_count())
        except RuntimeError:  # a name was taken, and nothing has been put behind it
            return 0


def module_of(torch_type: str) -> str | None:
    """The module that brings a type of device into the private slot of torch; `None` for torch's own types."""
    if _torch.private_slot.holder() != torch_type:
        return None
    return str(getattr(getattr(_torch_modules, torch_type, None), "__name__", torch_type))


def device(torch_type: str, index: int | None, module: str) -> torch.device:
    """Names a device of a vendor's, also in a process that has not loaded the vendor's package yet.

    Raises:
        DeviceNotFoundError: The package cannot be loaded here, or brings no such devices.
    """
    why = "it brings no such devices"
    if _torch.private_slot.holder() != torch_type and module not in sys.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            why = str(error)
    if _torch.private_slot.holder() != torch_type:
        raise DeviceNotFoundError(
            f"devices of type {torch_type!r} come from {module!r}, which this process cannot load ({why}); replicas "
            f"are processes of their own: install that package so that they can import it"
        )
    return torch.device(torch_type) if index is None else torch.device(torch_type, index)
