"""Defines what every resolver does: say which cluster there is, and which task of it this process is.

A resolver reads what a starter has left for its tasks when it is built, and raises then if that is
wrong. It starts nothing and connects to nothing.
"""

import importlib
from collections.abc import Mapping

from stratagem import _env
from stratagem.cluster.address import SCHEME, checked_port
from stratagem.cluster.spec import EVALUATOR, TRAINING, ClusterSpec
from stratagem.errors import ClusterSpecError, EnvironmentVariableError


class Resolver:
    """Says which tasks a cluster has, and which of them is this process.

    Each source of that knowledge has its own class, which adds only a constructor.

    Args:
        source: The name of the source, such as `TF_CONFIG`.
        spec: All tasks; none at all if the program runs alone.
        task_type: The job of this task, if it is one of them.
        task_id: Its index.
        local: The number of this task among the tasks on its machine, and how many these are. By default the tasks
            with the same host that also train, or have the same job.
        accelerators: The number of accelerators of each kind that this task has; by default those of this process.
        master: The result of `master()`; by default the address of this task.

    Raises:
        ClusterSpecError: There is no such task.
    """

    def __init__(
        self,
        source: str,
        spec: ClusterSpec,
        task_type: str | None,
        task_id: int | None,
        *,
        local: tuple[int, int] | None = None,
        accelerators: Mapping[str, int] | None = None,
        master: str | None = None,
    ) -> None:
        if (task_type is None) != (task_id is None):
            raise ClusterSpecError(
                f"{source}: a task has a type and an index, got type {task_type!r} and index {task_id!r}"
            )
        if task_type is not None:
            _check_task(source, spec, task_type, task_id)
        self._source = source
        self._spec = spec
        self._type, self._id = task_type, task_id
        self._local = _local_of(spec, task_type, task_id) if local is None else local
        self._accelerators = accelerators
        self._master = master

    def cluster_spec(self) -> ClusterSpec:
        """All tasks of the cluster."""
        return self._spec

    @property
    def task_type(self) -> str | None:
        """The job of this task."""
        return self._type

    @property
    def task_id(self) -> int | None:
        """The index of this task in its job."""
        return self._id

    @property
    def local_id(self) -> int:
        """The number of this task among the tasks on this machine."""
        return self._local[0]

    @property
    def num_local_tasks(self) -> int:
        """The number of tasks that run on this machine and share its devices."""
        return self._local[1]

    def master(self, task_type: str | None = None, task_id: int | None = None) -> str:
        """Returns the address of a task, by default of this one: `stratagem://host:port`; empty without a cluster."""
        if task_type is None and task_id is None and self._master is not None:
            return self._master if self._master.startswith(SCHEME) else f"{SCHEME}{self._master}"
        job = self._type if task_type is None else task_type
        index = self._id if task_id is None else task_id
        if not self._spec or job is None or index is None:
            return ""
        return f"{SCHEME}{self._spec.task_address(job, index)}"

    def num_accelerators(self) -> dict[str, int]:
        """Returns the number of accelerators of each kind that this task has."""
        if self._accelerators is not None:
            return dict(self._accelerators)
        # By name: to ask for devices loads torch, which nothing else about a cluster needs.
        devices = importlib.import_module("stratagem.devices").this_process().logical()
        kinds = [device.device_type for device in devices if device.device_type != "CPU"]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def describe(self) -> str:
        """Returns one line with the source, the tasks, and which of them is this process."""
        if not self._spec:
            return f"{self._source}: no cluster, the program runs alone"
        counts = ", ".join(f"{self._spec.num_tasks(job)} {job}" for job in self._spec.jobs)
        own = "this process is not one of its tasks" if self._type is None else f"this is {self._type}/{self._id}"
        return f"{self._source}: a cluster of {counts}, {own}; the first task is {self._spec.tasks[0]}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.describe()}>"


def _check_task(source: str, spec: ClusterSpec, task_type: object, task_id: object) -> None:
    """Refuses a task that is not in the cluster; an evaluator need not be, since nobody connects to it."""
    if type(task_id) is not int or task_id < 0:
        raise ClusterSpecError(f"{source}: the index of a task is a whole number from 0 up, got {task_id!r}")
    if task_type == EVALUATOR and EVALUATOR not in spec.jobs and task_id == 0:
        return
    if spec:
        try:
            spec.task(str(task_type), task_id)
        except ClusterSpecError as error:
            raise ClusterSpecError(f"{source}: {error}") from None


def require_own_protocol(rpc_layer: str | None, environment: str | None) -> None:
    """Refuses settings of TensorFlow's resolvers that would mean something else than its defaults.

    Args:
        rpc_layer: The protocol between tasks.
        environment: Where the cluster runs.
    """
    if rpc_layer not in (None, "", "grpc"):
        raise ClusterSpecError(
            f"tasks speak stratagem's own protocol, and rpc_layer is there for TensorFlow's programs: None or 'grpc', "
            f"its defaults, got {rpc_layer!r}; leave it out"
        )
    if environment not in (None, ""):
        raise ClusterSpecError(
            f"environment is there for TensorFlow's programs: None or '', its defaults, got {environment!r}; leave it "
            f"out"
        )


def read_number(variables: Mapping[str, str], name: str, smallest: int = 0) -> int:
    """The whole number in a variable that a starter must have set."""
    text = variables.get(name)
    if text is None:
        raise EnvironmentVariableError(f"{name} is not set; it must be, to a whole number from {smallest} up")
    if not (text.isascii() and text.isdecimal() and smallest <= int(text) < 10**9):
        raise EnvironmentVariableError(f"{name}={text!r} is not a whole number from {smallest} up")
    return int(text)


def own_port() -> int | None:
    """The port that the user has chosen by `STRATAGEM_PORT`, if any."""
    text = _env.port()
    return None if text is None else checked_port(text, f"{_env.PORT}={text}")


def _local_of(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> tuple[int, int]:
    """Which of the tasks on its host a task is, and how many those are; those that train count together."""
    jobs = TRAINING if task_type in TRAINING else (task_type,)
    hosts = {task.name: task.address.host for task in spec.tasks if task.job in jobs and task.address}
    own = f"{task_type}/{task_id}"
    near = [name for name, host in hosts.items() if own in hosts and host == hosts[own]]
    return (near.index(own), len(near)) if near else (0, 1)
