"""Finds the cluster in the variables that Slurm sets for the tasks of a step.

Owns on which host each task is: Slurm says how many there are on each, and in which order it dealt them.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Final, final

from stratagem import _env
from stratagem.cluster.address import checked_port
from stratagem.cluster.resolvers.host_lists import expand_counts, expand_hosts
from stratagem.cluster.resolvers.resolver import Resolver, own_port, read_number
from stratagem.cluster.spec import WORKER, ClusterSpec, check_job
from stratagem.errors import ClusterSpecError, EnvironmentVariableError

# Below the ports that systems hand out for a moment. Jobs that share a host have different numbers,
# so that each has room for 16 tasks on one host before it meets the next.
_FIRST_PORT, _NUM_ROOMS, _ROOM = 15_000, 1_000, 16
_HOSTS: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS: Final = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


@final
class SlurmResolver(Resolver):
    """The tasks that srun has started.

    Args:
        jobs: How many tasks each job has, in the order in which Slurm counts its tasks; by default all
            are workers.
        port_base: The port of the first task of each host; the next task has the next port. By default
            `STRATAGEM_PORT`, or a number computed from the number of the Slurm job.
        gpus_per_task: The number of GPUs of a task; by default the number that Slurm gives.

    Raises:
        EnvironmentVariableError: A variable is missing or wrong.
        ClusterSpecError: `jobs` does not fit the number of tasks.
    """

    def __init__(
        self,
        *,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_task: int | None = None,
    ) -> None:
        variables = _env.slurm()
        hosts = _hosts_of_tasks(variables)
        rank = read_number(variables, "SLURM_PROCID")
        if rank >= len(hosts):
            raise EnvironmentVariableError(f"SLURM_PROCID={rank}, but the step has {len(hosts)} tasks")
        base = _port_base(variables, own_port() if port_base is None else port_base)
        local = [index for index, host in enumerate(hosts) if host == hosts[rank]]
        gpus = _gpus(variables, len(local)) if gpus_per_task is None else gpus_per_task
        tasks = _named(jobs, len(hosts))
        cluster: dict[str, list[str | None]] = {}
        for index, (job, host) in enumerate(zip(tasks, hosts, strict=True)):
            cluster.setdefault(job, []).append(f"{host}:{base + hosts[:index].count(host)}")
        super().__init__(
            "Slurm",
            ClusterSpec(cluster),
            tasks[rank],
            tasks[:rank].count(tasks[rank]),
            local=(local.index(rank), len(local)),
            accelerators=None if gpus is None else {"GPU": gpus} if gpus else {},
        )


def _hosts_of_tasks(variables: Mapping[str, str]) -> list[str]:
    """The host of each task, by its number."""
    names = expand_hosts(_first(variables, _HOSTS))
    counts = expand_counts(_first(variables, _COUNTS))
    if len(counts) != len(names):
        raise EnvironmentVariableError(
            f"{_first(variables, _COUNTS)!r} gives the tasks of {len(counts)} hosts, "
            f"{_first(variables, _HOSTS)!r} names {len(names)}"
        )
    text = variables.get("SLURM_DISTRIBUTION", "")
    how = text.partition(":")[0].partition(",")[0]
    plane = re.fullmatch(r"plane(?:=([0-9]{1,6}))?", how)
    if plane:
        block = int(plane[1] or variables.get("SLURM_DIST_PLANESIZE", "1"))
        return _dealt(names, counts, max(1, block))
    if how == "cyclic":
        return _dealt(names, counts, 1)
    if how in ("", "*", "block"):
        return [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    raise EnvironmentVariableError(
        f"SLURM_DISTRIBUTION={text!r} is not block, cyclic or plane; name the tasks by sg.cluster.SimpleResolver"
    )


def _dealt(names: list[str], counts: list[int], block: int) -> list[str]:
    """Tasks dealt to hosts in turn, so many at a time, until each has its number."""
    left, dealt = list(counts), list[str]()
    while any(left):
        for position, name in enumerate(names):
            taken = min(block, left[position])
            left[position] -= taken
            dealt += [name] * taken
    return dealt


def _named(jobs: Mapping[str, int] | None, num_tasks: int) -> list[str]:
    """The job of each task."""
    if jobs is None:
        return [WORKER] * num_tasks
    for job, count in jobs.items():
        if type(count) is not int or count < 0:
            raise ClusterSpecError(f"jobs[{check_job(job)!r}] is a whole number of tasks, got {count!r}")
    if sum(jobs.values()) != num_tasks:
        raise ClusterSpecError(f"jobs={dict(jobs)!r} has {sum(jobs.values())} tasks, Slurm has started {num_tasks}")
    return list(itertools.chain.from_iterable([check_job(job)] * count for job, count in jobs.items()))


def _port_base(variables: Mapping[str, str], chosen: int | None) -> int:
    if chosen is not None:
        return checked_port(chosen, "port_base")
    return _FIRST_PORT + read_number(variables, "SLURM_JOB_ID") % _NUM_ROOMS * _ROOM


def _gpus(variables: Mapping[str, str], num_local_tasks: int) -> int | None:
    """The GPUs of one task, from texts such as `2`, `a100:2` or `a100:1,h100:1`."""
    if text := variables.get("SLURM_GPUS_PER_TASK"):
        return _sum_of("SLURM_GPUS_PER_TASK", text)
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        if text := variables.get(name):
            return _sum_of(name, text) // num_local_tasks
    return None


def _sum_of(name: str, text: str) -> int:
    numbers = [entry.rpartition(":")[2] for entry in text.split(",")]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise EnvironmentVariableError(f"{name}={text!r} is not a number of GPUs, such as '2' or 'a100:2'")
    return sum(map(int, numbers))


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if variables.get(name):
            return variables[name]
    raise EnvironmentVariableError(f"Slurm sets {' or '.join(names)}; none is set. Start the program by srun")
