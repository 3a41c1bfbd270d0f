"""Records a function as a graph: `sg.trace`."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from stratagem import _tree
from stratagem.errors import GraphError, GraphTypeError
from stratagem.graphs.graph import Graph, as_dtype, checked_shape, placeholder
from stratagem.graphs.graph_tensor import GraphTensor
from stratagem.graphs.nodes import described
from stratagem.graphs.recorder import GraphRecorder
from stratagem.graphs.trace_optimizers import recordable_optimizers


@final
@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor; stands for an example in `sg.trace`.

    Args:
        shape: Its shape; a size that is `None` may be another one in each run.
        dtype: Its type.
    Raises:
        GraphTypeError: That is not a shape or a type.
    Example:
        >>> TensorSpec([None, 784])
        TensorSpec(shape=[None, 784], dtype=torch.float32)
    """

    shape: Sequence[int | None] | int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        checked_shape(self.shape, may_vary=True)
        object.__setattr__(self, "dtype", as_dtype(self.dtype))


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """A function that was recorded as a graph; run it with `session.run(traced, traced.feed(x, y))`.

    Attributes:
        graph: The recorded operations.
        inputs: A placeholder for each tensor among its arguments.
        outputs: What it returns, with tensors of the graph.
        updates: The changes that it makes to tensors of the program; running it makes them.
    """

    graph: Graph
    inputs: tuple[GraphTensor, ...]
    outputs: Any
    updates: tuple[GraphTensor, ...]

    def feed(self, *args: Any) -> dict[torch.Tensor, Any]:
        """Returns the `feed_dict` for new arguments, of the same structure as those in `sg.trace`."""
        tensors = [each for each in _tree.leaves(args) if isinstance(each, torch.Tensor)]
        if len(tensors) != len(self.inputs):
            raise GraphError(f"the function was traced with {len(self.inputs)} tensors, got {len(tensors)}")
        return dict(zip(self.inputs, tensors, strict=True))

    def __repr__(self) -> str:
        return f"<Traced of {len(self.graph.nodes)} operations>"


def trace(function: Callable[..., Any], *examples: Any) -> Traced:
    """Records what a function does with tensors as a graph, also a training step with gradients and updates.

    Nothing is computed. Tensors that exist already, such as the parameters of a model and the state of an optimizer,
    are variables: a session reads them when it runs, and changes them when the run has succeeded. Arguments that are
    not tensors, and everything that the function does in Python, stay as they were during the recording.

    Args:
        function: What to record; it must not depend on the values of tensors.
        examples: Its arguments; of tensors, only shape and type matter. `sg.TensorSpec([None, 784])` is a tensor of any
            number of rows.

    Raises:
        GraphError: The function needs values, or keeps tensors that it has made.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss(x):
        ...     return model(x).square().mean()
        >>> trace(loss, torch.ones(5, 3))
        <Traced of 7 operations>
    """
    if not callable(function):
        raise GraphTypeError(f"a function is traced, got {function!r}")
    graph = Graph(_recorder=GraphRecorder(is_trace=True))
    leaves, structure = _tree.flatten(examples)
    with graph, recordable_optimizers():
        given = [
            placeholder(each.dtype, each.shape, name=f"input_{index}")
            if isinstance(each, torch.Tensor | TensorSpec)
            else each
            for index, each in enumerate(leaves)
        ]
        for made, example in zip(given, leaves, strict=True):
            if isinstance(example, torch.Tensor) and example.requires_grad:
                made.requires_grad_()
        try:
            output = functools.partial(_output, graph.recorder)
            outputs = _tree.map(output, function(*_tree.unflatten(given, structure)))
        finally:
            graph.recorder.give_back_gradients()
        traced = Traced(graph, tuple(each for each in given if isinstance(each, GraphTensor)), outputs, graph.updates)
        _refuse_what_was_kept(traced)
        return traced


def _output(recorder: GraphRecorder, value: Any) -> Any:
    """What a function returns, without the gradients' own graph, which would keep everything alive."""
    if not isinstance(value, torch.Tensor):
        return value
    drawn = recorder.lookup(value) if value in recorder.drawn else None
    if drawn is not None:
        return recorder.tensor(*drawn)
    if not isinstance(value, GraphTensor):
        raise GraphError(
            f"the function returns a tensor {described(value)} that depends neither on its arguments nor on tensors "
            f"that existed before; leave it out"
        )
    return value.detach()


def _refuse_what_was_kept(traced: Traced) -> None:
    """A tensor that a function has made has another value in each run; kept outside, it would mean none of them."""
    gc.collect()
    known = [*traced.inputs, *traced.updates, *_tree.leaves(traced.outputs)]
    kept = traced.graph.recorder.alive_besides(known)
    if kept:
        raise GraphError(
            f"the function keeps {len(kept)} tensor(s) that it has made, first {kept[0]!r}; state that outlives a run "
            f"must exist before: call the function once with ordinary tensors, then trace it"
        )
