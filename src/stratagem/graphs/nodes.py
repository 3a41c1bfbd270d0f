"""Defines what a graph is made of: nodes, their outputs, and how an output is referred to.

Values only. Recording is `recorder`'s, running `schedule`'s.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, final

import torch

from stratagem import _tree
from stratagem.devices.device_spec import DeviceSpec

Initializer: TypeAlias = Callable[[torch.Tensor], Any]


class NodeKind(enum.Enum):
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


class NodeOutput(NamedTuple):
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
@dataclasses.dataclass(frozen=True)
class Size:
    """A number among the arguments of a node that is computed of unknown sizes, when these are there.

    Args:
        number: Its place among all of its graph, or of a part that has travelled.
    """

    number: int


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
        line: Where the program made it, shortly.
        file: The file of that line.
        outputs: The shape and type of each result, as tensors without values.
        function: The operation of torch, where it is one.
        args: Its arguments, with an `NodeOutput` in place of each tensor.
        kwargs: The same for those with names.
        beside: The operation whose gradient this one is part of; where nothing else is asked for, it runs there.
        value: Of a constant.
        variable: The node of the variable that is assigned.
        initializer: Fills the first value of a variable.
        tensor: The program's own tensor that a variable stands for.
        is_text: Whether the value is the bytes of a text.
        container: Under which a variable of this name is kept in a task of a cluster.
        is_gradient: Whether it is part of a backward pass.

    Attributes:
        inputs: The outputs among its arguments.
        checks: Operations without results, which look for errors in its own; they run whenever it does.
    """

    number: int
    kind: NodeKind
    name: str
    type: str
    spec: DeviceSpec
    line: str
    outputs: tuple[torch.Tensor, ...]
    file: str = ""
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: "Node | None" = None
    value: torch.Tensor | None = None
    variable: "Node | None" = None
    initializer: Initializer | None = None
    tensor: torch.Tensor | None = None
    is_text: bool = False
    container: str = ""
    is_gradient: bool = False
    inputs: tuple[NodeOutput, ...] = dataclasses.field(init=False)
    checks: list["Node"] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.inputs = tuple(dict.fromkeys(outputs_in((self.args, self.kwargs))))

    @property
    def num_bytes(self) -> int:
        """What its results take; those of unknown size, by an example."""
        return sum(math.prod(map(example_of, each.shape)) * each.element_size() for each in self.outputs)

    def __repr__(self) -> str:
        return f"<{self.type} {self.name!r}>"


def outputs_in(template: Any) -> Iterator[NodeOutput]:
    """The outputs that arguments refer to, in order."""
    return (each for each in _tree.leaves(template, _is_open) if isinstance(each, NodeOutput))


def is_filled(template: Any) -> bool:
    """Whether arguments refer to no outputs and no sizes."""
    return not any(_is_open(each) for each in _tree.leaves(template, _is_open))


def filled(template: Any, value_of: Callable[[Any], Any]) -> Any:
    """Arguments with values in place of outputs and sizes."""
    # By hand: a session does it in every run, for every operation with lists of tensors.
    if isinstance(template, NodeOutput | Size):
        return value_of(template)
    if isinstance(template, tuple | list):
        return type(template)([filled(each, value_of) for each in template])
    return template


def _is_open(value: Any) -> bool:
    return isinstance(value, NodeOutput | Size)


def described(tensor: torch.Tensor) -> str:
    """Shape and type, for messages; an unknown size is None.

    Example:
        >>> described(torch.ones(2, 3))
        '(2, 3) float32'
    """
    return f"{shape_text(tensor)} {str(tensor.dtype).removeprefix('torch.')}"


def shape_text(tensor: torch.Tensor) -> str:
    """The shape, for messages."""
    return str(tuple(None if isinstance(each, torch.SymInt) else each for each in tensor.shape))


def same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one type and one shape, whatever numbers their unknown sizes get."""
    return one.dtype == other.dtype and [*map(_known, one.shape)] == [*map(_known, other.shape)]


def example_of(size: Any) -> int:
    """A size as a number, of an unknown one that of the example which it was recorded with."""
    number: int = size.node.hint if isinstance(size, torch.SymInt) else size
    return number


def _known(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
