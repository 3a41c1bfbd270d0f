"""What the controller needs of its children, wherever they run.

Those of this machine come from a fork server (`launcher`). Whoever starts some elsewhere gives the
group the same three things: the children, a process for each, and a way to speak to it.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from stratagem.processes.packing import Packed
from stratagem.processes.registry import Registry


class Pipe(Protocol):
    """A child's end of the way to the controller."""

    def send(self, message: object) -> None:
        """Sends any object."""

    def receive(self) -> Any:
        """Waits for the next object. Raises `EOFError` when nothing more will come."""


class ChildChannel(Protocol):
    """The controller's end of the way to one child."""

    def fileno(self) -> int:
        """A descriptor that can be read from when the child has sent something, or is gone."""

    def send_packed(self, packed: Packed) -> None:
        """Sends what `pack` made."""

    def receive(self) -> Any:
        """The next object. Raises `EOFError` when the child is gone."""

    def shut(self) -> None:
        """Tells the child that nothing more will come; never blocks."""

    def close(self) -> None:
        """Gives the descriptor up."""


class Process(Protocol):
    """The process of one child, from outside; as a text, where it is."""

    @property
    def pid(self) -> int:
        """Its number on its machine."""

    @property
    def state(self) -> str:
        """In a word or a letter, for messages."""

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it, so that it cannot answer."""

    def has_ended(self) -> bool:
        """Whether it is known to be gone; returns at once."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; whether it has come."""

    def how_it_ended(self, timeout_s: float) -> tuple[str, str]:
        """What became of it (`was killed by SIGKILL`) and more that is known of that, as far as it is in time."""

    def show_stack(self) -> None:
        """Has its stack written where the user sees it."""

    def kill(self) -> None:
        """Ends it at once."""


class Children(Protocol):
    """Where the children of one group come from."""

    def begin(self, count: int) -> None:
        """Asks for so many more, without waiting for them."""

    def start(self, registry: Registry, timeout_s: float) -> Iterator[tuple[Process, ChildChannel]]:
        """Waits for each of those that were asked for and have not been waited for.

        Args:
            registry: The names of distributed objects, on their way.
            timeout_s: How long to send something to one that does not take it.
        """

    def abort(self, run_number: int) -> None:
        """Ends the waits of those that cannot see the signals of this process, in that run."""

    def release(self) -> None:
        """Gives back what they needed besides themselves."""
