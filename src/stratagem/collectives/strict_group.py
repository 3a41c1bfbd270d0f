"""A process group of torch.distributed for strict devices: what NCCL is for GPUs.

It begins its work and goes on, as NCCL does. Underneath gloo moves the memory of the host that stands for the
device's, so that nothing is copied for it.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed

from stratagem import _torch
from stratagem.devices.kind_table import STRICT_GROUP
from stratagem.devices.strict import backend, counts, device_memory, streams
from stratagem.devices.strict.slot import HELD

_c10d: Final[Any] = torch.distributed


@final
class StrictGroup(_c10d.ProcessGroup):  # type: ignore[misc]
    """The replicas that exchange tensors of strict devices.

    Args:
        gloo: The group of the same replicas that does the work.
        rank: Which replica this is.
        size: How many there are.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Sums tensors, in place."""
        return self._begin("allreduce", tensors[0], self._gloo.allreduce, _hosts(tensors), *_given(opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Gives all what one has, in place."""
        return self._begin("broadcast", tensors[0], self._gloo.broadcast, _hosts(tensors), opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Gives all what each has."""
        both = [_hosts(each) for each in outputs], _hosts(inputs)
        return self._begin("allgather", inputs[0], self._gloo.allgather, *both, *_given(opts))

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        gather = _torch.collective_groups.allgather_into
        return self._begin("allgather", source, gather, self._gloo, *_hosts([output, source]))

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, outputs: list[int], inputs: list[int], opts: Any = None
    ) -> Any:
        """Gives each its part of what each has."""
        both = _hosts([output, source])
        return self._begin("alltoall", source, self._gloo.alltoall_base, *both, outputs, inputs, *_given(opts))

    def barrier(self, opts: Any = None) -> Any:
        """Waits until all are there."""
        return self._gloo.barrier(*_given(opts))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What torch calls it."""
        return STRICT_GROUP

    def shutdown(self) -> None:
        """Cuts the connections."""
        self._gloo.shutdown()

    def _begin(self, name: str, tensor: torch.Tensor, begin: Callable[..., Any], *args: Any) -> Any:
        if tensor.device.type == HELD.torch_type:
            index = tensor.device.index
            counts.note_kernel(name, index, streams.current_stream_number(index))
        return begin(*args)


def _hosts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    with _torch.modes.without_function_modes():
        return [device_memory.to_host(each) if each.device.type == HELD.torch_type else each for each in tensors]


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> StrictGroup:
    return StrictGroup(_c10d.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def _register() -> None:
    _c10d.Backend.register_backend(STRICT_GROUP, _create, devices=[HELD.torch_type, "cpu"])


backend.when_registered(_register)
