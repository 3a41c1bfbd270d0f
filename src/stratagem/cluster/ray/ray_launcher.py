"""Starts a program as the tasks of a cluster on the machines of Ray, and tells how that ended.

Owns what Ray is asked for. The tasks are `ray_crew`'s; restarts, causes and what is shown are those of
other launches.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import final

from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.elastic.multiprocessing import SignalException

from stratagem.cluster import token
from stratagem.cluster.launch.agent import Patience, TaskAgent
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.environment import Offer
from stratagem.cluster.launch.local_launcher import LaunchOutcome, code_when_stopped, quiet
from stratagem.cluster.launch.output import Screen
from stratagem.cluster.launch.plan import LaunchPlan, Machine, Order, Seat
from stratagem.cluster.launch.rendezvous import Rendezvous
from stratagem.cluster.launch.run_directory import RunDirectory
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


@final
class RayLauncher:
    """Starts tasks on the machines of Ray.

    Args:
        screen: What is shown of their output.
        asked: What Ray is asked for.
        say: Is told what the user should know while the run goes on.
        log_dir: Where output is kept for good; by default only that of a run that fails is kept.
        patience: How long tasks may take to end.
    """

    def __init__(
        self,
        screen: Screen,
        asked: RayOrder,
        *,
        say: Callable[[str], None],
        log_dir: Path | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._screen = screen
        self._asked = asked
        self._say = say
        self._log_dir = log_dir
        self._patience = patience or Patience()

    def launch(self, order: Order) -> LaunchOutcome:
        """Runs all tasks until they have ended.

        Raises:
            LaunchError: They could not be started.
            ClusterError: There is no Ray, or it has no room for them.
        """
        make_ray_plan(order)
        with quiet(), CtrlC() as interrupts, RunDirectory(self._log_dir) as directory:
            token.create(directory.token)
            try:
                with interrupts.raising():
                    placement, plan = _reserve(order, self._asked)
                with contextlib.closing(placement):
                    outcome = self._run(plan, placement, directory, interrupts)
            except SignalException as stopped:  # before there was anything to stop
                outcome = LaunchOutcome(128 + stopped.sigval, stopped_by=stopped.sigval)
            directory.succeeded = outcome.code == 0
            return dataclasses.replace(outcome, logs=directory.kept_logs())

    def _run(
        self, plan: LaunchPlan, placement: RayPlacement, directory: RunDirectory, interrupts: CtrlC
    ) -> LaunchOutcome:
        crew = RayCrew(
            plan,
            placement,
            directory=directory,
            screen=self._screen,
            interrupts=interrupts,
            start_timeout_s=self._asked.start_timeout_s,
        )
        agent = TaskAgent(
            plan,
            crew=crew,
            meeting=Rendezvous(HashStore(), machine=Machine(), offer=Offer("", {}, NOWHERE), interrupts=interrupts),
            interrupts=interrupts,
            patience=self._patience,
            new_tasks=crew.new_tasks,
            say=self._say,
        )
        try:
            result = agent.run()
        except SignalException as stopped:
            code = code_when_stopped(crew, stopped.sigval)
            return LaunchOutcome(code, tuple(agent.failures), stopped.sigval)
        finally:
            crew.stop(grace_s=0.0)
        return LaunchOutcome(agent.failures[-1].code if result.is_failed() else 0, tuple(agent.failures))


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
