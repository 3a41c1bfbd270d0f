"""One run of a plan: hands each part to its device once its inputs are there, and collects what comes out.

Owns the order of events and who hears of an error. How a part is computed is its worker's.
"""

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol, final

import torch

from stratagem.errors import SessionError, StratagemError
from stratagem.graphs.nodes import Node, NodeOutput, Size
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.partition import GraphPart, GraphPlan

if TYPE_CHECKING:
    from stratagem.graphs.symbolic_sizes import Numbers

# How long Ctrl-C waits for operations that are under way; they end by themselves.
PATIENCE_S: Final = 5.0
_numbers = itertools.count()


class PartRunner(Protocol):
    """Who computes the parts of one device."""

    def submit(self, run: "Run", part: GraphPart) -> None:
        """Begins a part, and returns at once; the run hears of each output, and of the end or the error."""


@final
class Run:
    """One run under way.

    Args:
        plan: What to do.
        feeds: The values that come with it.
        workers: Who computes on each device.
        abandon: Is told when the run is given up.
        numbers: What unknown sizes of the graph are in this run.

    Attributes:
        values: What is fed, fetched, or waited for by other parts.
        num_bytes: How large these are, also when they are gone.
        assigned: The new values of variables.
        cancelled: Whether it was given up.
    """

    def __init__(
        self,
        plan: GraphPlan,
        feeds: Mapping[NodeOutput, torch.Tensor],
        workers: Mapping[NodePlace, PartRunner],
        abandon: Callable[["Run"], None],
        numbers: "Numbers | None" = None,
    ) -> None:
        self.plan = plan
        self._numbers = numbers
        self.number = next(_numbers)
        self._abandon = abandon
        self.values: dict[NodeOutput, torch.Tensor] = dict(feeds)
        self.num_bytes = {output: value.nbytes for output, value in feeds.items()}
        self.assigned: dict[Node, torch.Tensor] = {}
        self.cancelled = False
        self._workers = workers
        self._lock = threading.Lock()
        self._missing = {part: sum(each not in feeds for each in part.inputs) for part in plan.parts}
        self._users_left = {output: len(parts) for output, parts in plan.users.items()}
        self._num_open = 0
        self._num_left = len(plan.parts)
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._kept: set[int] = set()
        for value in feeds.values():
            self.hold(value)

    def execute(self) -> None:
        """Runs all parts.

        Raises:
            BaseException: The first error of a part; or Ctrl-C, when what was under way has stopped.
        """
        try:
            self._submit([part for part, number in self._missing.items() if number == 0])
            if self._num_left:
                self._ended.wait()
        except BaseException:
            self.cancel()
            self._ended.wait(PATIENCE_S)
            raise
        if self._error is not None:
            raise self._error

    def size_for(self, symbol: torch.SymInt) -> Size:
        """What stands for the symbol of an unknown size."""
        return self._known_numbers.size(symbol)

    def size_of(self, size: Size) -> int | float:
        """What a number of a node is in this run."""
        return self._known_numbers.of(size)

    @property
    def _known_numbers(self) -> "Numbers":
        if self._numbers is None:
            raise SessionError("a graph without unknown sizes has come to one")
        return self._numbers

    def shape_of(self, output: NodeOutput) -> tuple[int, ...]:
        """The shape of a result in this run."""
        if self._numbers is None:
            return tuple(output.meta.shape)
        shape: tuple[int, ...] = self._numbers.shape_of(output.meta, output.node)
        return shape

    def take(self, output: NodeOutput) -> torch.Tensor:
        """An input of a part; the last one who takes it lets go of it."""
        with self._lock:
            self._users_left[output] -= 1
            if self._users_left[output] or output in self.plan.fed or output in self.plan.fetched:
                return self.values[output]
            return self.values.pop(output)

    def publish(self, output: NodeOutput, value: torch.Tensor) -> None:
        """An output of a part is there; the parts that waited for it alone begin."""
        ready = []
        with self._lock:
            self.values[output] = value
            self.num_bytes[output] = value.nbytes
            for part in self.plan.users.get(output, ()):
                self._missing[part] -= 1
                if self._missing[part] == 0:
                    ready.append(part)
        self._submit(ready)

    def assign(self, variable: Node, value: torch.Tensor) -> None:
        """The value that a variable gets when the run has succeeded."""
        self.assigned[variable] = value

    def hold(self, value: torch.Tensor) -> None:
        """Notes memory that somebody keeps: a constant's, a variable's, the caller's."""
        self._kept.add(value.untyped_storage().data_ptr())

    def owned(self, value: torch.Tensor) -> torch.Tensor:
        """The value in memory that nobody else keeps, and that is kept from here on."""
        if value.untyped_storage().data_ptr() in self._kept:
            value = value.clone()
        self.hold(value)
        return value

    def finish(self, part: GraphPart) -> None:
        """A part has ended well, all its outputs are published."""
        with self._lock:
            self._num_open -= 1
            self._num_left -= 1
            self._check_end()

    def fail(self, part: GraphPart, error: BaseException) -> None:
        """A part has ended with an error, or was given up."""
        with self._lock:
            self._num_open -= 1
            if self._error is None and not self.cancelled:
                self._error = error
        self.cancel()

    def cancel(self) -> None:
        """Lets no other operation begin."""
        with self._lock:
            first = not self.cancelled
            self.cancelled = True
            self._check_end()
        if first:
            self._abandon(self)

    def _submit(self, parts: list[GraphPart]) -> None:
        for part in parts:
            with self._lock:
                if self.cancelled:
                    return
                self._num_open += 1
            try:
                self._workers[part.place].submit(self, part)
            except StratagemError as error:
                self.fail(part, error)

    def _check_end(self) -> None:
        if self._num_open == 0 and (self.cancelled or self._num_left == 0):
            self._ended.set()
