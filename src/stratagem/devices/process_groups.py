"""Says by what torch.distributed moves the tensors of a kind of device, and connects it.

Owns what a backend of torch.distributed is to the library, and how one that a package beside torch has registered is
found. Torch's own backends are made in the files of their vendors (`vendors`); who uses them is `collectives`.
"""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from stratagem import _torch


@dataclasses.dataclass(frozen=True)
class GroupBackend:
    """A backend of torch.distributed.

    Args:
        name: What torch.distributed calls it, such as `nccl`.
        is_available: Whether this process has it.
        connect: Makes a group of it, from a store, the rank, the size and a timeout.
    """

    name: str
    is_available: Callable[[], bool]
    connect: Callable[[Any, int, int, timedelta], Any]


def registered(name: str) -> GroupBackend:
    """A backend that a package beside torch registers with torch.distributed, such as `hccl`."""
    groups = _torch.collective_groups
    return GroupBackend(name, partial(groups.is_group_registered, name), partial(groups.registered_group, name))


def registered_for(torch_type: str) -> GroupBackend | None:
    """The backend that a package has registered for a type of device, if one has."""
    name = _torch.collective_groups.registered_group_of(torch_type)
    return None if name is None else registered(name)
