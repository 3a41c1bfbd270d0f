"""Records graphs: `sg.Graph`, and what programs put into one: placeholders, constants, variables, sums.

Owns which graph is open in a thread, and the rules for what is put in by hand. What torch computes on these
is recorded by `recorder`; running is a session's.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import numbers
import reprlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, final

import numpy as np
import torch
from torch.nn.modules.module import register_module_buffer_registration_hook

from stratagem import _torch
from stratagem._checks import StaysHere
from stratagem._dtypes import DTYPES
from stratagem.errors import GraphError, GraphTypeError
from stratagem.graphs.graph_tensor import GraphTensor, RecordingMode
from stratagem.graphs.nodes import Initializer, Node, NodeKind, NodeOutput, described, same_form
from stratagem.graphs.recorder import GraphRecorder
from stratagem.graphs.trace_optimizers import watch_steps
from stratagem.placement import scopes

Shape: TypeAlias = Sequence[int] | int
DType: TypeAlias = torch.dtype | np.dtype[Any] | type[np.generic] | str

_META = torch.device("meta")


@final
class Graph(StaysHere):
    """Records torch operations without running them; a `Session` runs them.

    In the block, every torch operation on tensors of the graph is recorded, gradients and in-place changes included,
    with the device that the `sg.device` scopes around it ask for. Shapes and types are known at once. Parameters of
    modules, and tensors that are changed in place, become variables; other tensors become constants. An operation
    without tensors of the graph is computed at once, on the device of the scopes around it.

    Random numbers that are made in the block (`torch.rand(2)`, and results computed from it) have a value that the
    program can feed or write into a weight. Where the graph uses or fetches them, each run draws new numbers from
    torch's generator (`torch.manual_seed`). `sg.constant(torch.rand(2))`, weights and buffers keep their values.
    Gradients that `backward()` puts into parameters are there until the block ends.

    `optimizer.step()` is recorded too, if the optimizer keeps no state (SGD without momentum). It returns None: fetch
    `graph.updates` to take the step. Record a step of any other optimizer with `sg.trace`.

    Example:
        >>> with Graph() as graph:
        ...     x = placeholder(torch.float32, [2, 3], name="x")
        ...     y = (x @ x.T).sum()
        >>> y, [node.name for node in graph.nodes]
        (<GraphTensor 'Sum' () float32>, ['x', 'Transpose', 'MatMul', 'Sum'])
    """

    def __init__(self, *, _recorder: GraphRecorder | None = None) -> None:
        self.recorder = _recorder or GraphRecorder()
        self._entered: list[contextlib.ExitStack] = []
        watch_steps()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All operations, in the order in which they were recorded."""
        return tuple(self.recorder.nodes)

    @property
    def variables(self) -> tuple[Node, ...]:
        """All variables."""
        return tuple(node for node in self.recorder.nodes if node.kind is NodeKind.VARIABLE)

    @property
    def updates(self) -> tuple[GraphTensor, ...]:
        """The last change of each variable by an in-place operation or an optimizer; a run that fetches it makes it."""
        return tuple(self.recorder.tensor(node) for node in self.recorder.assignments.values())

    def get_tensor_by_name(self, name: str) -> GraphTensor:
        """Returns a tensor by its name, `MatMul:0` or just `MatMul`."""
        output = self.output_by_name(name)
        return self.recorder.tensor(output.node, output.slot)

    def output_by_name(self, name: str) -> NodeOutput:
        """What a name stands for."""
        operation, _, index = name.partition(":")
        for node in self.recorder.nodes:
            if node.name == operation and (index or "0").isdecimal() and int(index or 0) < len(node.outputs):
                return NodeOutput(node, int(index or 0))
        raise GraphError(f"there is no {name!r} in the graph{_nearest(operation, self.recorder.nodes)}")

    def as_default(self) -> Self:
        """Returns the graph itself, so that TensorFlow's `with graph.as_default():` means `with graph:`."""
        return self

    def __enter__(self) -> Self:
        stack = contextlib.ExitStack()
        stack.enter_context(scopes.recording())
        stack.enter_context(_torch.kernel_choice.without_mkldnn())
        buffers = register_module_buffer_registration_hook(lambda _, __, buffer: self.recorder.drawn.keep(buffer))
        stack.callback(buffers.remove)
        stack.enter_context(RecordingMode(self.recorder))
        _open.graphs.append(self)
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.graphs.remove(self)
        self._entered.pop().close()
        if not self._entered:
            self.recorder.give_back_gradients()

    def __repr__(self) -> str:
        return f"<Graph of {len(self.recorder.nodes)} operations>"


class _Open(threading.local):
    """The graphs whose blocks a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.containers: list[str] = []


_open = _Open()
_default: list[Graph] = []


def get_default_graph() -> Graph:
    """Returns the graph of the current `with` block; outside of all blocks, the default graph of the program.

    Example:
        >>> with Graph() as graph:
        ...     get_default_graph() is graph
        True
    """
    if _open.graphs:
        return _open.graphs[-1]
    if not _default:
        _default.append(Graph())
    return _default[0]


def reset_default_graph() -> None:
    """Replaces the default graph of the program by a new, empty one.

    Example:
        >>> before = get_default_graph()
        >>> reset_default_graph()
        >>> get_default_graph() is before
        False
    """
    _default.clear()


@scopes.recording()
def placeholder(dtype: DType, shape: Sequence[int | None] | int = (), name: str | None = None) -> GraphTensor:
    """Returns a tensor of the graph whose value is fed in each run.

    Args:
        dtype: Its type, such as `torch.float32`; its name and the types of NumPy are taken, too.
        shape: Its shape; a size that is `None` may be another one in each run.
        name: By default `Placeholder`, `Placeholder_1`, ...

    Raises:
        GraphTypeError: That is not a type or a shape.
    Example:
        >>> with Graph():
        ...     placeholder(torch.float32, [2, 3])
        <GraphTensor 'Placeholder' (2, 3) float32>
    """
    size = checked_shape(shape, may_vary=True)
    return get_default_graph().recorder.placeholder(size, as_dtype(dtype), _checked_name(name))


@scopes.recording()
def constant(
    value: Any, dtype: DType | None = None, shape: Shape | None = None, name: str | None = None
) -> GraphTensor:
    """Returns a tensor of the graph with a fixed value; the value may be a text.

    Args:
        value: Numbers, nested lists of them, an array, a tensor, or a text.
        dtype: Its type; by default that of the value.
        shape: Its shape; one number fills it.
        name: By default `Const`, `Const_1`, ...

    Raises:
        GraphTypeError: The value is not a tensor and cannot become one.
        GraphError: The value and the shape have different numbers of elements.
    Example:
        >>> with Graph():
        ...     constant([1.0, 2.0])
        <GraphTensor 'Const' (2,) float32>
    """
    recorder = get_default_graph().recorder
    name = _checked_name(name)
    if isinstance(value, str):
        encoded = torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8) if value else torch.empty(0)
        return recorder.tensor(recorder.constant(encoded.to(torch.uint8), name=name, is_text=True))
    made = _as_tensor(value, None if dtype is None else as_dtype(dtype))
    if shape is not None:
        size = checked_shape(shape)
        try:
            made = made.expand(size) if made.numel() == 1 else made.reshape(size)
        except RuntimeError:
            raise GraphError(f"a constant of shape {size} cannot hold {described(made)}") from None
    return recorder.tensor(recorder.constant(made, name=name))


@scopes.recording()
def get_variable(
    name: str,
    shape: Shape | None = None,
    dtype: DType | None = None,
    initializer: Initializer | torch.Tensor | float | None = None,
    *,
    trainable: bool = True,
) -> GraphTensor:
    """Returns a variable: a tensor that keeps its value between runs of a session; in-place operations change it.

    On a cluster the variable lives in the task that it is placed on. Sessions share variables that have the same name
    there (`sg.container`); the first session gives the variable its first value.

    Args:
        name: Its name, which no other variable of the graph has.
        shape: Its shape; may be left out where the initializer is a value.
        dtype: Its type; by default that of the value, or `torch.float32`.
        initializer: A function that fills a tensor, such as those of `torch.nn.init`; or a value. By default
            `torch.nn.init.xavier_uniform_`, and zeros for variables with one dimension or none.
        trainable: Whether a floating-point variable has gradients.

    Raises:
        GraphError: The graph has a variable of that name.
        GraphTypeError: An argument has a wrong type.
    Example:
        >>> with Graph():
        ...     get_variable("weight", [2, 3], initializer=torch.nn.init.ones_)
        <GraphTensor 'weight' (2, 3) float32>
    """
    graph = get_default_graph()
    if _checked_name(name) is None:
        raise GraphTypeError("a variable has a name; give it as text")
    if any(node.name == name for node in graph.variables):
        raise GraphError(f"the graph has a variable {name!r} already; use the tensor that the first call returned")
    dtype = None if dtype is None else as_dtype(dtype)
    fill: Initializer
    if isinstance(initializer, torch.Tensor | numbers.Number | np.ndarray | list | tuple):
        first = _as_tensor(initializer, dtype)
        size = tuple(first.shape) if shape is None else checked_shape(shape)
        fill = functools.partial(_fill_with, value=first)
        dtype = first.dtype
    elif shape is None:
        raise GraphTypeError(f"variable {name!r} needs a shape, or a value as its initializer, got {initializer!r}")
    else:
        size = checked_shape(shape)
        given = initializer or (torch.nn.init.xavier_uniform_ if len(size) > 1 else torch.nn.init.zeros_)
        if not callable(given):
            raise GraphTypeError(
                f"the initializer of {name!r} is a function that fills a tensor, such as torch.nn.init.zeros_, or a "
                f"value, got {given!r}"
            )
        fill = given
    meta = torch.empty(size, dtype=dtype or torch.float32, device=_META)
    container = _open.containers[-1] if _open.containers else ""
    node = graph.recorder.add(NodeKind.VARIABLE, "Variable", [meta], name=name, initializer=fill, container=container)
    return graph.recorder.tensor(node, variable=node, requires_grad=trainable and meta.dtype.is_floating_point)


@contextlib.contextmanager
def container(name: str) -> Iterator[None]:
    """Puts variables that are made in the block into a container: a name space in the tasks of a cluster.

    Sessions on a cluster share variables that have the same name in the same container. Outside of all blocks the
    container is `""`.

    Example:
        >>> with Graph(), container("trial 7"):
        ...     weight = get_variable("weight", [2, 3])
    """
    if not isinstance(name, str):
        raise GraphTypeError(f"a container has a text as its name, got {name!r}")
    _open.containers.append(name)
    try:
        yield
    finally:
        _open.containers.pop()


@scopes.recording()
def assign(variable: GraphTensor, value: GraphTensor | torch.Tensor | float) -> GraphTensor:
    """Gives a variable a new value when a session runs it; returns that value.

    Raises:
        GraphError: The first argument is not a variable, or the value does not fit.
    Example:
        >>> import stratagem as sg
        >>> with Graph() as graph:
        ...     count = get_variable("count", initializer=1.0)
        ...     more = assign(count, count + 1)
        >>> with sg.Session(graph) as session:
        ...     print(session.run(more), session.run(more))
        tensor(2.) tensor(3.)
    """
    target = variable.cell.variable if isinstance(variable, GraphTensor) else None
    if target is None:
        raise GraphError(f"only a variable can be assigned, got {variable!r}; make one with sg.get_variable")
    recorder = variable.recorder
    made = value if isinstance(value, torch.Tensor) else _as_tensor(value, target.outputs[0].dtype)
    output = recorder.lookup(made) or NodeOutput(recorder.constant(made), 0)  # type: ignore[attr-defined]
    if not same_form(output.meta, target.outputs[0]):
        raise GraphError(
            f"{target.name!r} is {described(target.outputs[0])}, it cannot become {described(output.meta)}"
        )
    return recorder.tensor(recorder.assign(target, output))  # type: ignore[attr-defined, no-any-return]


def add_n(inputs: Sequence[torch.Tensor], name: str | None = None) -> torch.Tensor:
    """Returns the sum of tensors of one shape and type, as one operation; ordinary tensors are added at once.

    Raises:
        GraphError: There are none, or they differ.
    Example:
        >>> add_n([torch.ones(2), torch.ones(2), torch.ones(2)])
        tensor([3., 3.])
    """
    tensors = list(inputs) if isinstance(inputs, Iterable) else []
    if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise GraphTypeError(f"add_n takes a list of one tensor or more, got {inputs!r}")
    different = [each for each in tensors if not same_form(each, tensors[0])]
    if different:
        raise GraphError(
            f"add_n takes tensors of one shape and type, got {described(tensors[0])} and {described(different[0])}"
        )
    graph_tensors = [each for each in tensors if isinstance(each, GraphTensor)]
    if not graph_tensors:
        if torch.overrides.has_torch_function(tensors):  # in a scope: one operation of this name
            summed: torch.Tensor = torch.overrides.handle_torch_function(add_n, tensors, tensors)
            return summed
        return functools.reduce(torch.add, tensors)
    made: torch.Tensor = _AddN.apply(graph_tensors[0].recorder, _checked_name(name), *tensors)  # type: ignore[no-untyped-call]
    return made


class _AddN(torch.autograd.Function):
    """One node for the whole sum; each input gets the gradient of the result."""

    @staticmethod
    def forward(ctx: Any, recorder: GraphRecorder, name: str | None, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.num_inputs = len(tensors)
        return recorder.sum(tensors, name)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *([gradients[0]] * ctx.num_inputs)


@final
@dataclasses.dataclass(frozen=True)
class VariablesInitializer:
    """An operation that gives variables their first values when a session runs it."""

    graph: Graph
    variables: tuple[Node, ...]


def global_variables_initializer() -> VariablesInitializer:
    """Returns an operation that gives all variables of the graph their first values, each time that it is run.

    A session does this by itself for variables that have no value yet; run it to begin again.

    Example:
        >>> import stratagem as sg
        >>> with Graph() as graph:
        ...     count = get_variable("count", initializer=1.0)
        ...     more, anew = assign(count, count + 1), global_variables_initializer()
        >>> with sg.Session(graph) as session:
        ...     _ = session.run(more), session.run(anew)
        ...     print(session.run(count))
        tensor(1.)
    """
    graph = get_default_graph()
    return VariablesInitializer(graph, graph.variables)


def _fill_with(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return tensor.copy_(value)


def _as_tensor(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    try:
        return torch.as_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GraphTypeError(
            f"numbers, lists of them, arrays and tensors can be in a graph, got {reprlib.repr(value)}"
        ) from error


def as_dtype(dtype: Any) -> torch.dtype:
    """A type of torch, which may be given by its name, or as one of NumPy; refuses what is none."""
    found = dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)  # "float" has 32 bits, as in TensorFlow
    elif isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        found = DTYPES.get(np.dtype(dtype).name)
    if not isinstance(found, torch.dtype):
        raise GraphTypeError(f"a tensor of a graph has a type of torch, such as torch.float32, got {dtype!r}")
    return found


_MOST_ELEMENTS = 2**58  # of which torch can count the bytes


def checked_shape(shape: Any, *, may_vary: bool = False) -> tuple[Any, ...]:
    """A shape as its sizes; refuses what is none.

    Args:
        shape: What was given: a list of sizes, or one.
        may_vary: Whether sizes may be `None`.
    """
    is_list = isinstance(shape, Sequence | torch.Size) and not isinstance(shape, str)
    size = tuple(shape) if is_list else (shape,)
    known = [each for each in size if not (may_vary and is_list and each is None)]
    if not all(type(each) is int and each >= 0 for each in known):
        any_size = ", or None for a size that may be any" if may_vary else ""
        raise GraphTypeError(f"a shape is a list of whole numbers from 0 up{any_size}, got {shape!r}")
    if math.prod(max(1, each) for each in known) > _MOST_ELEMENTS:
        raise GraphTypeError(f"a tensor has at most 2**58 elements, got the shape {shape!r}")
    return size


def _checked_name(name: str | None) -> str | None:
    if name is not None and not (isinstance(name, str) and name and ":" not in name):
        raise GraphTypeError(f"a name is a text without colons, got {name!r}")
    return name


def _nearest(name: str, nodes: Sequence[Node]) -> str:
    close = difflib.get_close_matches(name, [node.name for node in nodes], n=1)
    return (
        f"; did you mean {close[0]!r}?" if close else f", which has {', '.join(node.name for node in nodes[:8])}, ..."
    )
