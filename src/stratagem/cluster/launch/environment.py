"""Says what each task finds in its environment: who takes part, and which of them it is.

Owns the variables that a launch sets: `TF_CONFIG` for every task, torchrun's for those that train.
Pure: offers of all machines in, tasks of this one out.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from stratagem import _env
from stratagem.cluster.launch.plan import TRAINING, LaunchPlan, Seat
from stratagem.cluster.launch.task_processes import LaunchedTask
from stratagem.cluster.spec import CHIEF, EVALUATOR, ClusterSpec
from stratagem.errors import ClusterSpecError, LaunchError

# Left from a launcher around this one, they would contradict what this one says.
_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one machine brings to a launch.

    Args:
        run_id: Tells this launch from others; that of the first machine counts.
        jobs: The addresses of its tasks, by job; an evaluator has none, since nobody connects to it.
        master: A free address for the store of programs that use torch.distributed themselves.
    """

    run_id: str
    jobs: Mapping[str, Sequence[str]]
    master: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Offer":
        return cls(**json.loads(text))


def tasks_here(plan: LaunchPlan, offers: Sequence[Offer], *, restart: int, token_file: str) -> list[LaunchedTask]:
    """The tasks of this machine, with all that they are told.

    Args:
        offers: Of all machines, in order; of this one alone for one machine.
        restart: How often all tasks have been started before.
        token_file: Where the secret of the cluster is.
    """
    order, rank = plan.order, plan.order.machine.rank
    spec = _cluster(offers)
    tasks = []
    for number, seat in enumerate(plan.seats):
        index = seat.number + sum(len(offer.jobs.get(seat.job, ())) for offer in offers[:rank])
        changes: dict[str, str | None] = {_env.UNBUFFERED: "1", _env.FAULT_HANDLER: "1"}
        if seat.gpus is not None:
            changes[_env.CUDA_VISIBLE_DEVICES] = ",".join(seat.gpus)
        if order.devices is not None or not seat.trains:
            changes[_env.DEVICES] = order.devices if seat.trains else None
        if order.heartbeat_timeout_s is not None:
            changes[_env.HEARTBEAT_TIMEOUT] = f"{order.heartbeat_timeout_s:g}"
        name = f"{seat.job}/{index}" if order.is_cluster else order.program.name
        if order.is_cluster:
            changes |= dict.fromkeys(_TORCHRUN)
            task = {"type": seat.job, "index": index}
            changes[_env.TF_CONFIG] = json.dumps({"cluster": spec.as_dict(), "task": task})
            changes[_env.TOKEN_FILE] = token_file
            if seat.trains:
                changes |= _for_torch(plan, seat, index, offers)
        changes |= {
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(order.max_restarts),
        }
        tasks.append(LaunchedTask(name, number, seat, _env.for_process(changes)))
    return tasks


def _cluster(offers: Sequence[Offer]) -> ClusterSpec:
    jobs: dict[str, list[str]] = {}
    for offer in offers:
        for job, addresses in offer.jobs.items():
            jobs.setdefault(job, []).extend(addresses)
    if len(jobs.pop(EVALUATOR, [])) > 1:
        raise LaunchError("a cluster has one evaluator at most; ask for --evaluator on one machine only")
    if not any(job in jobs for job in TRAINING):
        raise LaunchError(
            "none of the machines has a worker or chief, so no task would train; ask for --workers on one"
        )
    try:
        return ClusterSpec(jobs)
    except ClusterSpecError as error:
        raise LaunchError(f"the machines do not make a cluster: {error}") from error


def _for_torch(plan: LaunchPlan, seat: Seat, index: int, offers: Sequence[Offer]) -> dict[str, str | None]:
    """Ranks and sizes as torchrun gives them, counted over the tasks that train."""
    here = [each for each in plan.seats if each.trains]
    sizes = [sum(len(offer.jobs.get(job, ())) for job in TRAINING) for offer in offers]
    has_chief = any(offer.jobs.get(CHIEF) for offer in offers)
    rank = index if seat.job == CHIEF else index + has_chief
    address, _, port = offers[0].master.rpartition(":")
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(here.index(seat)),
        "WORLD_SIZE": str(sum(sizes)),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(plan.order.machine.rank),
        "GROUP_WORLD_SIZE": str(len(offers)),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": offers[0].run_id,
    }
