"""Watches over a launch from outside: when the launcher is gone, it ends what that left behind.

Run as a script in a process of its own, which hears through a pipe of every task that starts and
ends. The pipe closes when the launcher ends, however it does. Logs stay; secrets do not.
"""

import contextlib
import os
import signal
import sys


def main(*paths: str) -> None:
    """Reads `+PID` and `-PID` until standard input closes; then kills and removes what is left.

    Args:
        paths: Files, and after them their folders, which stay if they have logs in them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for path in paths:
        with contextlib.suppress(OSError):
            (os.rmdir if os.path.isdir(path) else os.unlink)(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
