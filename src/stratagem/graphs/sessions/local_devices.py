"""The devices of this process, for sessions: names, threads, variables, memory limits.

Owns what a session holds of this process, and that it is let go when the session ends.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import final

import torch

from stratagem.devices import kind_table, lookup
from stratagem.devices.device import LogicalDevice
from stratagem.devices.device_spec import DeviceSpec, parse_kind
from stratagem.devices.inventory import Inventory, this_process
from stratagem.devices.kind_table import CPU, GPU
from stratagem.errors import DeviceConfigurationError, DeviceNotFoundError
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
        variables: Keeps the values of variables on a device; by default they are this session's.
    """

    shares_memory = True

    def __init__(
        self,
        config: SessionConfig,
        job: str = _JOB,
        task: int = 0,
        variables: Callable[[NodePlace], dict[Node, torch.Tensor]] = lambda place: {},
    ) -> None:
        self._inventory: Inventory = this_process()
        self._devices = _SessionDevices(self._inventory, config)
        self._soft = config.allow_soft_placement
        self._options: GPUOptions = config.gpu_options
        self._job, self._task = job, task
        self._variables = variables
        num_at_once = config.inter_op_parallelism_threads
        self._turns = threading.Semaphore(num_at_once) if num_at_once else contextlib.nullcontext()
        self._threads: dict[NodePlace, DeviceThread] = {}
        self._held = contextlib.ExitStack()
        self._held.enter_context(self._inventory.in_use("Session()"))

    # What there is

    def devices(self) -> list[NodePlace]:
        """All devices, the CPU first."""
        return [self._place(device) for device in self._devices.logical()]

    def place(self, spec: DeviceSpec, operation: str) -> NodePlace | None:
        self._require_here(spec, operation)
        here = dataclasses.replace(spec, job=None, replica=None, task=None)
        device = resolution.resolve(here, operation, soft=self._soft, inventory=self._devices)
        return None if device is None else self._place(device)

    def default(self, spec: DeviceSpec, operation: str) -> NodePlace:
        self._require_here(spec, operation)
        best = next(found[0] for kind in kind_table.by_preference() if (found := self._devices.logical(kind)))
        return self._place(best)

    def mapping(self) -> str:
        """What the devices are, as TensorFlow prints it."""
        return mapping_text(self._inventory, self._devices)

    # What runs there

    def thread(self, place: NodePlace) -> DeviceThread:
        """The thread of a device, started when it is first needed."""
        if place not in self._threads:
            logical = self._devices.resolve(place.device)
            device = Device(logical, place.name, self._limit_bytes(logical), self._variables(place))
            self._threads[place] = DeviceThread(device, f"stratagem-session{place.device}", self._turns)
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


@final
class _SessionDevices:
    """What a session may use of the devices of this process.

    Args:
        inventory: All of them.
        config: The settings of the session.
    Raises:
        DeviceConfigurationError: The settings name a GPU that does not exist, or more CPUs than shares.
    """

    def __init__(self, inventory: Inventory, config: SessionConfig) -> None:
        self._inventory = inventory
        self._visible = config.gpu_options.visible
        self._counts = {parse_kind(kind): count for kind, count in config.device_count.items()}
        self._num_threads = config.intra_op_parallelism_threads
        self.logical()

    def logical(self, kind: str | None = None) -> list[LogicalDevice]:
        """The devices of one kind or of all, each kind numbered from 0."""
        kinds = kind_table.names() if kind is None else (kind,)
        return [
            dataclasses.replace(device, index=index, num_threads=self._num_threads or device.num_threads)
            for each in kinds
            for index, device in enumerate(self._chosen(each))
        ]

    def resolve(self, device: DeviceSpec | str) -> LogicalDevice:
        """The device of that name.

        Raises:
            DeviceNotFoundError: There is none, or the settings hide it.
        """
        spec = lookup.local_spec(device)
        if not self._inventory.logical(spec.device_type):
            return self._inventory.resolve(device)  # says why there are none
        return lookup.find(device, spec, self.logical(spec.device_type), "logical", None)

    def _chosen(self, kind: str) -> list[LogicalDevice]:
        devices = self._inventory.logical(kind)
        if kind == GPU and self._visible:
            if strange := [index for index in self._visible if index >= len(devices)]:
                raise DeviceConfigurationError(
                    f"visible_device_list names GPU {strange[0]}; there are {len(devices)}, numbered from 0"
                )
            devices = [devices[index] for index in self._visible]
        count = self._counts.get(kind, len(devices))
        if kind == CPU and count > len(devices):
            if len(devices) > 1:
                raise DeviceConfigurationError(
                    f"device_count asks for {count} CPUs; this one is divided into {len(devices)} shares. Divide it "
                    f"into more with sg.config.set_logical_device_configuration"
                )
            devices = devices * count
        return devices[:count]


def first_value(variable: Node) -> torch.Tensor:
    """What a variable begins with."""
    meta = variable.outputs[0]
    value = torch.empty(meta.shape, dtype=meta.dtype)
    if variable.initializer is not None:
        with torch.no_grad():
            variable.initializer(value)
    return value
