"""TPUs by torch_xla: devices that compute one program together. The only file that imports it.

Counting devices neither imports torch_xla nor wakes its runtime, which takes the chips of a machine for one process.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from contextlib import AbstractContextManager
from typing import Any, Final, final

import torch

from stratagem import _env, _torch
from stratagem.devices.accelerators import why_no_limits
from stratagem.devices.device import DeviceDetails
from stratagem.devices.host import Host
from stratagem.errors import DeviceConfigurationError, DeviceError, EnvironmentVariableError

LIBRARY: Final = "torch_xla"
TORCH_TYPE: Final = "xla"
DEVICE: Final = torch.device(TORCH_TYPE, 0)  # all devices together, as one program sees them
_ON_CPU: Final = "CPU"
_AXIS: Final = 0


@functools.cache
def is_installed() -> bool:
    """Whether torch_xla is here; it may be one for another torch."""
    return importlib.util.find_spec(LIBRARY) is not None


def version() -> str:
    """Which one it is."""
    return importlib.metadata.version(LIBRARY)


def is_on_cpu() -> bool:
    """Whether its devices are shares of the CPU, as somebody has asked for by `PJRT_DEVICE=CPU`."""
    return _env.pjrt_device() == _ON_CPU


def num_devices(host: Host) -> int:
    """How many devices it has on this machine.

    Raises:
        EnvironmentVariableError: `CPU_NUM_DEVICES` is no number.
    """
    if not is_installed():
        return 0
    if is_on_cpu():
        return _num_on_cpu()
    if _env.pjrt_device() not in (None, "TPU") or not host.num_tpu_chips():
        return 0
    return int(_imported("_internal.tpu").num_available_devices())


def _num_on_cpu() -> int:
    text = _env.cpu_num_devices()
    if text is None:
        return 1
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 10**4):
        raise EnvironmentVariableError(f"{_env.CPU_NUM_DEVICES}={text!r} is not a whole number from 1 up")
    return int(text)


def has(device: torch.device) -> bool:
    """Whether a device of torch's is one of them."""
    return device.type == TORCH_TYPE


def load() -> None:
    """Lets torch have its devices.

    Raises:
        DeviceConfigurationError: It was made for another torch.
    """
    _imported()


def _imported(name: str = "") -> Any:
    """A module of torch_xla.

    Raises:
        DeviceConfigurationError: It was made for another torch.
    """
    _env.quiet_xla()
    try:
        return importlib.import_module(f"{LIBRARY}.{name}" if name else LIBRARY)
    except (ImportError, OSError) as error:
        wanted = re.match(r"\d+\.\d+", version())
        fitting = wanted[0] if wanted else version()
        raise DeviceConfigurationError(
            f"{LIBRARY} {version()} cannot be loaded beside torch {torch.__version__} ({str(error).splitlines()[0]}); "
            f"each {LIBRARY} needs the torch of its own number: pip install torch=={fitting}.* {LIBRARY}=={fitting}.*"
        ) from error


@final
class XlaAccelerator:
    """Devices of torch_xla, as others see them. Torch does not limit their memory, and tells of it only while they run.

    Args:
        kind: Their kind among stratagem's devices.
        host: The machine.
    """

    torch_type = TORCH_TYPE
    limits_memory = False

    def __init__(self, kind: str, host: Host | None = None) -> None:
        self.kind = kind
        self._host = host or Host()

    def count(self) -> int:
        return num_devices(self._host)

    def details(self, index: int) -> DeviceDetails:
        if is_on_cpu():
            return DeviceDetails("XLA on the CPU", self._host.total_memory_bytes() // self.count())
        return DeviceDetails("TPU (torch_xla)", 0)

    def memory_used(self, index: int) -> int | None:
        return None

    def memory_info(self, index: int) -> dict[str, int]:
        raise DeviceError(f"{LIBRARY} does not tell how much memory is in use on {self.kind}:{index}")

    def reset_peak(self, index: int) -> None:
        """It keeps none."""

    def memory_fraction(self, index: int) -> float:
        return 1.0

    def limit_memory(self, index: int, fraction: float) -> None:
        raise DeviceConfigurationError(why_no_limits(self))

    def reserve(self, index: int, limit_bytes: int | None) -> None:
        raise DeviceConfigurationError(
            f"the memory of {self.kind}:{index} cannot be taken at the start: {LIBRARY} takes it when a program is "
            f"compiled; leave set_memory_growth(..., False) out"
        )

    def selected(self, index: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


@final
class OneProgram:
    """One program on all devices: what is spread over them is computed where it lies.

    It is that of the whole process: torch_xla has one such mode, and keeps it.
    """

    def __init__(self) -> None:
        self._xla: Any = _imported()
        self._runtime: Any = _imported("runtime")
        self._model: Any = _imported("core.xla_model")
        self._metrics: Any = _imported("debug.metrics")
        self._spmd: Any = _imported("distributed.spmd")
        if not self._runtime.is_spmd():
            self._runtime.use_spmd()
        _let_tensors_move()
        self.num_devices = int(self._runtime.global_runtime_device_count())
        self._mesh = self._spmd.Mesh(list(range(self.num_devices)), (self.num_devices,), ("rows",))
        self._layouts: dict[tuple[int, int], Any] = {}

    @property
    def num_processes(self) -> int:
        """How many hosts run this program."""
        return int(self._runtime.process_count())

    @property
    def process(self) -> int:
        """Which of them this is."""
        return int(self._runtime.process_index())

    def spread(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A tensor of the host on all devices, each with its rows of one dimension, and some with one row less."""
        layout = self._layouts.get((tensor.dim(), dim))
        if layout is None:
            named = tuple("rows" if each == dim else None for each in range(tensor.dim()))
            layout = self._layouts[tensor.dim(), dim] = self._spmd.ShardingSpec(self._mesh, named)
        (spread,) = self._model.send_cpu_data_to_device([tensor], DEVICE, layout)
        return _checked(spread)

    def start(self) -> None:
        """Lets the devices compute all that was asked for since the last time, and does not wait for them."""
        self._xla.sync()

    def wait(self) -> None:
        """Waits until the devices have done all that was asked for."""
        self._xla.sync(wait=True)
        self._model.wait_device_ops()

    def seed(self, number: int) -> None:
        """Lets random numbers of the devices begin at a seed."""
        self._model.set_rng_state(number, str(DEVICE))

    @property
    def num_compilations(self) -> int:
        """How many programs have been compiled in this process."""
        return int(self._metrics.counter_value("UncachedCompile") or 0)


def _checked(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{LIBRARY} gave {type(tensor).__name__} for a tensor")
    return tensor


@functools.cache
def one_program() -> OneProgram:
    """The program of this process."""
    return OneProgram()


@functools.cache
def _let_tensors_move() -> None:
    _torch.private_slot.let_data_move(TORCH_TYPE)
