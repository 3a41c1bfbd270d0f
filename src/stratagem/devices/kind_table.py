"""The kinds of device, one row each: all that the library must know to compute on another kind of accelerator.

Every other file asks here. A row names the file of its vendor in `vendors`, which has what the vendor alone has. A kind
without a row that torch reports through `torch.accelerator` gets one made from what torch says of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Final, final

import torch

from stratagem import _torch
from stratagem.devices import process_groups
from stratagem.devices.accelerators import Accelerator
from stratagem.devices.process_groups import GroupBackend
from stratagem.devices.strict.slot import HELD
from stratagem.devices.vendors import cuda, gaudi, metal, out_of_tree, torch_tpu, tpu_libraries, xpu

CPU, GPU, TPU, XPU, HPU, MPS = "CPU", "GPU", "TPU", "XPU", "HPU", "MPS"


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Args:
        name: What stratagem calls it, such as `GPU`.
        spellings: How users may write it, in lower case.
        torch_type: Its type among torch's devices, such as `cuda`.
        accelerator: Counts, describes and limits those of this machine; `None` for the CPU.
        is_built: Whether this torch could see them, if there were any.
        package: What has to be installed beside torch, if something has.
        group: By what torch.distributed moves its tensors; `None` if by nothing.
        tensor_method: The method of tensors that copies to it, such as `cuda` of `tensor.cuda()`.
        autocast: Whether torch has mixed precision for it.
        streams: Whether work on it is ordered by streams that a program may choose.
        pinned_memory: Whether it copies from pinned memory of the host while the program goes on.
        lacks: Names of torch's functions that have no kernel on it; simulated ones lack them too.
        strict_type: The type of simulated ones that are torch's own (`strict=True`); `None` if there are none.
    """

    name: str
    spellings: tuple[str, ...]
    torch_type: str
    accelerator: Callable[[str], Accelerator] | None = None
    is_built: Callable[[], bool] = lambda: True
    package: str | None = None
    group: GroupBackend | None = None
    tensor_method: str | None = None
    autocast: bool = True
    streams: bool = True
    pinned_memory: bool = True
    lacks: frozenset[str] = frozenset()
    strict_type: str | None = None


_TABLE: Final = (
    DeviceKind(name=CPU, spellings=("cpu",), torch_type="cpu", streams=False, pinned_memory=False),
    DeviceKind(
        name=GPU,
        spellings=("gpu", "cuda", "rocm", "hip"),
        torch_type="cuda",
        accelerator=cuda.accelerator,
        is_built=cuda.is_built,
        group=cuda.NCCL,
        tensor_method="cuda",
        lacks=frozenset(("histogram", "histogramdd", "to_mkldnn")),
        strict_type="gpu",
    ),
    DeviceKind(
        name=TPU,
        spellings=("tpu",),
        torch_type="tpu",
        accelerator=tpu_libraries.accelerator,
        is_built=tpu_libraries.is_built,
        package="torch_tpu or torch_xla",
        group=torch_tpu.TPU_DIST,
        tensor_method="tpu",
        streams=False,
        pinned_memory=False,
        strict_type="tpu",
    ),
    DeviceKind(
        name=XPU,
        spellings=("xpu",),
        torch_type="xpu",
        accelerator=xpu.accelerator,
        is_built=xpu.is_built,
        group=xpu.XCCL,
        tensor_method="xpu",
    ),
    DeviceKind(
        name=HPU,
        spellings=("hpu", "gaudi"),
        torch_type="hpu",
        accelerator=gaudi.accelerator,
        is_built=gaudi.is_built,
        package="habana_frameworks",
        group=gaudi.HCCL,
        tensor_method="hpu",
        pinned_memory=False,
    ),
    DeviceKind(
        name=MPS,
        spellings=("mps",),
        torch_type="mps",
        accelerator=metal.accelerator,
        is_built=metal.is_built,
        streams=False,
        pinned_memory=False,
    ),
)

_TYPES: Final = frozenset(row.torch_type for row in _TABLE)

STRICT_GROUP: Final = "strict"
"""The name of the backend of torch.distributed for strict devices (`collectives/strict_group`)."""


def rows() -> tuple[DeviceKind, ...]:
    """All kinds, the CPU first and then the best first; at the end one that only torch knows of, if there is one."""
    found = torch.accelerator.current_accelerator()  # which wakes no driver
    if found is None or found.type in _TYPES or HELD.has(found.type):
        return _TABLE
    return (*_TABLE, _reported(found.type, process_groups.registered_for(found.type)))


def names() -> tuple[str, ...]:
    """The names of all kinds, in that order."""
    return tuple(row.name for row in rows())


def by_preference() -> tuple[str, ...]:
    """The names of all kinds, the best first: accelerators before the CPU."""
    first, *others = names()
    return (*others, first)


def row_of(name: str) -> DeviceKind:
    """The row of a kind, by its name."""
    return next(row for row in rows() if row.name == name)


def spellings() -> dict[str, str]:
    """What users may write, in capitals, with the kind that it means."""
    return _spellings(HELD.kind, torch.accelerator.current_accelerator())


@functools.cache
def _spellings(*_: object) -> dict[str, str]:
    """For what the kinds depend on."""
    return {spelling.upper(): row.name for row in rows() for spelling in row.spellings}


def described() -> str:
    """The kinds, as an error lists them."""
    return ", ".join(map(_with_other_spellings, rows()))


def _with_other_spellings(row: DeviceKind) -> str:
    first, *others = row.spellings
    *early, last = others or [""]
    return f"{first} (also written {' or '.join(filter(None, (', '.join(early), last)))})" if others else first


def of_torch_type(torch_type: str) -> DeviceKind | None:
    """The kind of torch's devices of a type, strict ones included; `None` for what is no device to compute on."""
    if HELD.has(torch_type):
        return _strict(row_of(HELD.kind))
    return next((row for row in rows() if row.torch_type == torch_type), None)


def accelerator_of(name: str) -> Accelerator | None:
    """Who answers for the real devices of a kind; `None` for the CPU."""
    row = row_of(name)
    is_taken = HELD.has(row.torch_type)  # strict ones have the place in torch that real ones would have
    return None if row.accelerator is None or is_taken else row.accelerator(name)


def copies_from_pinned_memory(torch_type: str) -> bool:
    """Whether devices of that type copy from pinned memory of the host while the program goes on."""
    row = of_torch_type(torch_type)
    return row is not None and row.pinned_memory


def has_streams(torch_type: str) -> bool:
    """Whether work on devices of that type is ordered by streams that a program may choose."""
    row = of_torch_type(torch_type)
    return row is not None and row.streams


def autocast_types() -> tuple[str, ...]:
    """The types of torch's devices that have mixed precision in this process."""
    return _autocast_types(HELD.kind, torch.accelerator.current_accelerator())


def tensor_methods() -> frozenset[str]:
    """The methods of tensors that copy to an accelerator, such as `cuda`."""
    found = {row.tensor_method for row in _known()}
    return frozenset(each for each in found if each is not None)


@functools.cache
def _autocast_types(*_: object) -> tuple[str, ...]:
    """For what the kinds depend on: this is asked for in every run."""
    return tuple(row.torch_type for row in _known() if row.autocast)


def _known() -> Iterator[DeviceKind]:
    """The rows whose type this process has: not those of packages that are not loaded, but that of strict devices."""
    for row in rows():
        if not HELD.has(row.torch_type) and _torch.private_slot.knows_device_type(row.torch_type):
            yield row
    if HELD.kind:
        yield _strict(row_of(HELD.kind))


def _strict(row: DeviceKind) -> DeviceKind:
    """The row of strict devices that stand for a kind: they have all that torch has."""
    torch_type = str(row.strict_type)
    return dataclasses.replace(
        row,
        torch_type=torch_type,
        group=process_groups.registered(STRICT_GROUP),
        tensor_method=torch_type,
        autocast=True,
        streams=True,
        pinned_memory=True,
    )


@functools.cache
def _reported(torch_type: str, group: GroupBackend | None) -> DeviceKind:
    """The row of a kind that only torch knows of. It need not have streams and pinned memory, so that it has none."""
    return DeviceKind(
        name=torch_type.upper(),
        spellings=(torch_type,),
        torch_type=torch_type,
        accelerator=out_of_tree.accelerator,
        group=group,
        tensor_method=torch_type,
        streams=False,
        pinned_memory=False,
    )


def is_cpu_build() -> bool:
    """Whether this torch was built without support for any accelerator."""
    return not any(row.is_built() for row in _TABLE if row.name != CPU and row.package is None)


def strict_kinds() -> tuple[str, ...]:
    """The kinds that can be simulated as devices of torch's own."""
    return tuple(row.name for row in _TABLE if row.strict_type is not None)
