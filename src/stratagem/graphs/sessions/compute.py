"""Computes a part on one device of this process, node by node.

Owns copies to the device, what is freed when, and the count of what is on a device with a limit. Knows nothing of
threads or of other devices.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, final

import torch

from stratagem import _tree
from stratagem.devices import kind_table
from stratagem.devices.device import LogicalDevice, mib
from stratagem.devices.memory import OutOfMemoryError
from stratagem.errors import SessionError, StratagemError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, Size, described
from stratagem.graphs.sessions.partition import GraphPart
from stratagem.graphs.sessions.prepared_part import PreparedProgram, PreparedStep

_NUM_SHOWN = 3


class Course(Protocol):
    """What computing a part needs of the run that it belongs to."""

    @property
    def cancelled(self) -> bool: ...

    def size_of(self, size: Size) -> int | float: ...
    def take(self, output: NodeOutput) -> torch.Tensor: ...
    def publish(self, output: NodeOutput, value: torch.Tensor) -> None: ...
    def assign(self, variable: Node, value: torch.Tensor) -> None: ...
    def hold(self, value: torch.Tensor) -> None: ...


class CancelledError(Exception):
    """The run was given up; never shown to users."""


@final
class Device:
    """A device with what sessions keep on it: constants and variables.

    Args:
        logical: The device.
        name: Its name in the cluster, for messages.
        limit_bytes: How much may be on it at once; by default as much as fits.
        variables: The values of variables on it, where others have them too.
    """

    def __init__(
        self,
        logical: LogicalDevice,
        name: str,
        limit_bytes: int | None = None,
        variables: dict[Node, torch.Tensor] | None = None,
    ) -> None:
        self.logical = logical
        self._name = name
        self._torch_device = logical.torch_device
        self._has_streams = kind_table.has_streams(self._torch_device.type)
        self._limit_bytes = limit_bytes
        self._programs: dict[GraphPart, PreparedProgram] = {}
        self._constants: dict[Node, torch.Tensor] = {}
        self.variables = {} if variables is None else variables

    def compute(self, part: GraphPart, course: Course) -> None:
        """Runs all nodes of a part; outputs are published as soon as they are there.

        Raises:
            SessionError: An operation failed; says which.
            CancelledError: The run was given up.
        """
        program = self._programs.get(part) or self._programs.setdefault(part, PreparedProgram(part))
        values = program.begin(course.take(each).to(self._torch_device) for each in part.inputs)
        node = part.nodes[0]
        try:
            with torch.no_grad():
                for step in program.steps:
                    if course.cancelled:
                        raise CancelledError
                    node = step.node
                    results = self._results(step, values, course)
                    if self._limit_bytes is not None:
                        self._require_room(node, program.named(values), results, self._limit_bytes)
                    for slot, result in zip(step.results, results, strict=True):
                        values[slot] = result
                    for output, slot in step.published:
                        self.synchronize()
                        course.publish(output, values[slot])  # type: ignore[arg-type]
                    for slot in step.freed:
                        values[slot] = None
        except (CancelledError, StratagemError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shapes = ", ".join(described(each.meta) for each in node.inputs)
            raise SessionError(
                f"{node.name} ({node.type} of {shapes}, made at {node.line}) failed on {self._name}: {error}"
            ) from error

    def read(self, variable: Node) -> torch.Tensor:
        """The value of a variable."""
        value = variable.tensor.detach() if variable.tensor is not None else self.variables.get(variable)
        if value is None:
            raise SessionError(
                f"variable {variable.name!r} has no value on {self._name}: another program has reset it; make a new "
                f"session"
            )
        return value.to(self._torch_device)

    def write(self, variable: Node, value: torch.Tensor) -> None:
        """Gives a variable its value; the program's own tensor takes it too."""
        if variable.tensor is not None:
            with torch.no_grad():
                variable.tensor.copy_(value)
        else:
            self.variables[variable] = value.to(self._torch_device)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Lets the calling thread compute beside others on an accelerator."""
        with torch.Stream(self._torch_device) if self._has_streams else contextlib.nullcontext():
            yield

    def synchronize(self) -> None:
        """Others see a value once it is there."""
        if self._has_streams:
            torch.accelerator.current_stream(self._torch_device).synchronize()
        elif self._torch_device.type != "cpu":
            torch.accelerator.synchronize(self._torch_device)

    def _results(self, step: PreparedStep, values: list[torch.Tensor | None], course: Course) -> list[torch.Tensor]:
        node = step.node
        match node.kind:
            case NodeKind.OPERATION:
                named = step.named_arguments(values, course.size_of, self._torch_device)
                result: Any = node.function(*step.arguments(values, course.size_of), **named)
                if isinstance(result, torch.Tensor):
                    return [result]
                return [each for each in _tree.leaves(result) if each is not None]
            case NodeKind.CONSTANT | NodeKind.VARIABLE:
                kept = self._constant(node) if node.kind is NodeKind.CONSTANT else self.read(node)
                course.hold(kept)
                return [kept]
            case NodeKind.ASSIGN:
                (value,) = step.arguments(values, course.size_of)
                if node.variable is not None:
                    course.assign(node.variable, value)
                return [value]
        return [_sum(*step.arguments(values, course.size_of))]

    def _constant(self, node: Node) -> torch.Tensor:
        if node not in self._constants and node.value is not None:
            self._constants[node] = node.value.to(self._torch_device)
        return self._constants[node]

    def _require_room(
        self, node: Node, values: Mapping[str, torch.Tensor], results: list[torch.Tensor], limit_bytes: int
    ) -> None:
        """Counts each memory once, by where it begins."""
        kept = {f"constant {each.name}": value for each, value in self._constants.items()}
        kept |= {f"variable {each.name}": value for each, value in self.variables.copy().items()}
        kept |= values
        held = {
            value.untyped_storage().data_ptr(): (value.untyped_storage().nbytes(), name) for name, value in kept.items()
        }
        own = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in results}
        asked = sum(size for place, size in own.items() if place not in held)
        used = sum(size for size, _ in held.values())
        if used + asked <= limit_bytes:
            return
        if not asked:  # a variable or a constant, which is kept already
            asked = sum(size for size, _ in (held.pop(place) for place in own))
            used -= asked
        largest = sorted(held.values(), reverse=True)[:_NUM_SHOWN]
        residents = ", ".join(f"{name} ({mib(size)})" for size, name in largest) or "nothing else"
        raise OutOfMemoryError(
            f"out of memory on {self._name}: {node.name} (made at {node.line}) asks for {mib(asked)}, {mib(used)} of "
            f"{mib(limit_bytes)} are in use by {residents}. Place some of it elsewhere, or raise the limit"
        )


def _sum(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for each in values[1:]:
        total += each
    return total
