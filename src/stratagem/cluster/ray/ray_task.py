"""A task of a cluster in an actor of Ray's: the program as a process of its own, its output sent on.

Runs on the machine that Ray has chosen. The program is executed as it is without a launcher; the
actor only stands beside it. When the actor ends, however it does, the program ends too.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, final

from stratagem import _env
from stratagem.cluster.launch import task_start
from stratagem.cluster.launch.plan import Seat
from stratagem.cluster.launch.ports import Ports
from stratagem.cluster.ray import ray_session
from stratagem.errors import LaunchError

OUT, ERR, ENDED = "out", "err", "ended"

_CHUNK_BYTES: Final = 1 << 16
_AT_ONCE: Final = 64
_LAST_WORDS_S: Final = 1.0

# What has happened to a task: something it wrote, or its exit code.
News = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class TaskPlace:
    """Where a task is to run.

    Args:
        host: The address of its machine.
        node: Ray's name of that machine.
        addresses: Free ones there, held for it.
        is_guarded: Whether Ray asks for a token there.
    """

    host: str
    node: str
    addresses: tuple[str, ...]
    is_guarded: bool


@final
class RayTask:
    """The actor."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="stratagem-")  # has mode 0700
        self._ports: Ports | None = None

    def place(self, num_addresses: int) -> TaskPlace:
        """Says where it is, and picks addresses."""
        ray = ray_session.load()
        host = ray.util.get_node_ip_address()
        self._ports = self._ports or Ports(host)
        addresses = tuple(self._ports.pick() for _ in range(num_addresses))
        return TaskPlace(host, ray.get_runtime_context().get_node_id(), addresses, ray_session.asks_for_token())

    def start(
        self,
        seat: Seat,
        command: Sequence[str],
        folder: str,
        needs: str,
        changes: Mapping[str, str | None],
        secret: bytes,
    ) -> int:
        """Starts the program; its process.

        Args:
            seat: Which task it is, and how it runs.
            command: How it is run by the Python of the launcher's machine.
            folder: In which folder.
            needs: A file that must be there; empty for a module.
            changes: To the environment of this process.
            secret: The token of the cluster; it travels through Ray only.
        """
        here = f"{ray_session.load().util.get_node_ip_address()}"
        if not Path(folder).is_dir() or not (Path(folder) / needs).exists():
            raise LaunchError(
                f"there is no {str(Path(folder) / needs)!r} on {here}, where Ray has placed a task; put the program at "
                f"the same place on all machines, or on a disk that they share"
            )
        token_file = Path(self._folder.name) / "token"
        token_file.touch(mode=0o600)
        token_file.write_bytes(secret)
        process = subprocess.Popen(
            task_start.command(seat.start_options, [sys.executable, *command[1:]]),
            cwd=folder,
            env=_env.for_process({**changes, _env.TOKEN_FILE: str(token_file)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._process = process
        readers = [
            threading.Thread(target=self._read, args=(kind, stream), daemon=True)
            for kind, stream in ((OUT, process.stdout), (ERR, process.stderr))
        ]
        for each in readers:
            each.start()
        threading.Thread(target=self._watch, args=(process, readers), daemon=True).start()
        return process.pid

    def news(self) -> list[News]:
        """What has happened since the last time, after waiting for something."""
        found = [self._news.get()]
        while len(found) < _AT_ONCE and not self._news.empty():
            found.append(self._news.get())
        return found

    def signal(self, number: int) -> None:
        """Sends a signal to the program and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def clean_up(self) -> None:
        """Removes what lies on the disk, and ends what is left of the program."""
        self.signal(signal.SIGKILL)
        self._folder.cleanup()

    def _read(self, kind: str, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), _CHUNK_BYTES):
            self._news.put((kind, data))
        stream.close()

    def _watch(self, process: "subprocess.Popen[bytes]", readers: Sequence[threading.Thread]) -> None:
        code = process.wait()
        for each in readers:
            each.join(_LAST_WORDS_S)  # children that it left behind may hold its output open
        self._news.put((ENDED, code))
