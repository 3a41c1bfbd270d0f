"""Starts a program as the tasks of a cluster on the machines of Ray, and tells how that ended.

Owns what Ray is asked for. The tasks are `ray_crew`'s; restarts, causes and what is shown are those of
other launches.
"""

import contextlib
import dataclasses

from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its __all__

from stratagem.cluster import token
from stratagem.cluster.launch.agent import TaskAgent
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.environment import Offer
from stratagem.cluster.launch.launching import Launching, LaunchOutcome, outcome_of
from stratagem.cluster.launch.plan import LaunchPlan, Machine, Order, Seat
from stratagem.cluster.launch.rendezvous import Rendezvous
from stratagem.cluster.launch.run_directory import RunDirectory
from stratagem.cluster.launch.task_processes import Launcher
from stratagem.cluster.ray import ray_session
from stratagem.cluster.ray.ray_crew import NOWHERE, RayCrew
from stratagem.cluster.ray.ray_placement import RayPlacement, Room, num_nodes_and_least
from stratagem.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class RayOrder:
    """What Ray is asked for.

    Args:
        address: Where it is; without one a Ray of this machine alone is started.
        cpus_per_worker: For each task; by default 1, or those of a machine if there is a worker on each.
        gpus_per_worker: For each training task; by default none, or those of a machine.
        start_timeout_s: How long to wait until all tasks have their places.
    """

    address: str | None = None
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, number in (
            ("--cpus-per-worker", self.cpus_per_worker),
            ("--gpus-per-worker", self.gpus_per_worker),
        ):
            if number is not None and not 0 <= number < 10**6:
                raise LaunchError(f"{name} must be a number from 0 up, got {number:g}")


def make_ray_plan(order: Order) -> LaunchPlan:
    """What is started, as far as that is known before Ray is asked."""
    order.program.check()
    if order.machine.count > 1:
        raise LaunchError("--nnodes is for machines that are started one by one; with --ray, Ray chooses among its own")
    known = order if order.is_cluster else dataclasses.replace(order, num_workers=1)
    seats = [Seat(job, number) for job, count in known.counts().items() for number in range(count)]
    reasons = ["Ray chooses the machines when the tasks are started"]
    if not order.is_cluster:
        reasons.append("without --workers, each of Ray's machines has one worker")
    return LaunchPlan(known, tuple(seats), tuple(reasons))


def launch_on_ray(order: Order, asked: RayOrder, how: Launching) -> LaunchOutcome:
    """Runs all tasks on the machines of Ray until they have ended.

    Args:
        order: What is started.
        asked: What Ray is asked for.
        how: What the user sees and keeps of it.
    Raises:
        LaunchError: They could not be started.
        ClusterError: There is no Ray, or it has no room for them.
    """
    make_ray_plan(order)

    def launch(directory: RunDirectory, interrupts: CtrlC) -> LaunchOutcome:
        token.create(directory.token)
        with interrupts.raising():
            placement, plan = _reserve(order, asked)
        with contextlib.closing(placement):
            return _run(plan, placement, asked, how, directory, interrupts)

    return how.run(launch)


def _run(
    plan: LaunchPlan,
    placement: RayPlacement,
    asked: RayOrder,
    how: Launching,
    directory: RunDirectory,
    interrupts: CtrlC,
) -> LaunchOutcome:
    launcher = Launcher(directory, how.screen, interrupts, how.say)
    crew = RayCrew(launcher, plan, placement, start_timeout_s=asked.start_timeout_s)
    agent = TaskAgent(
        plan,
        crew=crew,
        meeting=Rendezvous(HashStore(), machine=Machine(), offer=Offer("", {}, NOWHERE), interrupts=interrupts),
        interrupts=interrupts,
        patience=how.patience,
        new_tasks=crew.new_tasks,
        say=how.say,
    )
    try:
        return outcome_of(agent, crew)
    finally:
        crew.stop(grace_s=0.0)


def _reserve(order: Order, asked: RayOrder) -> tuple[RayPlacement, LaunchPlan]:
    """Room for all tasks, and what they are."""
    ray = ray_session.acquire(asked.address)
    try:
        num_nodes, least = num_nodes_and_least(ray)
        default = {"CPU": 1.0, "GPU": 0.0} if order.is_cluster else least
        cpus = default["CPU"] if asked.cpus_per_worker is None else asked.cpus_per_worker
        gpus = default["GPU"] if asked.gpus_per_worker is None else asked.gpus_per_worker
        plan = make_ray_plan(order if order.is_cluster else dataclasses.replace(order, num_workers=num_nodes))
        needs = [{"CPU": cpus, "GPU": gpus if seat.trains else 0.0} for seat in plan.seats]
        room = Room(
            tuple({kind: amount for kind, amount in each.items() if amount} for each in needs),
            asked.address,
            "PACK" if order.is_cluster else "STRICT_SPREAD",
            timeout_s=asked.start_timeout_s,
            advice="ask for fewer --workers or less of --cpus-per-worker and --gpus-per-worker, or raise "
            "--join-timeout",
        )
        return RayPlacement(room), plan
    finally:
        ray_session.release()
