"""Process groups, which torch.distributed calls by these names."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

_any_torch: Final[Any] = torch  # whose annotations leave some of these out


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
