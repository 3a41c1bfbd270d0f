"""Reads the environment; the only file that does.

Owns the names of the variables. What a value means is decided by the part that asks:
variables are read when they are needed, never at import, so that a program may set them first.
"""

import contextlib
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping

SIMULATE = "STRATAGEM_SIMULATE"
DEVICES = "STRATAGEM_DEVICES"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
PJRT_DEVICE = "PJRT_DEVICE"
CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
KERAS_BACKEND = "KERAS_BACKEND"
UNBUFFERED = "PYTHONUNBUFFERED"
FAULT_HANDLER = "PYTHONFAULTHANDLER"
TF_CONFIG = "TF_CONFIG"
TOKEN_FILE = "STRATAGEM_TOKEN_FILE"  # noqa: S105  # a path, not the secret
PORT = "STRATAGEM_PORT"
NUM_TASKS = "STRATAGEM_NUM_TASKS"
SERVICE = "STRATAGEM_SERVICE"
HEARTBEAT_TIMEOUT = "STRATAGEM_HEARTBEAT_TIMEOUT"
EARLY_SERVER = "STRATAGEM_EARLY_SERVER"  # set by `stratagem run` for the process that it becomes

# What the starters of clusters set for the tasks that they start.
TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
SLURM_PREFIX = "SLURM_"
TPU_WORKERS = ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
RAY_ADDRESS = "RAY_ADDRESS"
RAY_AUTH_MODE = "RAY_AUTH_MODE"
RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
RAY_ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
RAY_NICENESS = "RAY_worker_niceness"
SET_BY_RAY = (RAY_AUTH_MODE, "RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED", "PYTHONBREAKPOINT")

_PREFIX = "STRATAGEM_"
_OWN = (SIMULATE, DEVICES, TOKEN_FILE, PORT, NUM_TASKS, SERVICE, HEARTBEAT_TIMEOUT, EARLY_SERVER)


def simulate() -> str | None:
    """Which devices to simulate, for example `gpu:4`."""
    return os.environ.get(SIMULATE)


def asks_for_strict_devices() -> bool:
    """Whether some of them are to be devices of torch's own."""
    return (simulate() or "").strip().lower().endswith(":strict") or ":strict," in (simulate() or "").lower()


def devices() -> str | None:
    """Which devices the program was asked to run on, for example `cpu:4`; `stratagem run --devices` sets it."""
    return os.environ.get(DEVICES)


def cuda_visible_devices() -> str | None:
    """Which GPUs the CUDA driver shows to this process; unset means all, empty means none."""
    return os.environ.get(CUDA_VISIBLE_DEVICES)


def pjrt_device() -> str | None:
    """Which hardware torch_xla computes on, `TPU` or `CPU`; it chooses itself if nobody has said so."""
    return os.environ.get(PJRT_DEVICE)


def quiet_xla() -> None:
    """Keeps XLA, which is not loaded yet, from warnings; unless somebody has said what it is to tell.

    For each program that it compiles it says that its partitioner has a successor.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def cpu_num_devices() -> str | None:
    """Into how many devices torch_xla divides the CPU."""
    return os.environ.get(CPU_NUM_DEVICES)


def device_variables() -> tuple[str | None, ...]:
    """The variables that decide which devices there are."""
    return simulate(), devices(), cuda_visible_devices()


def take_device_variables(values: tuple[str | None, ...]) -> None:
    """Sets them as another process of this program has them."""
    for name, value in zip((SIMULATE, DEVICES, CUDA_VISIBLE_DEVICES), values, strict=True):
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def tf_config() -> str | None:
    """The cluster and this task, as TensorFlow's users write them."""
    return os.environ.get(TF_CONFIG)


def torchrun() -> dict[str, str]:
    """What torchrun has set."""
    return _those_set(TORCHRUN)


def slurm() -> dict[str, str]:
    """What Slurm has set."""
    return {name: value for name, value in os.environ.items() if name.startswith(SLURM_PREFIX)}


def kubernetes() -> dict[str, str]:
    """What Kubernetes has set."""
    return _those_set(KUBERNETES)


def tpu() -> dict[str, str]:
    """What a TPU VM, or Kubernetes for TPUs, has set about its hosts."""
    return _those_set(TPU_WORKERS)


def ray_address() -> str | None:
    """The Ray cluster that this program belongs to."""
    return os.environ.get(RAY_ADDRESS)


def ray_auth_mode() -> str | None:
    """Whether Ray asks for a token, if somebody has said so."""
    return os.environ.get(RAY_AUTH_MODE)


def ray_niceness() -> str | None:
    """By how much Ray's workers give way to other processes, if somebody has said so."""
    return os.environ.get(RAY_NICENESS)


def without_what_ray_sets() -> contextlib.AbstractContextManager[None]:
    """Puts back at its end what Ray sets for a process that connects to it."""
    return with_changes({name: os.environ.get(name) for name in SET_BY_RAY})


def has_ray_token() -> bool:
    """Whether the environment says which token Ray takes."""
    return bool(_those_set(RAY_TOKEN))


def token_file() -> str | None:
    """Where the secret of the cluster is; never the secret itself."""
    return os.environ.get(TOKEN_FILE)


def port() -> str | None:
    """At which port the first task of a cluster listens, where its starter does not say."""
    return os.environ.get(PORT)


def num_tasks() -> str | None:
    """How many tasks there are, where their starter does not say."""
    return os.environ.get(NUM_TASKS)


def service() -> str | None:
    """The Kubernetes service in which the tasks have their host names."""
    return os.environ.get(SERVICE)


def heartbeat_timeout() -> str | None:
    """After how many seconds without a sign of life a task is lost; `stratagem run --heartbeat-timeout` sets it."""
    return os.environ.get(HEARTBEAT_TIMEOUT)


def take_early_server() -> str | None:
    """Where the fork server is that was started before this program, once: no process that it starts is told."""
    return os.environ.pop(EARLY_SERVER, None)


def python_path() -> list[str]:
    """Where a new Python process looks for modules, before its own libraries."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def for_process(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a process to be started: this one's with changes, of which `None` leaves a variable out."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def changed(environment: Mapping[str, str]) -> dict[str, str | None]:
    """What the environment of a process to be started has that this one's has not; `None` for what it leaves out."""
    different = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    return {**different, **{name: None for name in os.environ if name not in environment}}


@contextlib.contextmanager
def with_changes(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Inside the block, the environment of this process with changes, for processes that a library starts."""
    before = {name: os.environ.get(name) for name in changes}
    _change(changes)
    try:
        yield
    finally:
        _change(before)


def use_torch_for_keras() -> None:
    """Makes Keras, if it is imported later, run on torch: in children, whose program has chosen torch for it."""
    os.environ[KERAS_BACKEND] = "torch"


def misspelt(environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Variables with stratagem's prefix that nothing reads, each with the likeliest meant one."""
    strangers = sorted(name for name in environment if name.startswith(_PREFIX) and name not in _OWN)
    return [(name, difflib.get_close_matches(name, _OWN, n=1, cutoff=0.0)[0]) for name in strangers]


def _change(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _those_set(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}
