"""Becomes a task: ties this process to the launcher, takes its cores, and turns into the program.

Run as a script by `task_processes` and `ray_task`, with nothing imported that takes time. The program is executed in
the place of this process, so that it runs exactly as it does without a launcher.
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(options: dict[str, object], program: list[str]) -> list[str]:
    """What makes a child of this process a task that runs a program.

    Args:
        options: How it runs (`Seat.start_options`).
        program: The program with its arguments.
    """
    given = json.dumps({"launcher": os.getpid(), **options})
    return [sys.executable, "-I", "-S", __file__, given, *program]


def main(given: str, *program: str) -> None:
    """Executes a program that is killed when the launcher dies, however that dies."""
    options = json.loads(given)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options["launcher"]:  # it died before the line above took hold
        return
    if options["cores"]:
        os.sched_setaffinity(0, options["cores"])
    os.execv(program[0], program)  # noqa: S606  # the user's own program


if __name__ == "__main__":
    main(*sys.argv[1:])
