"""Starts a program as tasks on this machine, together with the launchers of other machines if there are several.

Owns the order in which such a launch is set up and taken down.
"""

import contextlib
import secrets
from collections.abc import Iterator

from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its __all__

from stratagem.cluster import token
from stratagem.cluster.launch.agent import TaskAgent
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.environment import Offer, tasks_here
from stratagem.cluster.launch.failures import Failure
from stratagem.cluster.launch.launching import Launching, LaunchOutcome, outcome_of
from stratagem.cluster.launch.machines_meeting import MachineLink, linked
from stratagem.cluster.launch.plan import LaunchPlan, Order
from stratagem.cluster.launch.ports import Ports
from stratagem.cluster.launch.rendezvous import Rendezvous
from stratagem.cluster.launch.run_directory import RunDirectory
from stratagem.cluster.launch.task_processes import Launcher, TaskProcesses
from stratagem.cluster.spec import EVALUATOR
from stratagem.errors import TaskLostError

_LOOPBACK = "127.0.0.1"


def launch_here(plan: LaunchPlan, how: Launching) -> LaunchOutcome:
    """Runs all tasks as processes of this machine until they have ended.

    Args:
        plan: What is started.
        how: What the user sees and keeps of it.
    Raises:
        LaunchError: They could not be started.
    """

    def launch(directory: RunDirectory, interrupts: CtrlC) -> LaunchOutcome:
        try:
            with _link(plan.order, directory, interrupts) as link, contextlib.closing(Ports(link.host)) as ports:
                return _run(plan, how, link, _offer(plan, ports), directory, interrupts)
        except _CutShortError as error:
            return error.outcome

    return how.run(launch)


def _run(
    plan: LaunchPlan, how: Launching, link: MachineLink, offer: Offer, directory: RunDirectory, interrupts: CtrlC
) -> LaunchOutcome:
    crew = TaskProcesses(Launcher(directory, how.screen, interrupts, how.say), plan.order.program.command)
    meeting = Rendezvous(
        link.store,
        machine=plan.order.machine,
        offer=offer,
        interrupts=interrupts,
        raise_if_lost=link.raise_if_lost,
    )
    agent = TaskAgent(
        plan,
        crew=crew,
        meeting=meeting,
        interrupts=interrupts,
        patience=how.patience,
        new_tasks=lambda number: tasks_here(plan, meeting.offers, restart=number, token_file=link.token_file),
        say=how.say,
    )
    try:
        outcome = outcome_of(agent, crew)
    except TaskLostError as error:
        lost = link.lost() or Failure(f"machine 0 ({plan.order.machine.endpoint})", 1, f"was lost: {error}")
        raise _CutShortError(lost.describe(), LaunchOutcome(lost.code, (*agent.failures, lost))) from None
    if outcome.stopped_by is not None:
        raise _CutShortError(f"asked to stop by {outcome.stopped_by.name}", outcome)
    return outcome


class _CutShortError(Exception):
    """A run has ended in a way that other machines must be told of."""

    def __init__(self, why: str, outcome: LaunchOutcome) -> None:
        super().__init__(why)
        self.outcome = outcome


@contextlib.contextmanager
def _link(order: Order, directory: RunDirectory, interrupts: CtrlC) -> Iterator[MachineLink]:
    if order.machine.count > 1:
        with linked(order, interrupts) as link:
            yield link
    else:
        token.create(directory.token)
        yield MachineLink(HashStore(), _LOOPBACK, str(directory.token))


def _offer(plan: LaunchPlan, ports: Ports) -> Offer:
    """Addresses for all tasks of this machine; an evaluator needs none, since nobody connects to it."""
    jobs: dict[str, list[str]] = {}
    for seat in plan.seats:
        jobs.setdefault(seat.job, []).append("" if seat.job == EVALUATOR else ports.pick())
    return Offer(secrets.token_hex(8), jobs, master=ports.pick())
