"""Keeps the devices of this process: which exist, which are visible, how they are divided.

Owns the process-wide configuration, the rule that it is frozen while devices are in use, and the
look-up of a device by name. Reads hardware through `host` and `accelerators`; the arithmetic of
shares is `division`'s, readings and limits of memory are `memory`'s and `serving`'s.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch

from stratagem import _env
from stratagem._caller import calling_line, warn_caller
from stratagem.devices import absence, kind_table, lookup, masks, requested, simulated, usage
from stratagem.devices.accelerators import Accelerator, why_no_limits
from stratagem.devices.device import DeviceDetails, LogicalDevice, LogicalDeviceConfiguration, PhysicalDevice
from stratagem.devices.device_spec import parse_kind
from stratagem.devices.division import Share, divide, split_cores
from stratagem.devices.host import Host
from stratagem.devices.kind_table import CPU, GPU
from stratagem.devices.lookup import DeviceLike
from stratagem.devices.requested import DeviceRequest
from stratagem.devices.simulated import Simulation
from stratagem.devices.strict import backend
from stratagem.devices.vendors import torch_xla
from stratagem.errors import (
    DeviceConfigurationError,
    DeviceNotFoundError,
    DevicesInUseError,
    DeviceTypeError,
    DeviceWarning,
    EnvironmentVariableError,
)


class Configuration(NamedTuple):
    """What a program has set, and what it found: its process, its variables of the environment, and its cores."""

    program: int
    variables: tuple[str | None, ...]
    cores: tuple[int, ...]
    simulated: dict[str, Simulation]
    visible: dict[str, tuple[PhysicalDevice, ...]]
    parts: dict[PhysicalDevice, tuple[LogicalDeviceConfiguration, ...]]
    growth: dict[PhysicalDevice, bool]


@final
class Inventory:
    """All devices of one process and their configuration.

    Args:
        host: The machine.
        accelerators: Who answers for its accelerators; by default the rows of `kind_table`.
    """

    def __init__(self, host: Host | None = None, accelerators: Sequence[Accelerator] | None = None) -> None:
        self.host = host or Host()
        self._accelerators = None if accelerators is None else {each.kind: each for each in accelerators}
        self._simulated: dict[str, Simulation] = {}
        self._visible: dict[str, tuple[PhysicalDevice, ...]] = {}
        self._parts: dict[PhysicalDevice, tuple[LogicalDeviceConfiguration, ...]] = {}
        self._growth: dict[PhysicalDevice, bool] = {}
        self._uses: list[str] = []
        self._warned: set[str] = set()

    # What exists

    def physical(self, kind: str | None = None) -> list[PhysicalDevice]:
        """Every device, of one kind or of all, the CPU first."""
        return [device for each in _kinds(kind) for device in self._physical_of(each)]

    def details(self, device: DeviceLike) -> DeviceDetails:
        """What the hardware is; on a real accelerator this wakes its driver, but takes no memory."""
        return self._details(self.find_physical(device))

    def accelerator(self, device: PhysicalDevice) -> Accelerator | None:
        """Who answers for an accelerator, real or strict; `None` for the CPU and what it simulates otherwise."""
        if not device.simulated:
            return self._real_accelerator(device.device_type)
        simulation = self._simulations()[device.device_type]
        return self._strict_accelerator(simulation) if simulation.strict else None

    def simulate(
        self, kind: str, count: int, memory_limit: float | None = None, *, strict: bool = False
    ) -> list[PhysicalDevice]:
        """Puts simulated devices in the place of all devices of that kind."""
        simulation = Simulation(kind, count, memory_limit, strict)
        simulated.check_fit((self._simulations() | {simulation.kind: simulation}).values(), self._host_memory_bytes)
        call = f"simulate_devices({kind!r}, {count})"
        self._require_unused(call)
        if (request := self._request()) and simulation.kind not in request.counts:
            raise _contradiction(call, request, f"leaves no {simulation.kind}")
        if simulation.strict:
            self._strict_accelerator(simulation)
        self._simulated[simulation.kind] = simulation
        self._visible.pop(simulation.kind, None)
        for configured in (self._parts, self._growth):
            for device in [each for each in configured if each.device_type == simulation.kind]:
                del configured[device]
        return self.physical(simulation.kind)

    def simulated_kinds(self) -> list[str]:
        """The kinds that are simulated, hidden ones too."""
        return sorted(self._simulations())

    def has_strict_devices(self) -> bool:
        """Whether some of them are devices of torch's own."""
        return any(each.strict for each in self._simulations().values())

    # What is visible

    def visible(self, kind: str | None = None) -> list[PhysicalDevice]:
        """The physical devices that become logical ones."""
        devices = []
        for each in _kinds(kind):
            existing = self._physical_of(each)
            chosen = self._visible[each] if each in self._visible else self._requested_of(each, self._request())
            # The environment may have changed since they were chosen.
            for gone in [device for device in chosen if device not in existing]:
                self._warn_once(f"{gone.name} was made visible, but does not exist any more")
            devices += [device for device in chosen if device in existing]
        return devices

    def set_visible(self, devices: DeviceLike | Sequence[DeviceLike], kind: str | None = None) -> None:
        """Hides every other device of the kind, or, without a kind, every other accelerator."""
        kinds = [each for each in _kinds(kind) if kind is not None or each != CPU]
        chosen = [self.find_physical(device) for device in lookup.as_list(devices)]
        lookup.refuse_twins(chosen)
        if not chosen and kind is None:
            raise DeviceConfigurationError(
                "devices must not be empty; to hide every GPU write set_visible_devices([], 'GPU')"
            )
        if not chosen and kinds == [CPU]:
            raise DeviceConfigurationError("the CPU cannot be hidden: the program itself runs on it")
        for device in chosen:
            if kind is not None and device.device_type not in kinds:
                raise DeviceConfigurationError(
                    f"{device.name} is not a {str(kind).upper()}; leave the kind out to choose devices of several kinds"
                )
        self._require_unused("set_visible_devices()")
        wanted = {each: tuple(device for device in chosen if device.device_type == each) for each in kinds}
        request = self._request()
        for each, devices_of_kind in wanted.items():
            if request and each != CPU and devices_of_kind != tuple(self._requested_of(each, request)):
                raise _contradiction("set_visible_devices()", request, f"asks for other {each}s")
        self._visible |= wanted

    # How it is divided

    def configure(self, device: DeviceLike, parts: Sequence[LogicalDeviceConfiguration]) -> None:
        """Divides one physical device."""
        physical = self.find_physical(device)
        accelerator = self.accelerator(physical)
        if accelerator is not None and not accelerator.limits_memory and _limits(parts):
            raise DeviceConfigurationError(why_no_limits(accelerator))
        divide(physical, self._details(physical), self._cores(physical), parts)
        if self._parts.get(physical) == tuple(parts):
            return  # the cell of a notebook that is run again, while a strategy uses the devices
        call = f"set_logical_device_configuration({physical.name!r}, ...)"
        self._require_unused(call)
        request = self._request()
        if request and physical.device_type == CPU and request.num_cpus not in (None, len(parts)):
            raise _contradiction(f"{call} with {len(parts)} share(s)", request, f"asks for {request.num_cpus}")
        self._parts[physical] = tuple(parts)

    def configuration(self, device: DeviceLike) -> list[LogicalDeviceConfiguration] | None:
        """How it was divided; `None` if it was not."""
        parts = self._parts_of(self.find_physical(device))
        return None if parts is None else list(parts)

    def set_growth(self, device: DeviceLike, grows: bool) -> None:
        """Whether an accelerator's memory is taken when needed (the default) or all at the start; a kind: of all."""
        physical = self._require_accelerator(device)
        if type(grows) is not bool:
            raise DeviceTypeError(f"memory growth is True or False, got {grows!r}")
        self._require_unused(f"set_memory_growth({physical.name!r}, {grows})")
        of_kind = self.physical(physical.device_type) if lookup.names_a_kind(device) else [physical]
        self._growth |= dict.fromkeys(of_kind, grows)

    def growth(self, device: DeviceLike) -> bool:
        return self._growth.get(self._require_accelerator(device), True)

    def logical(self, kind: str | None = None) -> list[LogicalDevice]:
        """What programs address: the shares of all visible devices, each kind numbered from 0."""
        devices = []
        for each in _kinds(kind):
            shares = [(device, share) for device in self.visible(each) for share in self._shares(device)]
            devices += [self._logical_device(index, *share) for index, share in enumerate(shares)]
        return devices

    def configured(self) -> "Configuration":
        """All that `logical` depends on, quick to compare: equal as long as the devices are the same."""
        chosen = dict(self._simulated), dict(self._visible), dict(self._parts), dict(self._growth)
        return Configuration(usage.program(), _env.device_variables(), self._host_cores, *chosen)

    def adopt(self, configuration: "Configuration") -> None:
        """Takes the devices as another process of this program has configured them."""
        usage.belong_to(configuration.program)
        self._host_cores = configuration.cores
        self._simulated, self._visible = dict(configuration.simulated), dict(configuration.visible)
        self._parts, self._growth = dict(configuration.parts), dict(configuration.growth)
        _env.take_device_variables(configuration.variables)
        self.make_strict()

    def make_strict(self) -> None:
        """Lets torch know the strict devices that are asked for, before a program names one."""
        for simulation in self._simulations().values():
            if simulation.strict:
                try:
                    self._strict_accelerator(simulation)
                except DeviceConfigurationError as error:
                    if simulation.kind in self._simulated:
                        raise
                    raise EnvironmentVariableError(f"{_env.SIMULATE}={_env.simulate()!r}: {error}") from error

    # Finding one by name

    def resolve(self, device: DeviceLike) -> LogicalDevice:
        """The logical device of that name, in any spelling; without an index, the first of its kind."""
        if isinstance(device, PhysicalDevice):
            raise DeviceTypeError(f"{device!r} is a physical device; name a logical one such as 'cpu:0'")
        spec = lookup.local_spec(device)
        why_none = self._why_none(spec.device_type)
        found = lookup.find(device, spec, self.logical(spec.device_type), "logical", why_none)
        if torch_xla.has(found.torch_device):
            torch_xla.load()
        return found

    def best(self) -> tuple[LogicalDevice, ...]:
        """All devices of the best kind: accelerators before the CPU."""
        return tuple(next(filter(None, map(self.logical, kind_table.by_preference()))))

    def select(self, devices: Sequence[DeviceLike] | None = None) -> tuple[LogicalDevice, ...]:
        """The devices of a list of names, or all of the best kind, for replicas that compute by themselves."""
        if devices is None:
            return _by_themselves(self.best())
        if isinstance(devices, str) or not isinstance(devices, Sequence):
            raise DeviceTypeError(f"devices must be a list of device names such as ['cpu:0'], got {devices!r}")
        chosen = tuple(map(self.resolve, devices))
        if not chosen:
            raise DeviceConfigurationError(
                f"devices must not be empty; leave it out to use all {len(self.best())} devices"
            )
        lookup.refuse_twins(chosen)
        return _by_themselves(chosen)

    def find_physical(self, device: DeviceLike) -> PhysicalDevice:
        """The physical device of that name, in any spelling."""
        if isinstance(device, LogicalDevice):
            raise DeviceTypeError(
                f"{device!r} is a logical device; give {device.physical.name!r}, which it is a share of"
            )
        spec = lookup.local_spec(device)
        return lookup.find(device, spec, self.physical(spec.device_type), "physical", self._why_none(spec.device_type))

    # Being in use

    @contextlib.contextmanager
    def in_use(self, by: str) -> Iterator[None]:
        """Freezes the configuration for as long as the block lasts; `by` is what a user wrote."""
        use = f"{by} at {calling_line()}"
        self._uses.append(use)
        try:
            yield
        finally:
            self._uses.remove(use)

    def _require_unused(self, change: str) -> None:
        if self._uses:
            raise DevicesInUseError(
                f"{change} came too late: devices are in use by {self._uses[0]}; "
                f"configure them before that line, or after strategy.close()"
            )

    # Parts of the above

    def _why_none(self, kind: str | None) -> str | None:
        """Why the machine has no device of that kind, simulated ones included; `None` if it has."""
        if kind is None or self.physical(kind) or kind in self._simulations():
            return None
        return absence.why_none(kind, self.host)

    def _simulations(self) -> dict[str, Simulation]:
        return simulated.read_variable(_env.simulate(), self._host_memory_bytes) | self._simulated

    def _strict_accelerator(self, simulation: Simulation) -> Accelerator:
        details = simulation.details(self._host_memory_bytes, num_cores=1)
        return backend.install(simulation.kind, len(self._mask(simulation)), details.total_memory_bytes)

    def _real_accelerator(self, kind: str) -> Accelerator | None:
        return kind_table.accelerator_of(kind) if self._accelerators is None else self._accelerators.get(kind)

    # What the environment asks for

    def check(self, request: DeviceRequest) -> None:
        """Refuses a request for more devices than there are."""
        for kind in request.counts:
            self._requested_of(kind, request)

    def _request(self) -> DeviceRequest | None:
        return requested.read_variable(_env.devices())

    def _requested_of(self, kind: str, request: DeviceRequest | None) -> list[PhysicalDevice]:
        existing = self._physical_of(kind)
        if request is None or kind == CPU:
            return existing
        count = request.counts.get(kind, 0)
        if (count is None and not existing) or (count or 0) > len(existing):
            names = ", ".join(f"{device.device_type}:{device.index}".lower() for device in existing)
            here = f"{len(existing)} ({names})" if existing else f"none. {self._why_none(kind) or 'All are hidden'}"
            asked = f"{count} {kind}s" if count else f"every {kind}"
            raise DeviceNotFoundError(f"{request.text!r} asks for {asked}, this machine has {here}")
        return existing[:count]

    def _parts_of(self, device: PhysicalDevice) -> tuple[LogicalDeviceConfiguration, ...] | None:
        parts = self._parts.get(device)
        request = self._request() if parts is None and device.device_type == CPU else None
        return (LogicalDeviceConfiguration(),) * request.num_cpus if request and request.num_cpus else parts

    def mask_complaint(self) -> str | None:
        """What is wrong with `CUDA_VISIBLE_DEVICES` for the GPUs here, real or simulated."""
        text = _env.cuda_visible_devices()
        if simulation := self._simulations().get(GPU):
            return masks.apply(text, simulation.count).complaint
        num_gpus = self.host.num_nvidia_gpus()
        return None if num_gpus is None or masks.is_by_uuid(text) else masks.apply(text, num_gpus).complaint

    @functools.cached_property
    def _host_cores(self) -> tuple[int, ...]:
        # Read once: serving a device moves this process to fewer cores.
        return self.host.cores()

    @property
    def _host_memory_bytes(self) -> int:
        return self.host.total_memory_bytes()

    def _physical_of(self, kind: str) -> list[PhysicalDevice]:
        if kind == CPU:
            return [PhysicalDevice(CPU, 0)]
        if kind == GPU:
            self._warn_once(self.mask_complaint())
        if simulation := self._simulations().get(kind):
            return [PhysicalDevice(kind, index, simulated=True) for index in range(len(self._mask(simulation)))]
        accelerator = self._real_accelerator(kind)
        return [PhysicalDevice(kind, index) for index in range(accelerator.count() if accelerator else 0)]

    def _mask(self, simulation: Simulation) -> tuple[int, ...]:
        """Which of the simulated devices are behind the renumbered visible ones."""
        text = _env.cuda_visible_devices() if simulation.kind == GPU else None
        return masks.apply(text, simulation.count).indices

    def _warn_once(self, complaint: str | None) -> None:
        if complaint and complaint not in self._warned:
            self._warned.add(complaint)
            warn_caller(complaint, DeviceWarning)

    def _details(self, device: PhysicalDevice) -> DeviceDetails:
        num_cores = len(self._host_cores)
        if not device.simulated and (accelerator := self.accelerator(device)):
            return accelerator.details(device.index)
        if device.simulated:
            return self._simulations()[device.device_type].details(self._host_memory_bytes, num_cores)
        return DeviceDetails(self.host.model_name(), self._host_memory_bytes, num_cores)

    def _cores(self, device: PhysicalDevice) -> tuple[int, ...]:
        """The CPU cores behind a device."""
        if device.device_type == CPU:
            return self._host_cores
        if self.accelerator(device) is not None:
            return ()
        simulation = self._simulations()[device.device_type]
        return split_cores(self._host_cores, simulation.count)[self._mask(simulation)[device.index]]

    def _shares(self, device: PhysicalDevice) -> list[Share]:
        parts = self._parts_of(device)
        if parts is None and self.accelerator(device):
            return [Share(cores=(), memory_limit_bytes=None)]  # without waking the driver for its details
        return divide(device, self._details(device), self._cores(device), parts)

    def _logical_device(self, index: int, device: PhysicalDevice, share: Share) -> LogicalDevice:
        accelerator = self.accelerator(device)
        return LogicalDevice(
            device_type=device.device_type,
            index=index,
            physical=device,
            torch_device=torch.device(accelerator.torch_type, device.index) if accelerator else torch.device("cpu"),
            cores=share.cores,
            num_threads=self.host.num_threads(len(share.cores), len(self._host_cores)) if share.cores else None,
            memory_limit_bytes=share.memory_limit_bytes,
            memory_growth=self._growth.get(device, True),
            is_limit_given=share.is_limit_given or self._is_sized(device),
        )

    def _is_sized(self, device: PhysicalDevice) -> bool:
        """Whether a program has said how much memory a simulated device has."""
        return device.simulated and self._simulations()[device.device_type].memory_limit is not None

    def _require_accelerator(self, device: DeviceLike) -> PhysicalDevice:
        physical = self.find_physical(device)
        if physical.device_type == CPU:
            raise DeviceConfigurationError(
                f"memory growth is a setting of GPUs, got {physical.name}; memory of a CPU always grows when needed"
            )
        return physical


def _by_themselves(devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
    """Refuses devices that compute only together."""
    if joint := [device.name for device in devices if torch_xla.has(device.torch_device)]:
        raise DeviceConfigurationError(
            f"devices of torch_xla compute one program together and cannot have replicas of their own, got "
            f"{', '.join(joint)}; use sg.TPUStrategy(), or name other devices, such as ['cpu:0']"
        )
    return devices


def _contradiction(call: str, request: DeviceRequest, what: str) -> DeviceConfigurationError:
    return DeviceConfigurationError(
        f"{call} contradicts {_env.DEVICES}={request.text!r} (stratagem run --devices), which {what}; "
        f"leave one of the two out"
    )


def this_process() -> Inventory:
    """The inventory that `sg.config` shows and changes."""
    return _THIS_PROCESS


def _kinds(kind: str | None) -> tuple[str, ...]:
    return kind_table.names() if kind is None else (parse_kind(kind),)


def _limits(parts: Sequence[LogicalDeviceConfiguration]) -> bool:
    """Whether a device so divided needs its memory limited."""
    return len(parts) > 1 or any((each.memory_limit, each.memory_fraction) != (None, None) for each in parts)


_THIS_PROCESS = Inventory()
