"""Says what a launch starts where: a value, checked before anything is started.

Owns the rules for what may be asked for, and how cores and GPUs of this machine are divided over
its tasks. Addresses and the tasks of other machines come later (`rendezvous`); nothing is
started here.
"""

import dataclasses
import math
from typing import Any, Final

from stratagem import _env
from stratagem._checks import require_seconds
from stratagem.cluster.address import Address
from stratagem.cluster.launch.user_program import UserProgram
from stratagem.cluster.spec import CHIEF, EVALUATOR, PS, WORKER
from stratagem.devices import requested
from stratagem.devices.division import split_cores
from stratagem.devices.inventory import Inventory
from stratagem.devices.kind_table import CPU, GPU
from stratagem.devices.requested import DeviceRequest
from stratagem.errors import ClusterSpecError, LaunchError, StratagemError

JOBS: Final = (CHIEF, WORKER, PS, EVALUATOR)
TRAINING: Final = (CHIEF, WORKER)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Which of the machines of a launch this one is.

    Args:
        rank: Its number.
        count: How many there are.
        endpoint: Where the first one awaits the others, `host:port`; empty for one machine.
        address: By which the others reach the tasks of this one; found out when left empty.
        join_timeout_s: How long all are waited for.
    """

    rank: int = 0
    count: int = 1
    endpoint: str = ""
    address: str = ""
    join_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise LaunchError(f"--nnodes must be a whole number from 1 up, got {self.count}")
        if not 0 <= self.rank < self.count:
            raise LaunchError(
                f"--node-rank must be from 0 to {self.count - 1} for --nnodes {self.count}, got {self.rank}"
            )
        if self.count > 1 and not self.endpoint:
            raise LaunchError(
                f"--nnodes {self.count} needs --rdzv-endpoint HOST:PORT, an address of the machine with --node-rank 0"
            )
        if self.endpoint:
            try:
                Address.parse(self.endpoint)
            except ClusterSpecError as error:
                raise LaunchError(f"--rdzv-endpoint: {error}") from error
        require_seconds(LaunchError, or_zero=False, **{"--join-timeout": self.join_timeout_s})


@dataclasses.dataclass(frozen=True)
class Order:
    """What a user asks to be started on this machine.

    Args:
        program: What every task runs.
        devices: Which devices each training task sees, such as `cpu:4`; all when left out.
        num_workers: Worker tasks; `None` for one program that is no task of a cluster.
        num_ps: Parameter servers.
        chief: Whether there is a chief beside the workers.
        evaluator: Whether there is an evaluator.
        max_restarts: How often all tasks are started again after a failure.
        machine: Which of several machines this is.
        heartbeat_timeout_s: How long a task whose machine answers may give no sign of life to the others, and how long
            a machine; by default 30 s.
    """

    program: UserProgram
    devices: str | None = None
    num_workers: int | None = None
    num_ps: int = 0
    chief: bool = False
    evaluator: bool = False
    max_restarts: int = 0
    machine: Machine = Machine()
    heartbeat_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, number, least in (
            ("--workers", self.num_workers, 0),
            ("--ps", self.num_ps, 0),
            ("--max-restarts", self.max_restarts, 0),
        ):
            if number is not None and number < least:
                raise LaunchError(f"{name} must be a whole number from {least} up, got {number}")
        if self.heartbeat_timeout_s is not None and not 0 < self.heartbeat_timeout_s < math.inf:
            raise LaunchError(f"--heartbeat-timeout must be above 0 s, got {self.heartbeat_timeout_s:g}")
        if self.num_workers is None and (self.num_ps or self.chief or self.evaluator or self.machine.count > 1):
            raise LaunchError(
                "--ps, --chief, --evaluator and --nnodes are for clusters; give the number of workers with --workers"
            )
        if self.num_workers == 0 and not (self.chief or self.machine.count > 1):
            raise LaunchError("--workers 0 leaves no task that trains; ask for at least one worker, or for a --chief")
        if self.num_workers == 0 and not (self.chief or self.num_ps or self.evaluator):
            raise LaunchError("--workers 0 leaves nothing to start on this machine; ask for --ps or --evaluator here")
        if self.chief and self.machine.rank > 0:
            raise LaunchError(f"the --chief belongs to the machine with --node-rank 0, this is {self.machine.rank}")

    @property
    def is_cluster(self) -> bool:
        return self.num_workers is not None

    def counts(self) -> dict[str, int]:
        """How many tasks of each job run here."""
        if not self.is_cluster:
            return {WORKER: 1}
        numbers = (int(self.chief), self.num_workers or 0, self.num_ps, int(self.evaluator))
        return {job: number for job, number in zip(JOBS, numbers, strict=True) if number}


@dataclasses.dataclass(frozen=True)
class Seat:
    """Where one task of this machine runs.

    Args:
        job: Which job it belongs to.
        number: Which of that job on this machine.
        cores: The cores that it is kept on; none where it may use all.
        gpus: The entries of `CUDA_VISIBLE_DEVICES` that it sees; `None` where that is left as it is.
    """

    job: str
    number: int
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None

    @property
    def trains(self) -> bool:
        return self.job in TRAINING

    @property
    def start_options(self) -> dict[str, Any]:
        """How its process is started (`task_start`)."""
        return {"cores": self.cores}


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What is started on this machine, and why so."""

    order: Order
    seats: tuple[Seat, ...]
    reasons: tuple[str, ...]

    def names(self) -> list[str]:
        """What the tasks are called, as far as this machine alone can tell."""
        if not self.order.is_cluster:
            return [self.order.program.name]
        several = self.order.machine.count > 1
        return [f"{seat.job} {seat.number} here" if several else f"{seat.job}/{seat.number}" for seat in self.seats]


def make_plan(order: Order, inventory: Inventory) -> LaunchPlan:
    """Divides this machine over the tasks of an order.

    Raises:
        LaunchError: The order cannot be carried out here.
    """
    order.program.check()
    if order.is_cluster and (_env.tf_config() or "").strip():
        raise LaunchError(
            f"{_env.TF_CONFIG} is set: this process is a task of a cluster already, and --workers would start another "
            f"one inside it. Leave --workers out, or unset {_env.TF_CONFIG}"
        )
    request = None if order.devices is None else check_devices(order.devices, inventory)
    counts = order.counts()
    training = [(job, number) for job in TRAINING for number in range(counts.get(job, 0))]
    serving = [(job, number) for job in (PS, EVALUATOR) for number in range(counts.get(job, 0))]
    cores, why_cores = _share_cores(inventory, len(training))
    gpus, why_gpus = _share_gpus(inventory, request, len(training))
    seats = [Seat(*task, *share) for task, share in zip(training, zip(cores, gpus, strict=True), strict=True)]
    seats += [Seat(*task, gpus=() if inventory.physical(GPU) else None) for task in serving]
    reasons = [why_cores, why_gpus]
    if serving:
        reasons.append("ps and evaluator tasks may use all cores, and no GPU: they mostly wait")
    return LaunchPlan(order, tuple(seats), tuple(filter(None, reasons)))


def check_devices(text: str, inventory: Inventory) -> DeviceRequest:
    """Reads what `--devices` asks for, and refuses what this machine does not have."""
    try:
        request = requested.parse(text)
        inventory.check(request)
    except StratagemError as error:
        raise LaunchError(f"--devices {error}" if text in str(error) else f"--devices {text!r}: {error}") from error
    return request


def _share_cores(inventory: Inventory, num_tasks: int) -> tuple[list[tuple[int, ...]], str]:
    cores = inventory.host.cores()
    if num_tasks <= 1:
        return [()] * num_tasks, ""
    few = "; they take turns" if num_tasks > len(cores) else ""
    return split_cores(cores, num_tasks), f"{num_tasks} training tasks share {len(cores)} core(s) evenly{few}"


def _share_gpus(
    inventory: Inventory, request: DeviceRequest | None, num_tasks: int
) -> tuple[list[tuple[str, ...] | None], str]:
    """A part of the visible GPUs for each training task, as entries of `CUDA_VISIBLE_DEVICES`."""
    mask = _env.cuda_visible_devices()
    num_gpus = len(inventory.physical(GPU))
    entries = [each.strip() for each in mask.split(",")][:num_gpus] if mask else [str(n) for n in range(num_gpus)]
    untouched: list[tuple[str, ...] | None] = [None] * num_tasks
    if num_tasks <= 1 or not entries:
        return untouched, ""
    if request is not None and GPU not in request.counts:
        return untouched, f"GPUs are not used: --devices {request.text} does not name them"
    each = (request.counts[GPU] if request else None) or len(entries) // num_tasks
    if each * num_tasks > len(entries) or each == 0:
        if request is None:
            return untouched, f"{num_tasks} training tasks see all {len(entries)} GPU(s): too few for one each"
        raise LaunchError(
            f"--devices {request.text!r} for {num_tasks} tasks needs {max(1, each) * num_tasks} GPUs, "
            f"this machine has {len(entries)}; ask for fewer workers, or for --devices {CPU.lower()}:1"
        )
    shares = [tuple(entries[task * each : (task + 1) * each]) for task in range(num_tasks)]
    return list(shares), f"{num_tasks} training tasks have {each} of {len(entries)} GPU(s) each"
