"""What a child process does: calls what the controller sends, and answers.

The loop knows nothing of strategies or tensors: a message is a function with its arguments, an
answer is its result or its failure. What a child prints goes to the controller, line by line.
"""

import faulthandler
import io
import pdb
import signal
import socket
import sys
import traceback
from typing import Any, final

from stratagem import _integrations, _torch
from stratagem._caller import calling_line, last_line, users_trace
from stratagem.devices.memory import named
from stratagem.errors import ReplicaError
from stratagem.processes.children import Pipe
from stratagem.processes.packing import survives
from stratagem.processes.pipe import Wire
from stratagem.processes.registry import Registry

DONE, FAILED, PRINTED = "done", "failed", "printed"


@final
class Child:
    """This process, if it is a child: its number, its pipe and the distributed objects it holds."""

    def __init__(self, wire: Pipe, registry: Registry) -> None:
        self.wire = wire
        self.registry = registry


_this_process: list[Child] = []


def this_child() -> Child | None:
    """The child that this process is, or `None` in a controller."""
    return _this_process[0] if _this_process else None


def main(descriptor: int) -> None:
    """Serves the controller at the other end of the pipe until it is gone or has shut the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    registry = Registry(keeps=True)
    serve(Wire(socket.socket(fileno=descriptor), registry.reference, registry.resolve), registry)


def serve(wire: Pipe, registry: Registry) -> None:
    """Makes this process a child: calls what comes, and answers, until nothing more will come.

    Args:
        wire: The way to the controller.
        registry: The distributed objects that this child holds.
    """
    _this_process.append(Child(wire, registry))
    _torch.compiling.spare_compiler()  # children have no other use for it
    _integrations.serve()
    sys.stdout = _Relay(wire, "stdout")
    sys.stderr = _Relay(wire, "stderr")
    sys.breakpointhook = pdb.set_trace = _pass_over_breakpoint
    number = 0
    while True:
        number += 1  # both ends count, so that an answer to an earlier call is known as such
        try:
            function, *arguments = wire.receive()
            _integrations.serve()
        except (EOFError, ConnectionResetError):
            return
        except Exception as error:  # what was sent cannot be built here
            wire.send((FAILED, number, describe(named(error))))
            continue
        _answer(wire, number, function, arguments)


def _answer(wire: Pipe, number: int, function: Any, arguments: list[Any]) -> None:
    try:
        answer = (DONE, number, function(*arguments))
    except BaseException as error:  # SystemExit in a replica must not end it silently
        answer = (FAILED, number, describe(named(error)))
    for stream in (sys.stdout, sys.stderr):
        stream.end_line() if isinstance(stream, _Relay) else stream.flush()
    try:
        wire.send(answer)
    except (BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        refused = ReplicaError(
            f"what the function returned cannot be sent to the main program: {error}; "
            f"return tensors, numbers or plain objects"
        )
        wire.send((FAILED, number, describe(refused)))


def _pass_over_breakpoint(*_: object, **__: object) -> None:
    """Takes the place of a debugger: the terminal is the main program's, and so is replica 0, which stops."""
    print(
        f"breakpoint at {calling_line()} is passed over: only the main program has a terminal. Replica 0 stops there, "
        f"and the others wait for it where they next meet; OneDeviceStrategy runs everything in the main program",
        file=sys.stderr,
    )


def describe(error: BaseException) -> tuple[BaseException | None, str, str]:
    """An error as it travels: itself if it can, its one line, and its traceback, from the user's first line on."""
    trace = users_trace(error.__traceback__) or error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    line = last_line(error)
    return (error.with_traceback(None) if survives(error) else None), line, text


def _last_drawn(line: str) -> str:
    """What a line is after the last return to its beginning, with the returns around that."""
    return line[max(0, line.rstrip("\r").rfind("\r")) :]


@final
class _Relay(io.TextIOBase):
    """A text stream that sends whole lines to the controller; of one that is drawn again and again, the last state."""

    encoding = "utf-8"

    def __init__(self, wire: Pipe, stream: str) -> None:
        self._wire = wire
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = map(_last_drawn, (self._line + text).split("\n"))
        if lines:
            self._wire.send((PRINTED, self._stream, "\n".join(line.strip("\r") for line in lines)))
        return len(text)

    def flush(self) -> None:
        if "\r" not in self._line:  # else it will be drawn again
            self.end_line()

    def end_line(self) -> None:
        """Sends what is left, a line or not."""
        if self._line:
            line, self._line = self._line, ""
            self._wire.send((PRINTED, self._stream, line.strip("\r")))

    def writable(self) -> bool:
        return True
