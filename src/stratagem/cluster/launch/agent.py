"""Keeps the tasks of this machine going: torch's elastic agent, with jobs, causes and grace.

The agent's loop meets, starts, watches and restarts. Owns what the end of a task means for the
others: a failure ends all, the end of those that train ends the run. Processes are `task_processes`'s.
"""

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from signal import SIGTERM, Signals
from typing import Any, final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from stratagem._checks import require_seconds
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.failures import Failure, as_shown, first_cause
from stratagem.cluster.launch.plan import TRAINING, LaunchPlan
from stratagem.cluster.launch.rendezvous import Rendezvous
from stratagem.cluster.launch.task_processes import LaunchedTask, Processes, TaskProcesses
from stratagem.cluster.spec import CHIEF, EVALUATOR, PS, WORKER
from stratagem.devices.host import Host
from stratagem.errors import LaunchError

# If the first to fail only says that others are gone, those may need a moment to say why.
_BETTER_CAUSE_S = 0.5
_POLL_S = 0.05
_PART_S = 10.0


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long is waited for tasks that are to end.

    Args:
        grace_s: Between asking a task to end and killing it.
        evaluator_s: For the evaluator, once all that train have ended.
    """

    grace_s: float = 10.0
    evaluator_s: float = 60.0

    def __post_init__(self) -> None:
        times = {"--grace": self.grace_s, "--evaluator-grace": self.evaluator_s}
        require_seconds(LaunchError, or_zero=True, **times)


@final
class TaskAgent(SimpleElasticAgent):
    """Starts the tasks of a plan together, and again when one has failed.

    Args:
        plan: What runs on this machine.
        crew: The processes.
        meeting: The launchers of all machines.
        interrupts: Whether the user has asked to stop.
        patience: How long tasks may take to end.
        new_tasks: What to start, once all have met; given how often that has been done before.
        say: Is told what the user should know while the run goes on.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        crew: Processes,
        meeting: Rendezvous,
        interrupts: CtrlC,
        patience: Patience,
        new_tasks: Callable[[int], Sequence[LaunchedTask]],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._crew = crew
        self._meeting = meeting
        self._interrupts = interrupts
        self._patience = patience
        self._new_tasks = new_tasks
        self._say = say
        self._num_starts = 0
        self._trained_at: float | None = None
        self._num_oom_kills = Host().num_oom_kills()
        self.failures: list[Failure] = []
        super().__init__(
            WorkerSpec(
                role="task",
                local_world_size=len(plan.seats),
                entrypoint=plan.order.program.name,
                rdzv_handler=meeting,
                max_restarts=plan.order.max_restarts,
                monitor_interval=_POLL_S,
            )
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._interrupts.raise_if_asked()
        tasks = self._new_tasks(self._num_starts)
        self._trained_at = None
        pids = self._crew.start(tasks, restart=self._num_starts)
        self._num_starts += 1
        return dict(enumerate(pids))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._interrupts.raise_if_asked()
        self._crew.poll()
        self._replace_workers()
        if failure := self._failure():
            self._crew.stop(grace_s=self._patience.grace_s)
            self._note(as_shown(failure, self._crew.shown()))
            return RunResult(state=WorkerState.FAILED)
        if self._is_done():
            self._crew.stop(grace_s=self._patience.grace_s)
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={worker.global_rank: 0 for worker in worker_group.workers}
            )
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup, **_: Any) -> None:
        self._crew.stop(grace_s=self._patience.grace_s)

    def _shutdown(self, death_sig: Signals = SIGTERM, timeout: int = 0, **_: Any) -> None:
        self._crew.stop(death_sig, grace_s=self._patience.grace_s)

    def _exit_barrier(self) -> None:
        # torch's own waits where a signal is not heard.
        self._meeting.part(self._patience.evaluator_s + self._patience.grace_s + _PART_S)

    def _replace_workers(self) -> None:
        """With parameter servers a worker that has died is started again alone: the others need not wait for it.

        On several machines all tasks are: the launchers of the others have heard of the failure already.
        """
        offers = self._meeting.offers
        if not isinstance(self._crew, TaskProcesses) or len(offers) != 1 or PS not in offers[0].jobs:
            return
        first = CHIEF if CHIEF in offers[0].jobs else f"{WORKER}/0"
        for ended in self._crew.failed():
            failure = self._crew.explain(ended, killed_for_memory=False)
            may_be_replaced = ended.task.seat.job == WORKER and ended.task.name != first and not failure.is_consequence
            if not may_be_replaced or not self._remaining_restarts:
                return
            self._remaining_restarts -= 1
            self._note(failure, f"starting {ended.task.name} again")
            self._crew.start_again(ended, restart=len(self.failures))

    def _failure(self) -> Failure | None:
        """Why the tasks must end, if one of them has failed, here or elsewhere."""
        elsewhere = self._meeting.failures_elsewhere()
        here = self._failed_here()
        if not here and not elsewhere:
            return None
        deadline = time.monotonic() + _BETTER_CAUSE_S
        while first_cause([*here, *elsewhere]).is_consequence and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._crew.poll()
            elsewhere, here = self._meeting.failures_elsewhere(), self._failed_here()
        if here:
            self._meeting.report(dataclasses.replace(first_cause(here), host=socket.gethostname(), shown=False))
        return first_cause([*here, *elsewhere])

    def _failed_here(self) -> list[Failure]:
        failed = self._crew.failed()
        out_of_memory = bool(failed) and Host().num_oom_kills() > self._num_oom_kills
        return [self._crew.explain(each, killed_for_memory=out_of_memory) for each in failed]

    def _note(self, failure: Failure, consequence: str = "starting all tasks again") -> None:
        self.failures.append(failure)
        if len(self.failures) <= self._plan.order.max_restarts:
            self._say(
                f"{failure.describe()}; {consequence} (restart {len(self.failures)} of {self._plan.order.max_restarts})"
            )

    def _is_done(self) -> bool:
        """Whether all that train have ended well, on every machine, and the evaluator had its time."""
        if self._trained_at is None:
            if self._crew.running(*TRAINING) or not self._meeting.all_trained():
                return False
            self._trained_at = time.monotonic()
            if late := self._crew.running(EVALUATOR):
                self._say(f"training has ended; {late[0]} may take another {self._patience.evaluator_s:g} s")
        waited_s = time.monotonic() - self._trained_at
        if late := self._crew.running(EVALUATOR):
            if waited_s < self._patience.evaluator_s:
                return False
            self._say(f"{late[0]} is stopped: it has not ended {self._patience.evaluator_s:g} s after training")
        return True
