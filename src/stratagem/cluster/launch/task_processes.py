"""Starts, watches and stops the processes of the tasks on this machine.

Owns the processes, their groups and the order in which they are ended. What they run is
`plan`'s, what their ends mean is `agent`'s.
"""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import final

from stratagem.cluster.launch import task_start
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.failures import Failure, explain
from stratagem.cluster.launch.output import Screen, TaskOutput
from stratagem.cluster.launch.plan import JOBS, Seat
from stratagem.cluster.launch.run_directory import RunDirectory
from stratagem.cluster.spec import PS
from stratagem.errors import LaunchError

POLL_S = 0.02
KILL_TIMEOUT_S = 10.0
_PATIENT_S = 2.0


@dataclasses.dataclass(frozen=True)
class LaunchedTask:
    """One process to start.

    Args:
        name: Such as `worker/1`, counted over all machines.
        number: Which on this machine.
        seat: Where it runs.
        environment: All of its environment variables.
    """

    name: str
    number: int
    seat: Seat
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A task that has ended.

    Args:
        code: As `subprocess` gives it: negative for a signal.
        at: When, by the monotonic clock.
        asked: Whether it had been asked to end; else it did so by itself.
    """

    task: LaunchedTask
    code: int
    at: float
    asked: bool


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The process that has started all tasks, as far as those concern it.

    Args:
        directory: Where logs are, and who cleans up if it is killed.
        screen: What is shown of their output.
        interrupts: Tells whether the user has asked to stop at once.
        say: Is told when tasks take long to end.
    """

    directory: RunDirectory
    screen: Screen
    interrupts: CtrlC
    say: Callable[[str], None]


class Processes(ABC):
    """The processes of all tasks of a start, wherever they are, and the order in which they are ended.

    Args:
        launcher: Who starts them.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._asked: set[str] = set()
        self._output: TaskOutput | None = None
        self._last_output: TaskOutput | None = None
        self.ended: list[Ended] = []

    def start(self, tasks: Sequence[LaunchedTask], *, restart: int) -> list[int]:
        """Starts all tasks; their process ids."""
        self.ended = []
        self._asked.clear()
        self._output = TaskOutput(self._launcher.directory.logs, self._launcher.screen)
        return self._start_all(self._output, tasks, restart)

    def failed(self) -> list[Ended]:
        """Tasks that have ended by themselves and not well, the earliest first."""
        return sorted((each for each in self.ended if each.code and not each.asked), key=lambda each: each.at)

    def _explained(self, ended: Ended, *, killed_for_memory: bool = False) -> Failure:
        """Why a task has ended, by its code and its output."""
        name, at = ended.task.name, time.time() - (time.monotonic() - ended.at)
        log_tail = self._output.tail(name) if self._output else ""
        failure = explain(name, ended.code, log_tail, at=at, killed_for_memory=killed_for_memory)
        return dataclasses.replace(failure, shown=self._launcher.screen.shows(name, ended.task.number))

    def running(self, *jobs: str) -> list[str]:
        """The names of tasks of these jobs that have not ended."""
        return [task.name for task in self._under_way() if task.seat.job in jobs]

    def stop(self, number: signal.Signals = signal.SIGTERM, grace_s: float = 10.0) -> None:
        """Ends all tasks: asks them by a signal, waits, kills; at once if the user asks a second time.

        Parameter servers come last, so that no task loses its own while it ends.
        """
        deadline = time.monotonic() + grace_s
        patient_until = time.monotonic() + _PATIENT_S
        for jobs in ([job for job in JOBS if job != PS], [PS]):
            self._asked.update(self.running(*jobs))
            self._signal(self.running(*jobs), number)
            while self.running(*jobs) and time.monotonic() < deadline and not self._launcher.interrupts.insisted:
                time.sleep(POLL_S)
                self.poll()
                if time.monotonic() > patient_until and self.running(*jobs):
                    patient_until = math.inf
                    self._launcher.say(
                        f"waiting up to {grace_s:g} s for {', '.join(self.running(*jobs))} to end; Ctrl-C ends it"
                    )
        self._signal(self.running(*JOBS), signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while self._under_way() and time.monotonic() < deadline:
            self.poll()
            time.sleep(POLL_S if self._under_way() else 0.0)
        self._leave()
        if self._output:
            self._output.close()
            self._output, self._last_output = None, self._output

    def shown(self) -> dict[str, str]:
        """The last that each task wrote whose output was shown; after `stop`."""
        return self._last_output.shown() if self._last_output is not None else {}

    @abstractmethod
    def poll(self) -> None:
        """Notes which tasks have ended."""

    @abstractmethod
    def explain(self, ended: Ended, *, killed_for_memory: bool) -> Failure:
        """Says why a task that has ended did so; before `stop`."""

    @abstractmethod
    def _start_all(self, output: TaskOutput, tasks: Sequence[LaunchedTask], restart: int) -> list[int]:
        """Starts all tasks, whose output goes there; their process ids."""

    @abstractmethod
    def _under_way(self) -> list[LaunchedTask]:
        """The tasks that have not ended."""

    @abstractmethod
    def _signal(self, names: Sequence[str], number: signal.Signals) -> None:
        """Sends tasks a signal."""

    @abstractmethod
    def _leave(self) -> None:
        """Gives up what tasks had, when all have been killed; some may not have ended."""


@final
class TaskProcesses(Processes):
    """The processes of all tasks on this machine.

    Args:
        launcher: Who starts them.
        command: What each of them runs.
    """

    def __init__(self, launcher: Launcher, command: Sequence[str]) -> None:
        super().__init__(launcher)
        self._command = command
        self._running: dict[int, tuple[LaunchedTask, subprocess.Popen[bytes]]] = {}

    def _start_all(self, output: TaskOutput, tasks: Sequence[LaunchedTask], restart: int) -> list[int]:
        pids = [self._start(output, task, restart) for task in tasks]
        output.start(pids)
        return pids

    def start_again(self, ended: Ended, *, restart: int) -> None:
        """Starts one task anew, while the others go on."""
        if self._output is None:
            raise LaunchError(f"{ended.task.name} cannot be started again: the others have been stopped")
        self.ended.remove(ended)
        self._output.watch(self._start(self._output, ended.task, restart))

    def poll(self) -> None:
        """Notes which tasks have ended."""
        for pid in list(self._running):
            # Looked at without being buried: until then nobody else can get its number.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._bury(pid)

    def explain(self, ended: Ended, *, killed_for_memory: bool) -> Failure:
        return self._explained(ended, killed_for_memory=killed_for_memory)

    def _under_way(self) -> list[LaunchedTask]:
        return [task for task, _ in self._running.values()]

    def _signal(self, names: Sequence[str], number: signal.Signals) -> None:
        for pid, (task, _) in self._running.items():
            if task.name in names and number == signal.SIGKILL:
                _kill_group(pid)
            elif task.name in names:
                # It alone: children of its own (those that load its data) must serve it until it has saved.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _start(self, output: TaskOutput, task: LaunchedTask, restart: int) -> int:
        out, err = output.open(task.name, task.number, restart=restart)
        try:
            process = subprocess.Popen(
                task_start.command(task.seat.start_options, [*self._command]),
                env=task.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C is the launcher's to pass on, and all of a task can be ended at once
            )
        finally:
            os.close(out)
            os.close(err)
        self._launcher.directory.watch(process.pid)
        self._running[process.pid] = task, process
        return process.pid

    def _leave(self) -> None:
        for pid, (task, _) in self._running.items():
            raise LaunchError(
                f"{task.name} (pid {pid}) does not end although it was killed; the kernel holds it, "
                f"most often in a driver: /proc/{pid}/stack says where"
            )

    def _bury(self, pid: int) -> None:
        _kill_group(pid)  # children of its own that it left behind
        task, process = self._running.pop(pid)
        code = process.wait()
        self._launcher.directory.release(pid)
        at = self._output.ended_at(pid) if self._output else time.monotonic()
        self.ended.append(Ended(task, code, at, asked=task.name in self._asked))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
