"""Describes a cluster: which tasks take part, and where each listens.

Owns the jobs, the order of the tasks and every rule that a description obeys. Does not know which
task this process is (resolvers), nor whether anybody is there (`membership`).
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

from stratagem.cluster import strict_json
from stratagem.cluster.address import Address
from stratagem.errors import ClusterSpecError

# In this order tasks are counted; the first of them all is the keeper of the cluster.
CHIEF, MASTER, WORKER, PS, EVALUATOR, LOCAL = JOBS = ("chief", "master", "worker", "ps", "evaluator", "local")
TRAINING: Final = (CHIEF, MASTER, WORKER)
_ALONE: Final = (CHIEF, MASTER, EVALUATOR)
_MOST_TASKS: Final = 100_000

ClusterLike: TypeAlias = "ClusterSpec | str | Mapping[str, Sequence[str | None] | Mapping[Any, str | None]]"


@final
@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster."""

    job: str
    index: int
    address: Address | None = None

    @property
    def name(self) -> str:
        """As in messages: `worker/0`."""
        return f"{self.job}/{self.index}"

    def __str__(self) -> str:
        return self.name if self.address is None else f"{self.name} ({self.address})"


@final
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ClusterSpec:
    """Lists the tasks of a cluster by job, each with its address, as in TensorFlow. It is checked when it is made.

    Jobs are chief (or master), worker, ps, evaluator and local. Indices may have gaps: those tasks do not
    exist. A task whose address is None takes part, but no other task can connect to it.

    Args:
        cluster: For each job a list of addresses or a mapping from index to address; or the same as
            JSON; or another spec.

    Raises:
        ClusterSpecError: The description breaks a rule; the message says which.

    Example:
        >>> spec = ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"], "ps": {3: "10.0.0.3:2222"}})
        >>> spec.jobs, spec.num_tasks("worker"), spec.task_indices("ps")
        (['worker', 'ps'], 2, [3])
        >>> spec.task_address("ps", 3)
        '10.0.0.3:2222'
    """

    tasks: tuple[Task, ...]

    def __init__(self, cluster: ClusterLike) -> None:
        if isinstance(cluster, ClusterSpec):
            tasks = cluster.tasks
        else:
            described = _read_json(cluster) if isinstance(cluster, str) else cluster
            tasks = tuple(sorted(_tasks_of(described), key=lambda task: (JOBS.index(task.job), task.index)))
            _check_tasks(tasks)
        object.__setattr__(self, "tasks", tasks)

    @property
    def jobs(self) -> list[str]:
        """The jobs that have tasks."""
        return list(dict.fromkeys(task.job for task in self.tasks))

    def num_tasks(self, job: str) -> int:
        """How many tasks a job has."""
        return len(self._of(job))

    def task_indices(self, job: str) -> list[int]:
        """The indices of the tasks of a job, in order."""
        return [task.index for task in self._of(job)]

    def task(self, job: str, index: int) -> Task:
        """One task."""
        for task in self.tasks:
            if (task.job, task.index) == (job, index) and type(index) is int:
                return task
        names = ", ".join(task.name for task in self.tasks) or "no tasks"
        raise ClusterSpecError(f"task {job}/{index} does not exist; cluster has {names}")

    def task_address(self, job: str, index: int) -> str:
        """Where a task listens."""
        address = self.task(job, index).address
        if address is None:
            raise ClusterSpecError(
                f"{job}/{index} takes part, but its address is not known: it connects to {self.tasks[0]}"
            )
        return str(address)

    def job_tasks(self, job: str) -> list[str | None]:
        """The addresses of the tasks of a job by index; None where an index is left out or its address unknown."""
        found: list[str | None] = [None] * (1 + max(self.task_indices(job)))
        for task in self._of(job):
            found[task.index] = None if task.address is None else str(task.address)
        return found

    def as_dict(self) -> dict[str, list[str | None] | dict[int, str | None]]:
        """The description from which an equal spec can be built."""
        found: dict[str, list[str | None] | dict[int, str | None]] = {}
        for job in self.jobs:
            indices, addresses = self.task_indices(job), self.job_tasks(job)
            dense = indices == list(range(len(indices)))
            found[job] = addresses if dense else {index: addresses[index] for index in indices}
        return found

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict())

    def first_difference(self, other: "ClusterSpec") -> str | None:
        """What differs first, this spec's side first, or None if they are equal.

        Example:
            >>> ClusterSpec({"ps": ["a:1", "b:1"]}).first_difference(ClusterSpec({"ps": ["a:1"]}))
            'ps count 2 vs 1 (first difference: ps/1)'
        """
        own = {(task.job, task.index): task for task in self.tasks}
        others = {(task.job, task.index): task for task in other.tasks}
        for job in JOBS:
            mine, theirs = ([index for each, index in side if each == job] for side in (own, others))
            if mine != theirs:
                first = min(set(mine) ^ set(theirs))
                return f"{job} count {len(mine)} vs {len(theirs)} (first difference: {job}/{first})"
        for key, task in own.items():
            if task != others[key]:
                return f"{task.name} at {task.address or 'no address'} vs {others[key].address or 'no address'}"
        return None

    def __bool__(self) -> bool:
        return bool(self.tasks)

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _of(self, job: str) -> list[Task]:
        found = [task for task in self.tasks if task.job == job]
        if not found:
            raise ClusterSpecError(f"the cluster has no job {job!r}; it has {', '.join(self.jobs) or 'no tasks'}")
        return found


def check_job(job: Any) -> str:
    """Refuses what is no job."""
    if job in JOBS:
        return str(job)
    close = difflib.get_close_matches(str(job).lower(), JOBS, n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ClusterSpecError(f"unknown job {job!r}. Known jobs: {', '.join(JOBS)}.{hint}")


def _read_json(text: str) -> Any:
    try:
        return strict_json.read(text)
    except strict_json.NotJsonError as error:
        raise ClusterSpecError(f"the cluster is not valid JSON: {error}") from None


def _tasks_of(cluster: Any) -> Iterator[Task]:
    if not isinstance(cluster, Mapping):
        raise ClusterSpecError(
            f"a cluster is a mapping from jobs to addresses, such as {{'worker': ['10.0.0.1:2222']}}, got {cluster!r}"
        )
    for job, addresses in cluster.items():
        check_job(job)
        for index, address in _numbered(job, addresses):
            try:
                yield Task(job, index, None if address is None else Address.parse(address))
            except ClusterSpecError as error:
                raise ClusterSpecError(f"{job}/{index}: {error}") from None


def _numbered(job: str, addresses: Any) -> Iterable[tuple[int, Any]]:
    if isinstance(addresses, Mapping):
        pairs = [(_checked_index(job, index), address) for index, address in addresses.items()]
        indices = [index for index, _ in pairs]
        if len(set(indices)) != len(indices):
            twin = next(index for index in indices if indices.count(index) > 1)
            raise ClusterSpecError(f"{job}/{twin} is given twice")
        return pairs
    if isinstance(addresses, str) or not isinstance(addresses, Sequence):
        raise ClusterSpecError(
            f"job {job!r} has a list of addresses, or a mapping from index to address, got {addresses!r}; "
            f"write one address as a list too"
        )
    return list(enumerate(addresses))


def _checked_index(job: str, index: Any) -> int:
    """An index; JSON has only texts as names, so that its digits are taken too."""
    number = int(index) if isinstance(index, str) and index.isascii() and index.isdecimal() else index
    if type(number) is not int or not 0 <= number < _MOST_TASKS:
        raise ClusterSpecError(
            f"the indices of job {job!r} are whole numbers from 0 to {_MOST_TASKS - 1}, got {index!r}"
        )
    return number


def _check_tasks(tasks: Sequence[Task]) -> None:
    at: dict[Address, Task] = {}
    for task in tasks:
        if task.job in _ALONE and task.index > 0:
            raise ClusterSpecError(f"a cluster has one {task.job} at most, got {task}")
        if task.address is None:
            continue
        first = at.setdefault(task.address, task)
        if first is not task:
            raise ClusterSpecError(
                f"address {task.address} is given for {first.name} and {task.name}; each has its own"
            )
    jobs = {task.job for task in tasks}
    if {CHIEF, MASTER} <= jobs:
        raise ClusterSpecError("chief and master are two names of one job; give one of them")
    if tasks and tasks[0].address is None:
        raise ClusterSpecError(f"{tasks[0].name} is the first task, to which the others connect; give its address")
