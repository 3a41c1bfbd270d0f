"""The tensor that stands for a value which a graph will compute: it has a shape and a type, but no value.

Whatever torch does with it (functions, operators, autograd) arrives here as one operation after the other and is
handed to the recorder of its graph.
"""

import contextlib
import dataclasses
from typing import Any, NoReturn, Protocol

import torch

from stratagem import _torch, _tree
from stratagem.errors import GraphError
from stratagem.graphs.nodes import Node, NodeOutput, described
from stratagem.placement import scopes

_HOST = torch.device("cpu")


class Recorder(Protocol):
    """What a tensor needs of its graph."""

    @property
    def sizes(self) -> Any:
        """The unknown sizes of the graph, if it has any."""

    @property
    def optimizer_steps(self) -> list[str]:
        """The steps of optimizers in it that no session has taken yet, each with its line."""

    @property
    def is_trace(self) -> bool:
        """Whether a function is recorded as a whole."""

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes one operation; returns tensors of the graph."""


@dataclasses.dataclass(frozen=True)
class View:
    """How a tensor that shows part of another is made of it again, once that one was changed in place."""

    base: "Cell"
    version: int
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(eq=False)
class Cell:
    """What a tensor stands for now; shared by the tensors that torch takes for the same memory.

    Args:
        output: Where the value comes from; an in-place operation puts another in its place.
        variable: The variable that it is, if it is one.
        view: What it is a part of, if it is one.
        version: How often it was changed.
    """

    output: NodeOutput
    variable: Node | None = None
    view: View | None = None
    version: int = 0

    def change(self, output: NodeOutput) -> None:
        """Lets it stand for another value from here on."""
        self.output = output
        self.version += 1


class GraphTensor(torch.Tensor):
    """A tensor of a graph: the result of `sg.placeholder` and the like, and of every operation on such tensors."""

    recorder: Recorder
    cell: Cell

    @staticmethod
    def __new__(cls, recorder: Recorder, cell: Cell, *, requires_grad: bool = False) -> "GraphTensor":
        meta = cell.output.meta
        made: GraphTensor = _torch.tensors.wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=_HOST, requires_grad=requires_grad
        )
        made.recorder = recorder
        made.cell = cell
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets modes above see that a call concerns a graph; readies torch for unknown sizes."""
        graph = (each.recorder for each in _tree.leaves((args, kwargs)) if isinstance(each, GraphTensor))
        sizes = next((each.sizes for each in graph), None)
        with (
            torch.DisableTorchFunctionSubclass(),
            contextlib.nullcontext() if sizes is None else sizes.recording(func),
        ):
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return recorder_of(func, args, kwargs or {}).record(func, args, kwargs or {})

    @property
    def node(self) -> Node:
        """The operation that it comes from."""
        return (self.cell.variable or self.cell.output.node) if self.cell.view is None else self.cell.output.node

    @property
    def op_name(self) -> str:
        """The name of that operation, such as `MatMul_1`."""
        return self.node.name

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: there is no value yet."""
        raise no_value(self.op_name, "numpy()")

    def tolist(self) -> NoReturn:
        """Refused: there is no value yet."""
        raise no_value(self.op_name, "tolist()")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: it is nothing without its graph."""
        raise GraphError(
            f"{self.op_name!r} stands for a value of a graph and cannot be sent or saved; save what Session.run "
            f"returns for it"
        )

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"<GraphTensor {self.op_name!r} {described(self.cell.output.meta)}>"


class RecordingMode(_torch.modes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, a graph hears of everything that torch does in this thread.

    Args:
        recorder: Of the graph.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in _tree.leaves((args, kwargs)):
            if isinstance(each, GraphTensor) and each.recorder is not self._recorder:
                raise GraphError(
                    f"{each.op_name!r} belongs to another graph than the one that is open; leave that block first"
                )
        return self._recorder.record(func, args, kwargs or {})


def recorder_of(function: Any, args: Any, kwargs: Any) -> Recorder:
    """The one graph that the tensors of a call belong to."""
    found: list[GraphTensor] = []
    for each in _tree.leaves((args, kwargs)):
        if isinstance(each, GraphTensor):
            found.append(each)
    for other in found[1:]:
        if other.recorder is not found[0].recorder:
            raise GraphError(
                f"{function} is given tensors of two graphs, {found[0].op_name!r} and {other.op_name!r}; use one graph"
            )
    return found[0].recorder


def no_value(name: str, what: str) -> GraphError:
    """The error of code that needs a value where there is none yet."""
    return GraphError(
        f"{what} needs the value of {name!r}, which is computed when the graph is run; fetch it with "
        f"Session.run, or decide with torch.where inside the graph"
    )


scopes.UNPLACED.add(GraphTensor)
