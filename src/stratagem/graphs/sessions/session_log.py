"""Writes down where the operations of a session ran: as lines in TensorFlow's form, and as records of logs.

Reads plans and what a run has passed from device to device; runs nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import final

from stratagem.graphs.nodes import Node, NodeOutput
from stratagem.graphs.sessions.node_devices import NodePlace, Placer
from stratagem.graphs.sessions.partition import GraphPlan
from stratagem.placement import log
from stratagem.placement.records import Copy, PlacementRecord

_HOST = "/device:CPU:0"
_PROGRAM = "the program"


@final
class SessionLog:
    """What a session tells about placement.

    Args:
        placer: Knows where nodes run.
        mapping: What the devices are, for the first line.
        prints: Whether lines are printed.
        whole_names: Whether devices are of several tasks, so that records name these too.
    """

    def __init__(self, placer: Placer, mapping: Callable[[], str], *, prints: bool, whole_names: bool) -> None:
        self._placer = placer
        self._mapping = mapping
        self._prints = prints
        self._whole_names = whole_names
        self._home = _PROGRAM if whole_names else _HOST
        self._shown: set[Node] | None = None

    def print(self, nodes: Iterable[Node]) -> None:
        """A line for each node, the first time that it runs."""
        if not self._prints:
            return
        lines = []
        if self._shown is None:
            self._shown = set()
            lines.append(self._mapping())
        for node in nodes:
            if node not in self._shown:
                self._shown.add(node)
                kind = "" if node.name.startswith(node.type) else f"({node.type}): "
                lines.append(log.line_of(node.name, f"{kind}{self._placer.where(node).name}"))
        if lines:
            print("\n".join(lines), flush=True)

    def record(self, plan: GraphPlan, num_bytes: Mapping[NodeOutput, int]) -> None:
        """Tells the logs that listen what has run, in the order of recording, and what was copied for it.

        Args:
            plan: What has run.
            num_bytes: How large what went from part to part was.
        """
        for each in log.listening():
            names = {node: each.unique(node.name) for node in plan.nodes}
            parts = {node: part for part in plan.parts for node in part.nodes}
            brought: set[tuple[NodeOutput, object]] = set()
            for node in plan.nodes:
                copies = []
                for output in node.inputs:
                    part = parts.get(node)
                    if part is not None and output in num_bytes and (output, part) not in brought:
                        brought.add((output, part))  # a part takes each of its inputs once
                        source = self._home if output in plan.fed else self._device(output.node)
                        if source != self._device(node):
                            copies.append(Copy(source, self._device(node), num_bytes[output], names[output.node]))
                each.records.append(self._recorded(node, names, tuple(copies), fed=NodeOutput(node, 0) in plan.fed))

    def _recorded(
        self, node: Node, names: Mapping[Node, str], copies: tuple[Copy, ...], *, fed: bool
    ) -> PlacementRecord:
        asked = str(node.spec)
        return PlacementRecord(
            operation=node.type,
            name=names[node],
            requested=asked or None,
            device=self._home if fed else self._device(node),
            why="fed" if fed else self._placer.why(node),
            copies=copies,
            inputs=tuple(dict.fromkeys(names[each.node] for each in node.inputs if each.node in names)),
            file=node.file,
            line=int(node.line.rpartition(":")[2] or 0),
        )

    def _device(self, node: Node) -> str:
        place: NodePlace = self._placer.where(node)
        return place.name if self._whole_names else place.device
