"""Defines what a graph is made of: nodes, their outputs, and how an output is referred to.

Values only. Recording is `graph_recorder`'s, running `session_run`'s.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, final

import torch

from stratagem.devices.spec import DeviceSpec

Initializer: TypeAlias = Callable[[torch.Tensor], Any]


class Kind(enum.Enum):
    """What a node is."""

    PLACEHOLDER = "placeholder"
    """Its value comes with each run."""
    CONSTANT = "constant"
    VARIABLE = "variable"
    """The value that a variable has when a run begins."""
    OPERATION = "operation"
    """A function of torch."""
    ADD_N = "add_n"
    """The sum of its inputs."""
    ASSIGN = "assign"
    """Its input becomes the value of a variable when the run has succeeded."""


class Output(NamedTuple):
    """One result of a node."""

    node: "Node"
    slot: int

    @property
    def meta(self) -> torch.Tensor:
        """Its shape and type, without a value."""
        return self.node.outputs[self.slot]

    @property
    def name(self) -> str:
        """As in TensorFlow: `MatMul:0`."""
        return f"{self.node.name}:{self.slot}"


@final
@dataclasses.dataclass(eq=False)
class Node:
    """One operation of a graph.

    Args:
        number: Its place in the order of recording; inputs come before.
        kind: What it is.
        name: Unique in its graph.
        type: What it computes, in TensorFlow's words.
        spec: What the device scopes asked for.
        line: Where the program made it.
        outputs: The shape and type of each result, as tensors without values.
        function: The operation of torch, where it is one.
        args: Its arguments, with an `Output` in place of each tensor.
        kwargs: The same for those with names.
        beside: The operation whose gradient this one is part of; where nothing else is asked for, it runs there.
        value: Of a constant.
        variable: The node of the variable that is assigned.
        initializer: Fills the first value of a variable.
        tensor: The program's own tensor that a variable stands for.
        is_text: Whether the value is the bytes of a text.

    Attributes:
        inputs: The outputs among its arguments.
        checks: Operations without results, which look for errors in its own; they run whenever it does.
    """

    number: int
    kind: Kind
    name: str
    type: str
    spec: DeviceSpec
    line: str
    outputs: tuple[torch.Tensor, ...]
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: "Node | None" = None
    value: torch.Tensor | None = None
    variable: "Node | None" = None
    initializer: Initializer | None = None
    tensor: torch.Tensor | None = None
    is_text: bool = False
    inputs: tuple[Output, ...] = dataclasses.field(init=False)
    checks: list["Node"] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.inputs = tuple(dict.fromkeys(outputs_in((self.args, self.kwargs))))

    @property
    def num_bytes(self) -> int:
        """What its results take."""
        return sum(each.nbytes for each in self.outputs)

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r}>"


def outputs_in(template: Any) -> Iterator[Output]:
    """The outputs that arguments refer to, in order."""
    if isinstance(template, Output):
        yield template
    elif isinstance(template, tuple | list):
        for each in template:
            yield from outputs_in(each)
    elif isinstance(template, dict):
        yield from outputs_in(list(template.values()))


def filled(template: Any, value_of: Callable[[Output], Any]) -> Any:
    """Arguments with values in place of outputs."""
    if isinstance(template, Output):
        return value_of(template)
    if isinstance(template, tuple | list):
        return type(template)([filled(each, value_of) for each in template])
    return template


def described(tensor: torch.Tensor) -> str:
    """Shape and type, for messages.

    Example:
        >>> described(torch.ones(2, 3))
        '(2, 3) float32'
    """
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
