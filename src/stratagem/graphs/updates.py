"""Finds what an assignment does to the value that a variable has: `w - 0.1 * g`, `w.add_(1)`, a step of an optimizer.

Such an update can be made anew, of another value, where somebody else has changed the variable meanwhile. Pure.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch

from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, outputs_in

# Besides what torch itself calls element by element: operations that change rows, or say where elements are.
_OPERATIONS: Final = frozenset(
    "rsub index_add index_put scatter_add scatter slice_scatter select_scatter slice select cat stack roll flip view "  # noqa: SIM905
    "_unsafe_view reshape t transpose permute expand squeeze unsqueeze clone detach alias _to_copy".split()
)


def update_path(assignment: Node) -> tuple[Node, ...]:
    """The nodes between a variable and an assignment of it, in order, with both.

    Gradients are not followed, nor operations that mix elements (`x @ w`) or draw random numbers: what comes of them is
    taken as it was computed. Empty where the new value is not made of the old one by what is followed: then it
    replaces the old one.
    """
    variable = assignment.variable
    sources: dict[NodeOutput, list[NodeOutput]] = {}
    waiting = [NodeOutput(assignment, 0)]
    while waiting:
        output = waiting.pop()
        if output not in sources:
            sources[output] = list(_changed(output, variable))
            waiting += sources[output]
    reached: set[NodeOutput] = set()
    for output in sorted(sources, key=lambda each: each.node.number):
        if output.node is variable or any(each in reached for each in sources[output]):
            reached.add(output)
    if NodeOutput(assignment, 0) not in reached:
        return ()
    return tuple(sorted({each.node for each in reached}, key=lambda node: node.number))


def _changed(output: NodeOutput, variable: Node | None) -> Iterator[NodeOutput]:
    """What a node changes to get one of its results; nothing if it makes something else."""
    node = output.node
    if node.kind is NodeKind.ASSIGN:
        if node.variable is variable:
            yield from node.inputs
    elif node.kind is NodeKind.ADD_N:
        yield from node.inputs
    elif node.kind is NodeKind.OPERATION and not node.is_gradient:
        name = str(node.function).split(".")[1]
        if name.startswith("_foreach_"):  # lists of tensors, and a result for each
            for each in (*node.args, *node.kwargs.values()):
                yield from outputs_in(each[output.slot : output.slot + 1] if isinstance(each, list | tuple) else each)
        elif name in _OPERATIONS or _is_by_element(node.function):
            yield from node.inputs


def _is_by_element(function: Any) -> bool:
    tags = getattr(function, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
