"""Runs a command with all of its descendants in view: their memory, and their end.

A command's processes are found by their parents, not by their group or session: torchrun gives each
worker a session of its own.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER = 36
_END_DEADLINE_S = 10.0


class CommandFailed(Exception):  # noqa: N818  # the name says it
    """A command did not end well; its text is the end of the command's output."""


def descendants(pid: int) -> list[int]:
    """The children of a process, their children and so on; without itself."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        own = children.get(left.pop(), [])
        found += own
        left += own
    return found


def pss_mb(pids: Iterable[int]) -> float:
    """The memory of processes; a page that several share counts once, split between them."""
    total_kb = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total_kb += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total_kb / 1024


def processor_s(pids: Iterable[int]) -> float:
    """The processor time of all threads of processes so far."""
    total_ns = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("[0-9]*/schedstat"):
            with contextlib.suppress(OSError):
                total_ns += int(thread.read_text().split()[0])
    return total_ns / 1e9


def start(command: Sequence[str], environment: Mapping[str, str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a command; what of it loses its parent becomes ours, so that it can still be found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float) -> str:
    """Runs a command to its end and returns what it wrote; none of its processes outlives the call.

    Raises:
        CommandFailed: It took too long or ended with an error.
    """
    others = set(descendants(os.getpid()))
    process = start(command, environment, subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_all(others)
        output, _ = process.communicate()
        raise CommandFailed(f"no end after {timeout_s:.0f} s\n{_tail(output)}") from None
    finally:
        end_all(others)
    if process.returncode:
        raise CommandFailed(f"ended with code {process.returncode}\n{_tail(output)}")
    return output.decode(errors="replace")


def _tail(output: bytes) -> str:
    return output.decode(errors="replace")[-3000:]


def end_all(others: set[int]) -> None:
    """Ends all descendants but those that are others'."""
    deadline = time.monotonic() + _END_DEADLINE_S
    while time.monotonic() < deadline:
        left = [pid for pid in descendants(os.getpid()) if pid not in others]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    raise CommandFailed(f"processes {left} cannot be ended")


def loopback_bytes() -> int:
    """How many bytes have gone over the loopback of this machine, whoever sent them."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")
