"""The devices of this process, for sessions: names, threads, variables, memory limits.

Owns what a session holds of this process, and that it is let go when the session ends.
"""

import contextlib
import dataclasses
from typing import final

import torch

from stratagem.devices.device import LogicalDevice
from stratagem.devices.device_spec import CPU, KINDS, DeviceSpec
from stratagem.devices.inventory import Inventory, this_process
from stratagem.errors import DeviceNotFoundError
from stratagem.graphs.nodes import Node
from stratagem.graphs.sessions.compute import Device
from stratagem.graphs.sessions.device_worker import DeviceThread
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.schedule import Run
from stratagem.graphs.sessions.session_config import GPUOptions, SessionConfig
from stratagem.placement import resolution
from stratagem.placement.log import mapping_text

_JOB = "localhost"


@final
class LocalFleet:
    """The logical devices of this process as those of one task.

    Args:
        config: The settings of the session.
        job: What the task is called.
        task: Its index.
    """

    shares_memory = True

    def __init__(self, config: SessionConfig, job: str = _JOB, task: int = 0) -> None:
        self._inventory: Inventory = this_process()
        self._soft = config.allow_soft_placement
        self._options: GPUOptions = config.gpu_options
        self._job, self._task = job, task
        self._threads: dict[NodePlace, DeviceThread] = {}
        self._held = contextlib.ExitStack()
        self._held.enter_context(self._inventory.in_use("Session()"))

    # What there is

    def devices(self) -> list[NodePlace]:
        """All devices, the CPU first."""
        return [self._place(device) for device in self._inventory.logical()]

    def place(self, spec: DeviceSpec, operation: str) -> NodePlace | None:
        self._require_here(spec, operation)
        here = dataclasses.replace(spec, job=None, replica=None, task=None)
        device = resolution.resolve(here, operation, soft=self._soft, inventory=self._inventory)
        return None if device is None else self._place(device)

    def default(self, spec: DeviceSpec, operation: str) -> NodePlace:
        self._require_here(spec, operation)
        best = next(found[0] for kind in (*KINDS[1:], CPU) if (found := self._inventory.logical(kind)))
        return self._place(best)

    def mapping(self) -> str:
        """What the devices are, as TensorFlow prints it."""
        return mapping_text(self._inventory)

    # What runs there

    def thread(self, place: NodePlace) -> DeviceThread:
        """The thread of a device, started when it is first needed."""
        if place not in self._threads:
            logical = self._inventory.resolve(place.device)
            device = Device(logical, place.name, self._limit_bytes(logical))
            self._threads[place] = DeviceThread(device, f"stratagem-session{place.device}")
        return self._threads[place]

    def worker(self, place: NodePlace) -> DeviceThread:
        return self.thread(place)

    def prepare(self, variable: Node, place: NodePlace, *, anew: bool = False) -> None:
        """Gives a variable its first value, unless it has one."""
        device = self.thread(place).device
        if variable.initializer is not None and (anew or variable not in device.variables):
            device.write(variable, first_value(variable))

    def commit(self, run: Run, places: dict[Node, NodePlace]) -> None:
        """Gives the variables that a run has assigned their new values."""
        for variable, value in run.assigned.items():
            self.thread(places[variable]).device.write(variable, run.owned(value))

    def abandon(self, run: Run) -> None:
        """A run was given up; its parts see that themselves."""

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads, and lets go of the devices."""
        for thread in self._threads.values():
            thread.close()
        for thread in self._threads.values():
            if wait:
                thread.join()
        self._threads.clear()
        self._held.close()

    # Parts of the above

    def _place(self, device: LogicalDevice) -> NodePlace:
        return NodePlace(self._job, self._task, device.device_type, device.index)

    def _require_here(self, spec: DeviceSpec, operation: str) -> None:
        if spec.job not in (None, self._job) or spec.replica or spec.task not in (None, self._task):
            raise DeviceNotFoundError(
                f"{operation} was placed on {str(spec)!r}, a device of another task; this session has those of "
                f"/job:{self._job}/replica:0/task:{self._task}. Make it on a cluster: sg.Session(server.target)"
            )

    def _limit_bytes(self, device: LogicalDevice) -> int | None:
        """Of what stands in for an accelerator; a real one's allocator is told."""
        fraction = self._options.per_process_gpu_memory_fraction if device.device_type != CPU else None
        accelerator = self._inventory.accelerator(device.physical)
        if accelerator is None:
            limit_bytes = device.memory_limit_bytes
            return limit_bytes if fraction is None or limit_bytes is None else int(fraction * limit_bytes)
        index = device.physical.index
        if fraction is not None:
            self._held.callback(accelerator.limit_memory, index, accelerator.memory_fraction(index))
            accelerator.limit_memory(index, fraction)
        grows = device.memory_growth if self._options.allow_growth is None else self._options.allow_growth
        if not grows:
            total_bytes = accelerator.details(index).total_memory_bytes
            accelerator.reserve(index, None if fraction is None else int(fraction * total_bytes))
        return None


def first_value(variable: Node) -> torch.Tensor:
    """What a variable begins with."""
    meta = variable.outputs[0]
    value = torch.empty(meta.shape, dtype=meta.dtype)
    if variable.initializer is not None:
        with torch.no_grad():
            variable.initializer(value)
    return value
