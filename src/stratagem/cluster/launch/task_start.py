"""Becomes a task: ties this process to the launcher, takes its cores, and turns into the program.

Run as a script by `task_processes` and `ray_task`, with nothing imported that takes time. The program is executed in
the place of this process, so that it runs exactly as it does without a launcher.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: str, cores: str, *command: str) -> None:
    """Executes a command that is killed when the launcher dies, however that dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the line above took hold
        return
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execv(command[0], command)  # noqa: S606  # the user's own program


if __name__ == "__main__":
    main(*sys.argv[1:])
