"""Reads what tasks write: everything into log files, what the user wants to see onto the screen.

Owns the thread that reads, the names of log files, and how lines look: as they are, or with the
task's name in front. Also notes the moment at which each task ends, since it wakes at once.
"""

import dataclasses
import os
import selectors
import termios
import threading
import time
from pathlib import Path
from typing import BinaryIO, final

ALL = "all"

_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16
_POLL_S = 0.01
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


@dataclasses.dataclass(frozen=True)
class Screen:
    """Where output is shown, and whose.

    Args:
        out: What tasks write to standard output goes here.
        err: What they write to standard error goes here.
        tasks: The names of those that are shown, with their names in front of each line; or `all`; by default
            the first one of this machine is shown, as it is.
        coloured: Whether those names have colours.
    """

    out: BinaryIO
    err: BinaryIO
    tasks: frozenset[str] | None = None
    coloured: bool = False

    @property
    def prefixed(self) -> bool:
        return self.tasks is not None

    def shows(self, task: str, number: int) -> bool:
        """Whether a task with this name, and this number on this machine, is shown."""
        return number == 0 if self.tasks is None else task in self.tasks or ALL in self.tasks

    def prefix(self, task: str, number: int) -> bytes:
        """What stands in front of a task's lines."""
        if not self.prefixed:
            return b""
        name = f"[{task}]"
        return (f"\033[{_COLOURS[number % len(_COLOURS)]}m{name}\033[0m " if self.coloured else f"{name} ").encode()


@dataclasses.dataclass
class _Stream:
    task: str
    log: BinaryIO
    screen: BinaryIO | None = None
    prefix: bytes = b""
    unlogged: bytes = b""
    unshown: bytes = b""
    descriptor: int = -1


@final
class TaskOutput:
    """The output of all tasks of one start; a thread reads it between `start` and `close`."""

    def __init__(self, folder: Path, screen: Screen) -> None:
        self._folder = folder
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._logs: list[BinaryIO] = []
        self._open: list[str] = []  # a task's name, for each of its streams that has not ended
        self._deadline: float | None = None
        self._ended_at: dict[int, float] = {}
        self._incomplete: set[str] = set()
        self._begins: dict[str, int] = {}
        self._shown: list[str] = []
        self._thread = threading.Thread(target=self._read_all, name="output of tasks", daemon=True)

    def open(self, task: str, number: int, *, restart: int) -> tuple[int, int]:
        """Makes the log of a task; the descriptors that are its standard output and error, to close after its start."""
        log = log_file(self._folder, task).open("ab" if restart else "wb", buffering=0)
        self._logs.append(log)
        self._begins[task] = log.tell()
        if restart:
            log.write(f"--- restart {restart} ---\n".encode())
        if not self._screen.shows(task, number):
            write = self._add(_Stream(task, log), terminal=None)
            return write, os.dup(write)  # as one, so that the log has both in their order
        prefix = self._screen.prefix(task, number)
        self._shown.append(task)
        return self._show_stream(task, log, self._screen.out, prefix), self._show_stream(
            task, log, self._screen.err, prefix
        )

    def start(self, pids: list[int]) -> None:
        """Begins to read, and to await the ends of these processes."""
        for pid in pids:
            self.watch(pid)
        self._thread.start()

    def watch(self, pid: int) -> None:
        """Awaits the end of one more process."""
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    def ended_at(self, pid: int) -> float:
        """When a process ended, by the monotonic clock; now, if that has not been noticed yet."""
        return self._ended_at.get(pid, time.monotonic())

    def tail(self, task: str, timeout_s: float = 1.0) -> str:
        """The last that a task which has ended wrote; not waiting long, since its children may write on."""
        deadline = time.monotonic() + timeout_s
        while task in self._open and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with log_file(self._folder, task).open("rb") as log:
            log.seek(max(self._begins[task], log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read(_TAIL_BYTES).decode(errors="replace").replace("\r\n", "\n")

    def shown(self) -> dict[str, str]:
        """The last that each task wrote whose output was shown; after `close`."""
        return {task: self.tail(task, timeout_s=0.0) for task in dict.fromkeys(self._shown)}

    def close(self, timeout_s: float = 1.0) -> None:
        """Reads what is left; not for long, since a task's own children may hold its output open."""
        self._deadline = time.monotonic() + timeout_s
        os.write(self._wake_write, b".")
        if self._thread.ident is not None:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._drop(key.fd)
        self._selector.close()
        os.close(self._wake_write)
        for log in self._logs:
            log.close()

    def _show_stream(self, task: str, log: BinaryIO, screen: BinaryIO, prefix: bytes) -> int:
        terminal = screen.fileno() if screen.isatty() and not prefix else None
        return self._add(_Stream(task, log, screen, prefix), terminal=terminal)

    def _add(self, stream: _Stream, *, terminal: int | None) -> int:
        stream.descriptor, write = os.pipe() if terminal is None else _terminal_like(terminal)
        self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        self._open.append(stream.task)
        return write

    def _read_all(self) -> None:
        while self._deadline is None or (self._open and time.monotonic() < self._deadline):
            timeout_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                if isinstance(key.data, _Stream):
                    self._read(key.data)
                elif isinstance(key.data, int):
                    self._ended_at[key.data] = time.monotonic()
                    self._drop(key.fd)
                else:
                    os.read(self._wake_read, 1)

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.descriptor, _CHUNK_BYTES)
        except OSError:  # so a terminal says that nobody writes to it any more
            data = b""
        self._keep(stream, data)
        try:
            self._show(stream, data)
        except OSError:
            data = b""  # nobody reads the screen any more: the task hears of it as it would without a launcher
        if not data:
            self._open.remove(stream.task)
            self._drop(stream.descriptor)

    def _keep(self, stream: _Stream, data: bytes) -> None:
        """Puts output into the log; by whole lines, where a task's two streams could mix them."""
        if stream.screen is not None:
            lines, stream.unlogged = _whole_lines(stream.unlogged, data)
            data = b"".join(lines)
        try:
            stream.log.write(data)
        except OSError as error:
            if stream.log.name not in self._incomplete:
                self._incomplete.add(stream.log.name)
                self._screen.err.write(f"stratagem: {stream.log.name} is incomplete: {error.strerror}\n".encode())

    def _show(self, stream: _Stream, data: bytes) -> None:
        if stream.screen is None:
            return
        if stream.prefix:
            lines, stream.unshown = _whole_lines(stream.unshown, data)
            data = b"".join(stream.prefix + line.removesuffix(b"\n") + b"\n" for line in lines)
        if data:
            stream.screen.write(data)
            stream.screen.flush()

    def _drop(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)


def log_file(folder: Path, task: str) -> Path:
    """Where the output of a task is kept."""
    return folder / f"{task.replace('/', '-')}.log"


def _whole_lines(pending: bytes, data: bytes) -> tuple[list[bytes], bytes]:
    """The lines that are complete, or must do as they are, and what is to wait for the rest of its line."""
    *lines, rest = (pending + data).split(b"\n")
    lines = [line + b"\n" for line in lines]
    if rest and (not data or len(rest) > _CHUNK_BYTES):
        return [*lines, rest], b""
    return lines, rest


def _terminal_like(terminal: int) -> tuple[int, int]:
    """A terminal for a task that passes bytes on as they are, of the size of the user's."""
    read, write = os.openpty()
    attributes = termios.tcgetattr(write)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(write, termios.TCSANOW, attributes)
    termios.tcsetwinsize(write, termios.tcgetwinsize(terminal))
    return read, write
