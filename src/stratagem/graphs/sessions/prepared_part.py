"""A part prepared for running it many times: values in numbered slots, arguments that only need these filled in."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import torch

from stratagem.graphs.nodes import Node, NodeOutput, Size, filled, is_filled
from stratagem.graphs.sessions.partition import GraphPart

Values: TypeAlias = list[torch.Tensor | None]
SizeOf: TypeAlias = Callable[[Size], int | float]


@final
class PreparedStep:
    """One node.

    Args:
        node: The node.
        part: Its part.
        freed: The values that nothing needs after it.
        slots: Where the values are.

    Attributes:
        results: Where its results go.
        published: Those that others wait for.
        freed: Where to let go of values.
    """

    def __init__(self, node: Node, part: GraphPart, freed: Iterable[NodeOutput], slots: dict[NodeOutput, int]) -> None:
        self.node = node
        outputs = [NodeOutput(node, index) for index in range(len(node.outputs))]
        self.results = [slots[each] for each in outputs]
        self.published = [(each, slots[each]) for each in outputs if each in part.outputs]
        self.freed = [slots[each] for each in freed]
        self._slots = slots
        self._args = list(node.args)
        self._single = [(index, slots[each]) for index, each in enumerate(node.args) if isinstance(each, NodeOutput)]
        others = [(index, each) for index, each in enumerate(node.args) if not isinstance(each, NodeOutput)]
        self._nested = [(index, each) for index, each in others if not is_filled(each)]

    def arguments(self, values: Values, size_of: SizeOf) -> list[Any]:
        """The arguments, with the values that are there now."""
        args = self._args.copy()
        for index, slot in self._single:
            args[index] = values[slot]
        for index, template in self._nested:
            args[index] = self._filled(template, values, size_of)
        return args

    def named_arguments(self, values: Values, size_of: SizeOf, device: torch.device) -> dict[str, Any]:
        """The same for those with names; what is made anew is made on the device."""
        if not self.node.kwargs:
            return {}
        found = {name: self._filled(each, values, size_of) for name, each in self.node.kwargs.items()}
        if found.get("device") is not None:
            found["device"] = device
        return found

    def _filled(self, template: Any, values: Values, size_of: SizeOf) -> Any:
        return filled(template, lambda each: size_of(each) if isinstance(each, Size) else values[self._slots[each]])


@final
class PreparedProgram:
    """All steps of a part.

    Args:
        part: The part.
    """

    def __init__(self, part: GraphPart) -> None:
        self._outputs = list(part.inputs)
        self._outputs += [NodeOutput(node, index) for node in part.nodes for index in range(len(node.outputs))]
        slots = {each: slot for slot, each in enumerate(self._outputs)}
        self.steps = [
            PreparedStep(node, part, freed, slots) for node, freed in zip(part.nodes, part.frees, strict=True)
        ]

    def begin(self, inputs: Iterable[torch.Tensor]) -> Values:
        """The slots when the part begins."""
        values: Values = list(inputs)
        return values + [None] * (len(self._outputs) - len(values))

    def named(self, values: Values) -> dict[str, torch.Tensor]:
        """What is there now, for messages."""
        return {each.name: value for each, value in zip(self._outputs, values, strict=True) if value is not None}
