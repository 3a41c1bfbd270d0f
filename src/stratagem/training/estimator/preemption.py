"""Ends a training well when its machine is to be taken away.

SIGTERM, to any of the programs that train together, lets all of them finish the same step, write a checkpoint and
exit with `EXIT_CODE`; started again, they go on with the next batch. A second SIGTERM does not wait.
"""

import signal
import sys
import threading
from types import FrameType
from typing import Any, Final, Self, final

from stratagem.errors import PreemptedExit
from stratagem.training.estimator.hooks import RunContext, RunValues, SessionRunHook

EXIT_CODE: Final = 75
"""Of a program that is to be started again: `EX_TEMPFAIL` of sysexits.h."""

_AT_ONCE: Final = 128 + signal.SIGTERM


@final
class PreemptionHook(SessionRunHook):
    """Watches for SIGTERM while it is entered, unless the program does so itself, and ends the session then."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._is_watching = False
        self._step: int | None = None

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._asked)
            self._is_watching = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_watching:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._is_watching = False

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        # Also where nobody watches: others may, and all ask at the same time.
        if run_context.agree(self._num_asked > 0):
            self._step = run_context.global_step
            run_context.is_preempted = True
            run_context.request_stop()

    def exit_if_asked(self) -> None:
        """Ends the program if that is why the session has ended.

        Raises:
            PreemptedExit: It is.
        """
        if self._step is not None:
            print(
                f"stratagem: SIGTERM came; training has stopped after step {self._step}, which is saved. Start the "
                f"program again to go on (exit code {EXIT_CODE})",
                file=sys.stderr,
            )
            raise PreemptedExit(EXIT_CODE)

    def _asked(self, _: int, __: FrameType | None) -> Any:
        self._num_asked += 1
        if self._num_asked > 1:
            print("stratagem: SIGTERM came twice; stopped at once, without a checkpoint", file=sys.stderr)
            raise SystemExit(_AT_ONCE)
