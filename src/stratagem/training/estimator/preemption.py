"""Ends a training well when its machine is to be taken away.

SIGTERM, to any of the programs that train together, lets all of them finish the same step, write a checkpoint and
exit with `EXIT_CODE`; started again, they go on with the next batch. A second SIGTERM does not wait.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Final, Self, final

from stratagem.errors import PreemptedExit
from stratagem.training.estimator.hooks import RunContext, RunValues, SessionRunHook

EXIT_CODE: Final = 75
"""Of a program that is to be started again: `EX_TEMPFAIL` of sysexits.h."""

_AT_ONCE: Final = 128 + signal.SIGTERM
_ONE_REQUEST_S: Final = 0.5
"""Who ends a whole group of processes sends the same request by several ways."""


@final
class PreemptionHook(SessionRunHook):
    """Watches for SIGTERM while it is entered, unless the program does so itself, and ends the session then."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._process = 0
        self._step: int | None = None

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._asked)
            self._process = os.getpid()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._asked_at is not None and self._step is None:  # too late for a step, or something else has ended it
                os.kill(os.getpid(), signal.SIGTERM)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        # Also where nobody watches: others may, and all ask at the same time.
        if run_context.agree(self._asked_at is not None):
            self._step = run_context.global_step
            run_context.is_preempted = not run_context.stop_requested  # else it was the last step
            run_context.request_stop()

    def exit_if_asked(self) -> None:
        """Ends the program if that is why the session has ended.

        Raises:
            PreemptedExit: It is.
        """
        if self._step is not None:
            print(
                f"stratagem: SIGTERM came; training has stopped after step {self._step} and is saved. Start the "
                f"program again to go on (exit code {EXIT_CODE})",
                file=sys.stderr,
            )
            raise PreemptedExit(EXIT_CODE)

    def _asked(self, _: int, __: FrameType | None) -> Any:
        if os.getpid() != self._process:  # a process that was forked meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._asked_at is None:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > _ONE_REQUEST_S:
            self._asked_at = None  # that is answered
            print("stratagem: SIGTERM came twice; stopped at once, without a checkpoint", file=sys.stderr)
            raise SystemExit(_AT_ONCE)
