"""The variables that a task keeps for sessions, which share them by container and name, as in TensorFlow.

Owns which there are and their values. They outlive the sessions: they end with the server, or when they are reset. An
update (`updates`) that was computed of a value which another session has replaced meanwhile is made anew, of the new
value, while nobody else changes anything.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, final

import torch

from stratagem.errors import SessionError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, Size, described, same_form
from stratagem.graphs.sessions.compute import Device
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.partition import GraphPart, frees_of
from stratagem.graphs.updates import update_path

_MOST_VARIABLES: Final = 10**6
_RESET = "another program has reset it; make a new session"


@final
@dataclasses.dataclass(frozen=True)
class Update:
    """What a part of a run does to variables of its device, to be made anew if they have changed.

    Args:
        part: The nodes that change them.
        inputs: What these need besides.
        seen: The values that the variables had when the part began.
        size_of: What unknown sizes are in the run.
        counts: The variables whose values are those of this part.
    """

    part: GraphPart
    inputs: Mapping[NodeOutput, torch.Tensor]
    seen: Mapping[Node, torch.Tensor | None]
    size_of: Callable[[Size], int | float]
    counts: frozenset[Node]


def update_part(part: GraphPart) -> GraphPart | None:
    """The nodes of a part that change the values which variables have; what they need besides it publishes."""
    last = {node.variable: node for node in part.nodes if node.kind is NodeKind.ASSIGN}
    chosen = {each for node in last.values() for each in update_path(node)}
    if not chosen:
        return None
    chosen |= _between(part.nodes, chosen)
    nodes = [node for node in part.nodes if node in chosen]
    inputs = tuple(dict.fromkeys(each for node in nodes for each in node.inputs if each.node not in chosen))
    made = GraphPart(part.number, part.place, nodes, inputs)
    made.frees = frees_of(made)
    part.outputs |= {each for each in inputs if each not in part.inputs}
    return made


def _between(nodes: Sequence[Node], chosen: Set[Node]) -> set[Node]:
    """What leads from the new value of one variable to that of another: the step of an optimizer with momentum."""
    after: set[Node] = set()
    for node in nodes:
        sources = (each.node for each in node.inputs)
        if any(each in after or (each in chosen and each.kind is NodeKind.ASSIGN) for each in sources):
            after.add(node)
    found: set[Node] = set()
    for node in reversed(nodes):
        if node in chosen or node in found:
            found.update(each.node for each in node.inputs if each.node in after)
    return found


@final
class TaskVariables:
    """All variables of one task that sessions may share, or those of one session that shares none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Node] = {}
        self._homes: dict[Node, NodePlace] = {}
        self._values: dict[NodePlace, dict[Node, torch.Tensor]] = {}

    def on(self, place: NodePlace) -> dict[Node, torch.Tensor]:
        """The values on one device."""
        return self._values.setdefault(place, {})

    def home(self, variable: Node) -> NodePlace:
        """The device of a variable.

        Raises:
            SessionError: It was reset.
        """
        if variable not in self._homes:
            raise SessionError(f"variable {variable.name!r} is not there any more: {_RESET}")
        return self._homes[variable]

    def declare(self, made: Node, place: NodePlace) -> Node:
        """The variable of that container and name, which is made if it is not there.

        Raises:
            SessionError: It has another shape or type, or is on another device.
        """
        known = self._known.get((made.container, made.name))
        if known is not None and self.has_value(known):
            what = f"variable {made.name!r} of container {made.container!r}"
            instead = "Give it another name, use sg.container(...), or end it with sg.Session.reset(target)"
            if not same_form(known.outputs[0], made.outputs[0]):
                raise SessionError(
                    f"{what} is {described(known.outputs[0])} here, made by another session; this one has "
                    f"{described(made.outputs[0])}. {instead}"
                )
            if self._homes[known] != place:
                raise SessionError(
                    f"{what} is on {self._homes[known].name}, where another session made it; this one has placed it on "
                    f"{place.name}. Place it there. {instead}"
                )
            return known
        if known is not None:  # whoever declared it has gone before it had a value, or is about to give it one
            if self._homes[known] == place and same_form(known.outputs[0], made.outputs[0]):
                return known
            del self._homes[known]
        if len(self._known) >= _MOST_VARIABLES:
            raise SessionError(f"a task keeps at most {_MOST_VARIABLES} variables")
        self._known[made.container, made.name] = made
        self._homes[made] = place
        return made

    def has_value(self, variable: Node) -> bool:
        """Whether a variable was given its first value."""
        return variable in self._homes and variable in self.on(self._homes[variable])

    def begin(self, variable: Node, value: torch.Tensor, device: Device, *, anew: bool) -> None:
        """Gives a variable its first value, unless it has one and is not to begin anew."""
        with self._lock:
            self.home(variable)
            if anew or variable not in device.variables:
                device.write(variable, value)

    def commit(
        self, device: Device, assigned: Mapping[Node, torch.Tensor], updates: Sequence[Update]
    ) -> dict[Node, torch.Tensor]:
        """Gives variables of one device their new values.

        Args:
            device: The device.
            assigned: The values that a run has computed.
            updates: How it has computed them.
        Returns:
            The values that they have now.
        Raises:
            SessionError: One was reset, or is to have another shape or type.
        """
        with self._lock:
            values = dict(assigned)
            for update in updates:
                if any(device.variables.get(variable) is not value for variable, value in update.seen.items()):
                    again = _Again(update)
                    device.compute(update.part, again)
                    values |= {each: value for each, value in again.assigned.items() if each in update.counts}
            for variable, value in values.items():
                self.home(variable)
                if not same_form(variable.outputs[0], value):
                    raise SessionError(
                        f"variable {variable.name!r} is {described(variable.outputs[0])}, it cannot become "
                        f"{described(value)}"
                    )
            device.synchronize()
            for variable, value in values.items():
                device.write(variable, value)
            return values

    def reset(self, containers: Iterable[str] | None) -> None:
        """Ends the variables of some containers, or all."""
        with self._lock:
            chosen = None if containers is None else set(containers)
            for key, variable in list(self._known.items()):
                if chosen is None or key[0] in chosen:
                    del self._known[key]
                    self.on(self._homes.pop(variable)).pop(variable, None)


@final
class _Again:
    """A part of a run that is computed once more, of the values that variables have now."""

    cancelled = False

    def __init__(self, update: Update) -> None:
        self._inputs = dict(update.inputs)
        self.size_of = update.size_of
        self.assigned: dict[Node, torch.Tensor] = {}

    def take(self, output: NodeOutput) -> torch.Tensor:
        return self._inputs.pop(output)

    def assign(self, variable: Node, value: torch.Tensor) -> None:
        self.assigned[variable] = value

    def publish(self, output: NodeOutput, value: torch.Tensor) -> None:
        """Nobody waits for it."""

    def hold(self, value: Any) -> None:
        """Nothing is handed out here."""
