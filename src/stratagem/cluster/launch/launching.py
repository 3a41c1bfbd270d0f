"""What every launch has, wherever its tasks start: its files, what ends it, and how it ended.

What is shown of it is `cli`'s.
"""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from torch.distributed.elastic.multiprocessing import SignalException

from stratagem.cluster.launch.agent import Patience, TaskAgent
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.failures import Failure
from stratagem.cluster.launch.output import Screen
from stratagem.cluster.launch.run_directory import RunDirectory
from stratagem.cluster.launch.task_processes import Processes


@final
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
@dataclasses.dataclass(frozen=True)
class Launching:
    """What a user sees and keeps of a launch.

    Args:
        screen: What is shown of the output of tasks.
        say: Is told what the user should know while the run goes on.
        log_dir: Where output is kept for good; by default only that of a run that fails is kept.
        patience: How long tasks may take to end.
    """

    screen: Screen
    say: Callable[[str], None]
    log_dir: Path | None = None
    patience: Patience = dataclasses.field(default_factory=Patience)

    def run(self, launch: Callable[[RunDirectory, CtrlC], LaunchOutcome]) -> LaunchOutcome:
        """Runs tasks until they have ended."""
        with _quiet(), CtrlC() as interrupts, RunDirectory(self.log_dir) as directory:
            try:
                outcome = launch(directory, interrupts)
            except SignalException as stopped:  # before there was anything to stop
                outcome = LaunchOutcome(128 + stopped.sigval, stopped_by=stopped.sigval)
            directory.succeeded = outcome.code == 0
            return dataclasses.replace(outcome, logs=directory.kept_logs())


def outcome_of(agent: TaskAgent, crew: Processes) -> LaunchOutcome:
    """Lets an agent run its tasks; how that has ended."""
    try:
        result = agent.run()
    except SignalException as stopped:
        return LaunchOutcome(_code_when_stopped(crew, stopped.sigval), tuple(agent.failures), stopped.sigval)
    return LaunchOutcome(agent.failures[-1].code if result.is_failed() else 0, tuple(agent.failures))


def _code_when_stopped(crew: Processes, number: signal.Signals) -> int:
    """What the program made of the signal: its own code, or the one of a process that it has killed."""
    codes = [each.code for each in crew.ended if each.task.seat.trains]
    if not codes or any(code < 0 for code in codes):
        return 128 + number
    return next(filter(None, codes), 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
