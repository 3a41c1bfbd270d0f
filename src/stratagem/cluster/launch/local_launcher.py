"""Starts a program as the tasks of a cluster, and tells how that ended.

One launcher for each way of starting; this one starts processes on this machine, together with the
launchers of other machines if there are several. Owns the order in which a launch is set up and
taken down. What is shown of it is `cli`'s.
"""

import contextlib
import dataclasses
import logging
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.elastic.multiprocessing import SignalException

from stratagem.cluster import token
from stratagem.cluster.launch.agent import Patience, TaskAgent
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.environment import Offer, tasks_here
from stratagem.cluster.launch.failures import Failure
from stratagem.cluster.launch.machines_meeting import MachineLink, linked
from stratagem.cluster.launch.output import Screen
from stratagem.cluster.launch.plan import LaunchPlan, Order
from stratagem.cluster.launch.ports import Ports
from stratagem.cluster.launch.rendezvous import Rendezvous
from stratagem.cluster.launch.run_directory import RunDirectory
from stratagem.cluster.launch.task_processes import Processes, TaskProcesses
from stratagem.cluster.spec import EVALUATOR
from stratagem.errors import TaskLostError

_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class LaunchOutcome:
    """How a launch has ended.

    Args:
        code: The exit code of the program.
        failures: The first cause of each start that failed.
        stopped_by: The signal by which the user or the system ended it.
        logs: Where the output of all tasks is, if it was kept.
    """

    code: int
    failures: tuple[Failure, ...] = ()
    stopped_by: signal.Signals | None = None
    logs: Path | None = None


@final
class LocalLauncher:
    """Starts tasks as processes of this machine.

    Args:
        screen: What is shown of their output.
        say: Is told what the user should know while the run goes on.
        log_dir: Where output is kept for good; by default only that of a run that fails is kept.
        patience: How long tasks may take to end.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        say: Callable[[str], None],
        log_dir: Path | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._screen = screen
        self._say = say
        self._log_dir = log_dir
        self._patience = patience or Patience()

    def launch(self, plan: LaunchPlan) -> LaunchOutcome:
        """Runs all tasks until they have ended.

        Raises:
            LaunchError: They could not be started.
        """
        with quiet(), CtrlC() as interrupts, RunDirectory(self._log_dir) as directory:
            try:
                with _link(plan.order, directory, interrupts) as link, contextlib.closing(Ports(link.host)) as ports:
                    outcome = self._run(plan, link, _offer(plan, ports), directory, interrupts)
            except _CutShortError as error:
                outcome = error.outcome
            except SignalException as stopped:  # before there was anything to stop
                outcome = LaunchOutcome(128 + stopped.sigval, stopped_by=stopped.sigval)
            directory.succeeded = outcome.code == 0
            return dataclasses.replace(outcome, logs=directory.kept_logs())

    def _run(
        self, plan: LaunchPlan, link: MachineLink, offer: Offer, directory: RunDirectory, interrupts: CtrlC
    ) -> LaunchOutcome:
        command = plan.order.program.command
        crew = TaskProcesses(command, directory=directory, screen=self._screen, interrupts=interrupts, say=self._say)
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
            patience=self._patience,
            new_tasks=lambda number: tasks_here(plan, meeting.offers, restart=number, token_file=link.token_file),
            say=self._say,
        )
        try:
            result = agent.run()
        except SignalException as stopped:
            code = code_when_stopped(crew, stopped.sigval)
            raise _CutShortError(str(stopped), LaunchOutcome(code, tuple(agent.failures), stopped.sigval)) from None
        except TaskLostError as error:
            lost = link.lost() or Failure(f"machine 0 ({plan.order.machine.endpoint})", 1, f"was lost: {error}")
            raise _CutShortError(lost.describe(), LaunchOutcome(lost.code, (*agent.failures, lost))) from None
        return LaunchOutcome(agent.failures[-1].code if result.is_failed() else 0, tuple(agent.failures))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps off the screen what libraries log of tasks and machines: a launch says it better."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "stratagem.cluster")]
    before = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, before, strict=True):
            logger.removeHandler(silence)
            logger.propagate = propagates


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


def code_when_stopped(crew: Processes, number: signal.Signals) -> int:
    """What the program made of the signal: its own code, or the one of a process that it has killed."""
    codes = [each.code for each in crew.ended if each.task.seat.trains]
    if not codes or any(code < 0 for code in codes):
        return 128 + number
    return next(filter(None, codes), 0)
