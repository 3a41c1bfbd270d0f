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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final

from stratagem.cluster.launch import task_start
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.failures import Failure, explain
from stratagem.cluster.launch.output import Screen, TaskOutput
from stratagem.cluster.launch.plan import JOBS, Seat
from stratagem.cluster.launch.run_directory import RunDirectory
from stratagem.cluster.spec import PS
from stratagem.errors import LaunchError

_POLL_S = 0.02
_KILL_TIMEOUT_S = 10.0
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


class Processes(Protocol):
    """The processes of all tasks of a start, wherever they are."""

    ended: list[Ended]

    def start(self, tasks: Sequence[LaunchedTask], *, restart: int) -> list[int]:
        """Starts all tasks; their process ids."""

    def poll(self) -> None:
        """Notes which tasks have ended."""

    def failed(self) -> list[Ended]:
        """Tasks that have ended by themselves and not well, the earliest first."""

    def explain(self, ended: Ended, *, killed_for_memory: bool) -> Failure:
        """Says why a task that has ended did so; before `stop`."""

    def running(self, *jobs: str) -> list[str]:
        """The names of tasks of these jobs that have not ended."""

    def stop(self, number: signal.Signals = signal.SIGTERM, grace_s: float = 10.0) -> None:
        """Ends all tasks: asks them by a signal, waits, kills; at once if the user asks a second time."""

    def shown(self) -> dict[str, str]:
        """The last that each task wrote whose output was shown; after `stop`."""


@final
class TaskProcesses:
    """The processes of all tasks on this machine.

    Args:
        command: What each of them runs.
        directory: Where logs are, and who cleans up if this process is killed.
        screen: What is shown of their output.
        interrupts: Tells whether the user has asked to stop at once.
        say: Is told when tasks take long to end.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: RunDirectory,
        screen: Screen,
        interrupts: CtrlC,
        say: Callable[[str], None],
    ) -> None:
        self._command = command
        self._directory = directory
        self._screen = screen
        self._interrupts = interrupts
        self._say = say
        self._running: dict[int, tuple[LaunchedTask, subprocess.Popen[bytes]]] = {}
        self._asked: set[int] = set()
        self._output: TaskOutput | None = None
        self._last_output: TaskOutput | None = None
        self.ended: list[Ended] = []

    def start(self, tasks: Sequence[LaunchedTask], *, restart: int) -> list[int]:
        """Starts all tasks; their process ids."""
        self.ended = []
        self._asked.clear()
        self._output = TaskOutput(self._directory.logs, self._screen)
        pids = [self._start(self._output, task, restart) for task in tasks]
        self._output.start(pids)
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

    def failed(self) -> list[Ended]:
        """Tasks that have ended by themselves and not well, the earliest first."""
        return sorted((each for each in self.ended if each.code and not each.asked), key=lambda each: each.at)

    def explain(self, ended: Ended, *, killed_for_memory: bool) -> Failure:
        """Says why a task that has ended did so; before `stop`."""
        log_tail = self._output.tail(ended.task.name) if self._output else ""
        at = time.time() - (time.monotonic() - ended.at)
        failure = explain(ended.task.name, ended.code, log_tail, at=at, killed_for_memory=killed_for_memory)
        return dataclasses.replace(failure, shown=self._screen.shows(ended.task.name, ended.task.number))

    def running(self, *jobs: str) -> list[str]:
        """The names of tasks of these jobs that have not ended."""
        return [task.name for task, _ in self._running.values() if task.seat.job in jobs]

    def stop(self, number: signal.Signals = signal.SIGTERM, grace_s: float = 10.0) -> None:
        """Ends all tasks: asks them by a signal, waits, kills; at once if the user asks a second time.

        Parameter servers come last, so that no task loses its own while it ends.
        """
        deadline = time.monotonic() + grace_s
        patient_until = time.monotonic() + _PATIENT_S
        for jobs in ([job for job in JOBS if job != PS], [PS]):
            for pid, (task, _) in self._running.items():
                if task.seat.job in jobs:
                    self._asked.add(pid)
                    # It alone: children of its own (those that load its data) must serve it until it has saved.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            while self.running(*jobs) and time.monotonic() < deadline and not self._interrupts.insisted:
                time.sleep(_POLL_S)
                self.poll()
                if time.monotonic() > patient_until and self.running(*jobs):
                    patient_until = math.inf
                    self._say(
                        f"waiting up to {grace_s:g} s for {', '.join(self.running(*jobs))} to end; Ctrl-C ends it"
                    )
        self._kill()
        if self._output:
            self._output.close()
            self._output, self._last_output = None, self._output

    def shown(self) -> dict[str, str]:
        """The last that each task wrote whose output was shown; after `stop`."""
        return self._last_output.shown() if self._last_output is not None else {}

    def _start(self, output: TaskOutput, task: LaunchedTask, restart: int) -> int:
        out, err = output.open(task.name, task.number, restart=restart)
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", task_start.__file__, str(os.getpid())),
                    ",".join(map(str, task.seat.cores)),
                    *self._command,
                ],
                env=task.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C is the launcher's to pass on, and all of a task can be ended at once
            )
        finally:
            os.close(out)
            os.close(err)
        self._directory.watch(process.pid)
        self._running[process.pid] = task, process
        return process.pid

    def _kill(self) -> None:
        for pid in self._running:
            _kill_group(pid)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while self._running and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_S if self._running else 0.0)
        for pid, (task, _) in self._running.items():
            raise LaunchError(
                f"{task.name} (pid {pid}) does not end although it was killed; the kernel holds it, "
                f"most often in a driver: /proc/{pid}/stack says where"
            )

    def _bury(self, pid: int) -> None:
        _kill_group(pid)  # children of its own that it left behind
        task, process = self._running.pop(pid)
        code = process.wait()
        self._directory.release(pid)
        at = self._output.ended_at(pid) if self._output else time.monotonic()
        self.ended.append(Ended(task, code, at, asked=pid in self._asked))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
