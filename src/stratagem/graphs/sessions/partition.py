"""Cuts what a run needs of a graph into parts: each runs on one device, and begins when its inputs have come.

Pure. A part holds the nodes of one device that are equally many devices away from the sources, so that parts never
wait for each other in a circle.
"""

import dataclasses
from collections.abc import Callable, Iterable, Set
from typing import final

from stratagem.errors import FeedError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, described
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.updates import update_path


@final
@dataclasses.dataclass(eq=False)
class GraphPart:
    """Nodes that one device runs, one after the other.

    Args:
        number: Its place among the parts.
        place: The device.
        nodes: In order.
        inputs: What comes from other parts, or is fed.
        outputs: What other parts need, or is fetched.
        frees: After each node, the values that nothing needs any more.
    """

    number: int
    place: NodePlace
    nodes: list[Node] = dataclasses.field(default_factory=list)
    inputs: tuple[NodeOutput, ...] = ()
    outputs: frozenset[NodeOutput] = frozenset()
    frees: list[tuple[NodeOutput, ...]] = dataclasses.field(default_factory=list)


@final
@dataclasses.dataclass(eq=False)
class GraphPlan:
    """What a run does.

    Args:
        parts: In an order in which they could run one by one.
        users: The parts that wait for a value.
        fed: The values that come with the run.
        fetched: The values that it returns.
        nodes: All that run or are fed.
    """

    parts: list[GraphPart]
    users: dict[NodeOutput, list[GraphPart]]
    fed: frozenset[NodeOutput]
    fetched: frozenset[NodeOutput]
    nodes: list[Node]

    @property
    def variables(self) -> list[Node]:
        """The variables that are read or changed."""
        found = (
            node if node.kind is NodeKind.VARIABLE else node.variable for part in self.parts for node in part.nodes
        )
        return list(dict.fromkeys(node for node in found if node is not None))


def make_plan(
    fetched: Iterable[NodeOutput],
    fed: Set[NodeOutput],
    where: Callable[[Node], NodePlace],
    *,
    whole_updates: bool = False,
) -> GraphPlan:
    """The plan of a run.

    Args:
        fetched: What it is to return.
        fed: What comes with it.
        where: On which device a node runs.
        whole_updates: Whether what changes a variable is to be in one part, from reading it on.

    Raises:
        FeedError: A placeholder is needed that is not fed.
    """
    wanted = frozenset(fetched)
    nodes = _needed(wanted, fed)
    parts: dict[tuple[NodePlace, int], GraphPart] = {}
    part_of: dict[Node, GraphPart] = {}
    levels: dict[Node, int] = {}
    for node in nodes:
        sources = [each.node for each in node.inputs if each not in fed]
        levels[node] = max((levels[each] + (where(each) != where(node)) for each in sources), default=0)
    repeated = _gather_updates(nodes, fed, where, levels) if whole_updates else []
    for node in nodes:
        place = where(node)
        part = parts.setdefault((place, levels[node]), GraphPart(len(parts), place))
        part.nodes.append(node)
        part_of[node] = part
    for node, assignment in repeated:
        if node not in part_of[assignment].nodes:
            part_of[assignment].nodes.append(node)
            part_of[assignment].nodes.sort(key=lambda each: each.number)
    ordered = [part for _, part in sorted(parts.items(), key=lambda item: (item[0][1], item[1].number))]
    users: dict[NodeOutput, list[GraphPart]] = {}
    for part in ordered:
        inside = set(part.nodes)
        used = dict.fromkeys(each for node in part.nodes for each in node.inputs)
        part.inputs = tuple(each for each in used if each in fed or each.node not in inside)
        for each in part.inputs:
            users.setdefault(each, []).append(part)
    for part in ordered:
        own = [
            NodeOutput(node, index)
            for node in part.nodes
            if part_of[node] is part
            for index in range(len(node.outputs))
        ]
        part.outputs = frozenset(
            each for each in own if each not in fed and (each in users or each in wanted or _is_for_program(each.node))
        )
        part.frees = frees_of(part)
    fed_nodes = [each.node for each in fed if each in users or each in wanted]
    return GraphPlan(ordered, users, frozenset(fed), wanted, sorted({*nodes, *fed_nodes}, key=lambda node: node.number))


def _gather_updates(
    nodes: list[Node], fed: Set[NodeOutput], where: Callable[[Node], NodePlace], levels: dict[Node, int]
) -> list[tuple[Node, Node]]:
    """Moves what changes a variable to the level of the assignment; returns what is to be repeated there.

    That is what others use too: they must not wait for the assignment.
    """
    users: dict[Node, set[Node]] = {node: set() for node in nodes}
    for node in nodes:
        for each in node.inputs:
            if each.node in users:
                users[each.node].add(node)
    repeated = []
    for assignment in nodes:
        path = update_path(assignment) if assignment.kind is NodeKind.ASSIGN else ()
        level, inside = levels[assignment], set(path)
        lower = [node for node in path if levels.get(node, level) < level]
        if not lower or NodeOutput(path[0], 0) in fed or any(where(node) != where(assignment) for node in path):
            continue
        is_moved = True
        for node in reversed(lower):
            is_moved = is_moved and users[node] <= inside  # what leads to something that stays must stay, too
            if is_moved:
                levels[node] = level
            else:
                repeated.append((node, assignment))
    return repeated


def _needed(wanted: Iterable[NodeOutput], fed: Set[NodeOutput]) -> list[Node]:
    """The nodes that must run, in order."""
    found: set[Node] = set()
    waiting = [each.node for each in wanted if each not in fed]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if node.kind is NodeKind.PLACEHOLDER:
            raise FeedError(
                f"placeholder {node.name!r} ({described(node.outputs[0])}, made at {node.line}) is needed and was not "
                f"fed; give it in feed_dict"
            )
        found.add(node)
        waiting += [each.node for each in node.inputs if each not in fed]
        waiting += node.checks
    return sorted(found, key=lambda node: node.number)


def _is_for_program(node: Node) -> bool:
    """Whether it changes a tensor of the program, wherever the node runs."""
    return node.kind is NodeKind.ASSIGN and node.variable is not None and node.variable.tensor is not None


def frees_of(part: GraphPart) -> list[tuple[NodeOutput, ...]]:
    """After each node of a part, the values that nothing in it needs any more."""
    last: dict[NodeOutput, int] = {}
    for position, node in enumerate(part.nodes):
        for index in range(len(node.outputs)):
            last[NodeOutput(node, index)] = position
        for each in node.inputs:
            last[each] = position
    freed: list[list[NodeOutput]] = [[] for _ in part.nodes]
    for output, position in last.items():
        freed[position].append(output)
    return [tuple(each) for each in freed]
