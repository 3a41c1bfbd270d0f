"""Decides on which device each node of a graph runs.

Owns the rule for nodes that nobody has placed: gradients beside their operation, the rest beside its largest input,
sources beside what uses them first. Which devices there are is a `Fleet`'s to say.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, final

from stratagem.devices.device_spec import DeviceSpec
from stratagem.errors import StratagemError
from stratagem.graphs.nodes import Node, NodeKind
from stratagem.graphs.updates import update_path


class NodePlace(NamedTuple):
    """A device of a task."""

    job: str
    task: int
    device_type: str
    device_index: int

    @property
    def device(self) -> str:
        """Its name in its own task: `/device:CPU:0`."""
        return f"/device:{self.device_type}:{self.device_index}"

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return f"/job:{self.job}/replica:0/task:{self.task}{self.device}"


class Fleet(Protocol):
    """The devices that a session can use."""

    shares_memory: bool

    def place(self, spec: DeviceSpec, operation: str) -> NodePlace | None:
        """The device that a spec names; None if it leaves the choice open.

        Raises:
            DeviceNotFoundError: There is no such device, and nothing may stand in for it.
        """

    def default(self, spec: DeviceSpec, operation: str) -> NodePlace:
        """Where an operation runs that neither scopes nor neighbours place, within the task that a spec names."""


@final
class Placer:
    """Remembers where the nodes of one graph run; what was decided stays.

    Args:
        fleet: The devices.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._places: dict[Node, NodePlace] = {}
        self._reasons: dict[Node, str] = {}
        self._failures: dict[Node, StratagemError] = {}
        self._num_seen = 0

    def place(self, nodes: Sequence[Node]) -> None:
        """Decides for the nodes that have come since the last time."""
        new = nodes[self._num_seen :]
        for node in new:
            self._take_spec(node)
        self._forward(new)
        self._backward(new)
        self._forward(new)
        for node in new:
            if self._is_open(node):
                beside = self._beside(node)
                self._settle(node, beside or self._default(node), "follows its inputs" if beside else "not placed")
        for node in new:
            if node.kind is NodeKind.ASSIGN and node.variable in self._places:
                # On a cluster what updates a variable is where it can be made anew (`updates`).
                for each in (node,) if self._fleet.shares_memory else update_path(node)[1:] or (node,):
                    self._places[each] = self._places[node.variable]
                    self._reasons[each] = "with its variable"
        self._num_seen += len(new)  # at last, so that what Ctrl-C breaks off is done again

    def where(self, node: Node) -> NodePlace:
        """Where a node runs.

        Raises:
            DeviceNotFoundError: Nowhere: what its scope asked for does not exist.
        """
        if node in self._failures:
            raise self._failures[node]
        return self._places[node]

    def why(self, node: Node) -> str:
        """Why a node runs where it does."""
        return self._reasons.get(node, "scope")

    def _take_spec(self, node: Node) -> None:
        try:
            place = self._fleet.place(node.spec, node.name)
        except StratagemError as error:
            self._failures[node] = error
            return
        if place is not None:
            self._places[node] = place
            asked = node.spec.device_type or place.device_type, node.spec.device_index or 0
            if asked != (place.device_type, place.device_index):
                self._reasons[node] = "no such device"
            elif node.beside is not None:
                self._reasons[node] = f"gradient of {node.beside.name}"

    def _default(self, node: Node) -> NodePlace | None:
        try:
            return self._fleet.default(node.spec, node.name)
        except StratagemError as error:
            self._failures[node] = error
            return None

    def _is_open(self, node: Node) -> bool:
        return node not in self._places and node not in self._failures

    def _settle(self, node: Node, place: NodePlace | None, why: str) -> None:
        """Follows a neighbour, but not out of the task that was asked for."""
        if place is None:
            return
        if node.spec.job not in (None, place.job) or node.spec.task not in (None, place.task):
            place, why = self._default(node), "scope"
        if place is not None:
            self._places[node] = place
            self._reasons[node] = why

    def _beside(self, node: Node) -> NodePlace | None:
        if node.kind is NodeKind.ASSIGN and node.variable is not None:
            return self._places.get(node.variable)
        if node.beside is not None and node.beside in self._places:
            return self._places[node.beside]
        return self._largest(each.node for each in node.inputs)

    def _largest(self, inputs: Iterable[Node]) -> NodePlace | None:
        placed = [each for each in inputs if each in self._places]
        return self._places[max(placed, key=lambda each: each.num_bytes)] if placed else None

    def _forward(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if self._is_open(node):
                why = "follows its inputs" if node.beside is None else f"gradient of {node.beside.name}"
                self._settle(node, self._beside(node), why)

    def _backward(self, nodes: Sequence[Node]) -> None:
        """Sources, and what depends on them alone, go to who uses them first."""
        users: dict[Node, Node] = {}
        for node in reversed(nodes):
            if node in self._places and node.kind is not NodeKind.ASSIGN:
                for each in node.inputs:
                    users[each.node] = node
            elif self._is_open(node) and node in users:
                self._settle(node, self._places[users[node]], f"used by {users[node].name}")
                for each in node.inputs:
                    users[each.node] = node
