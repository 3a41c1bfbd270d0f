"""Lets programs measure in turns: all of them run at once, and each waits until it is its turn.

A program is started once and measures in every round, so that a round takes as long as its steps do: rounds are short
and many, and a slow moment of the machine hits everyone. While it waits, a program has nothing to do.

Whoever conducts listens at an address, which a program finds in its environment. One process of the program, which its
others follow, connects when it is ready. It measures whenever a line comes, and answers with a line: its figures.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from benchmarks.processes import CommandFailed, descendants, end_all, start

_ADDRESS, _NUM_ROUNDS = "BENCHMARK_TURNS", "BENCHMARK_ROUNDS"
_TIMEOUT_S = 180.0
_POLL_S = 0.05

Figures = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)


def num_rounds() -> int:
    """In a program: how often it will be its turn."""
    return int(os.environ.get(_NUM_ROUNDS, "1"))


def rounds(*, leads: bool = True) -> Iterator[Callable[[Figures], None]]:
    """In a program: yields when it is its turn, once a round, a function that takes the figures of the round.

    Args:
        leads: Whether this process speaks for the program; the others of the program follow it by themselves.
    """
    if _ADDRESS not in os.environ:
        yield lambda _: None
        return
    if not leads:
        yield from [lambda _: None] * num_rounds()
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[_ADDRESS])
        with connection.makefile("rw") as lines:

            def answer(figures: Figures) -> None:
                lines.write(json.dumps(figures) + "\n")
                lines.flush()

            for _ in range(num_rounds()):
                if not lines.readline():
                    return  # nobody conducts any more
                yield answer
            lines.readline()  # nobody ends while others measure: that takes time of the machine


def take_turns(
    commands: Mapping[Key, Sequence[str]], number: int, environment: Mapping[str, str]
) -> dict[Key, list[Figures]]:
    """Starts programs and lets them measure in a number of rounds, every other one turned around.

    Raises:
        CommandFailed: One of them failed; none is left.
    """
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.callback(end_all, set(descendants(os.getpid())))
        programs, servers = {}, {}
        for place, (key, command) in enumerate(commands.items()):
            servers[key] = server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address := f"{folder}/{place}")
            server.listen()
            output = stack.enter_context(Path(f"{address}.out").open("w+b"))
            own = {_ADDRESS: address, _NUM_ROUNDS: str(number), "BENCHMARK_STARTED": repr(time.time())}
            programs[key] = _Program(key, start(command, {**environment, **own}, output), output)
        for key, program in programs.items():  # they have started side by side
            stack.enter_context(program.accepted(servers[key]))
        found: dict[Key, list[Figures]] = {key: [] for key in programs}
        for each in range(number):
            for key in programs if each % 2 == 0 else reversed(programs):
                found[key].append(programs[key].measure())
        for program in programs.values():
            program.let_go()
        return found


class _Program:
    """A program that was started."""

    def __init__(self, name: object, process: subprocess.Popen[bytes], output: BinaryIO) -> None:
        self._name, self._process, self._output = name, process, output
        self._connection: socket.socket

    def accepted(self, server: socket.socket) -> socket.socket:
        """Waits until the program is ready; its connection."""
        self._wait_for(server)
        self._connection, _ = server.accept()
        return self._connection

    def measure(self) -> Figures:
        """One round."""
        self._connection.sendall(b"go\n")
        line = b""
        while not line.endswith(b"\n"):
            self._wait_for(self._connection)
            part = self._connection.recv(1 << 20)
            if not part:
                raise self._failed("ended before it had measured")
            line += part
        figures: Figures = json.loads(line)
        return figures

    def let_go(self) -> None:
        """Lets the program end by itself."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what is left is ended
            self._process.wait(_TIMEOUT_S)

    def _wait_for(self, what: socket.socket) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not select.select([what], [], [], _POLL_S)[0]:
            if self._process.poll() is not None:
                raise self._failed(f"ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._failed(f"no answer for {_TIMEOUT_S:.0f} s")

    def _failed(self, why: str) -> CommandFailed:
        self._output.seek(0)
        return CommandFailed(f"{self._name}: {why}\n{self._output.read().decode(errors='replace')[-3000:]}")
