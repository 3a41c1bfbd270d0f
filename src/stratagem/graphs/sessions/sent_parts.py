"""Writes a part of a graph as plain values that another task can check and run, and reads it there.

What travels: names of known operations (`allowed_operations`), numbers, shapes, references between nodes. Reading
refuses whatever it does not expect, before anything is computed. Tensors travel beside it, as bytes.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, NoReturn, final

import torch

from stratagem import _torch
from stratagem._dtypes import DTYPES, name_of
from stratagem.devices.device_spec import DeviceSpec
from stratagem.errors import ProtocolError, SessionError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, Size
from stratagem.graphs.sessions import allowed_operations
from stratagem.graphs.sessions.checked_operations import checked
from stratagem.graphs.sessions.node_devices import NodePlace
from stratagem.graphs.sessions.partition import GraphPart, frees_of
from stratagem.graphs.sessions.sent_tensors import PartSizes, empty_of, header_of, refuse, require

_MOST_NODES: Final = 10**6
_MOST_LIST: Final = 10**5
_MOST_TEXT: Final = 512
_WORD: Final = re.compile(r"[a-z_]{0,32}")
_FORMATS: Final = {
    str(each).removeprefix("torch."): each
    for each in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


@final
@dataclasses.dataclass(frozen=True)
class Sent:
    """A part as it travels.

    Args:
        about: Its description, as values of JSON.
        constants: The tensors that go with it, once.
        inputs: What goes with each run, in order.
        outputs: What comes back from each run, in order.
        sizes: The sizes of the graph whose numbers go with each run, in order.
    """

    about: dict[str, Any]
    constants: list[torch.Tensor]
    inputs: tuple[NodeOutput, ...]
    outputs: tuple[NodeOutput, ...]
    sizes: tuple[Size, ...] = ()

    def empty_inputs(self, numbers: Sequence[Any]) -> list[torch.Tensor]:
        """Where the inputs of a run go, in the task.

        Raises:
            ProtocolError: The numbers are not those of this part, or make no shape.
        """
        require(len(numbers) == self.about["num_sizes"] and all(map(_is_number, numbers)), "the sizes of a run")
        return [empty_of(each, numbers=numbers) for each in self.about["inputs"]]


def _no_symbols(symbol: Any) -> NoReturn:
    raise SessionError(f"a graph without unknown sizes has come to {symbol!r}")


def encode_part(
    part: GraphPart,
    variables: Mapping[Node, int],
    size_of: Callable[[Any], Size] = _no_symbols,
    *,
    without: Set[NodeOutput] = frozenset(),
) -> Sent:
    """A part for another task.

    Args:
        part: The part; variables that stand for tensors of this program are among its inputs.
        variables: The numbers of the variables that live in that task.
        size_of: The sizes of the graph that symbols stand for (`UnknownSizes.size`).
        without: Outputs that do not come back from a run.

    Raises:
        SessionError: An operation or an argument of it cannot travel.
    """
    numbers: dict[Node, int] = {}
    places = {each: index for index, each in enumerate(part.inputs)}
    constants: list[torch.Tensor] = []
    nodes: list[dict[str, Any]] = []
    sizes = PartSizes(size_of)

    def reference(output: NodeOutput) -> list[int]:
        return [-1, places[output]] if output in places else [numbers[output.node], output.slot]

    def refer_to(value: NodeOutput | Size) -> dict[str, Any]:
        return sizes.refer_to(value) if isinstance(value, Size) else {"output": reference(value)}

    for node in part.nodes:
        about: dict[str, Any] = {
            "kind": node.kind.value,
            "name": node.name[:_MOST_TEXT],
            "line": node.line[:_MOST_TEXT],
        }
        match node.kind:
            case NodeKind.OPERATION:
                about |= _encode_operation(node, refer_to)
            case NodeKind.ADD_N:
                about["inputs"] = [reference(each) for each in node.args[0]]
            case NodeKind.CONSTANT if node.value is not None:
                constants.append(node.value)
            case NodeKind.VARIABLE:
                about |= {"variable": variables[node], **header_of(node.outputs[0])}
            case NodeKind.ASSIGN if node.variable not in variables:  # a tensor of the program, which changes it itself
                about |= {"kind": NodeKind.ADD_N.value, "inputs": [reference(node.inputs[0])]}
            case NodeKind.ASSIGN if node.variable is not None:
                about |= {"variable": variables[node.variable], "inputs": [reference(node.inputs[0])]}
        numbers[node] = len(nodes)
        nodes.append(about)
    outputs = tuple(sorted(part.outputs - without, key=lambda each: (each.node.number, each.slot)))
    about = {
        "inputs": [header_of(each.meta, sizes) for each in part.inputs],
        "constants": [header_of(each) for each in constants],
        "nodes": nodes,
        "outputs": [[*reference(each)] for each in outputs],
        "num_sizes": len(sizes.found),
    }
    return Sent(about, constants, part.inputs, outputs, tuple(sizes.found))


def _encode_operation(node: Node, refer_to: Any) -> dict[str, Any]:
    name = allowed_operations.name_of(node.function)
    if name is None:
        raise SessionError(
            f"{node.name} ({node.function}, made at {node.line}) is not among the operations that another task runs; "
            f"place it on a device of this process"
        )
    try:
        args = [_encode(each, refer_to) for each in node.args]
        kwargs = {key: _encode(each, refer_to) for key, each in node.kwargs.items()}
    except ValueError as error:
        raise SessionError(f"{node.name} (made at {node.line}) cannot travel to another task: {error}") from None
    about = {"operation": list(name), "args": args, "kwargs": kwargs, "num_outputs": len(node.outputs)}
    return about | ({"is_gradient": True} if node.is_gradient else {})


def _encode(value: Any, refer_to: Any) -> Any:
    match value:
        case NodeOutput() | Size():
            return refer_to(value)
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case str() if _WORD.fullmatch(value):
            return value
        case list() | tuple():
            return [_encode(each, refer_to) for each in value]
        case torch.dtype() if name_of(value) in DTYPES:
            return {"dtype": name_of(value)}
        case torch.memory_format():
            return {"format": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": "here"}
        case torch.layout() if value is torch.strided:
            return {"layout": "strided"}
    raise ValueError(f"it has an argument {value!r}")


def decode_part(
    about: Any, constants: Sequence[torch.Tensor], place: NodePlace, variables: dict[int, Node]
) -> tuple[GraphPart, Sent]:
    """The part that a description stands for.

    Args:
        about: What came.
        constants: The tensors that came with it.
        place: Where it is to run.
        variables: The variables of the session in this task, by number.

    Raises:
        ProtocolError: The description breaks a rule.
    """
    lists = {"inputs", "constants", "nodes", "outputs"}
    require(isinstance(about, dict) and about.keys() == {*lists, "num_sizes"}, "a part")
    require(all(isinstance(about[key], list) and len(about[key]) <= _MOST_NODES for key in lists), "a list of a part")
    num_sizes = about["num_sizes"]
    require(type(num_sizes) is int and 0 <= num_sizes <= _MOST_LIST, "the number of sizes of a part")
    inputs = [_source(index, header, num_sizes) for index, header in enumerate(about["inputs"])]
    reader = _Reader(inputs, constants, variables, num_sizes)
    part = GraphPart(0, place)
    for position, each in enumerate(about["nodes"]):
        part.nodes.append(reader.node(position, each))
    require(bool(part.nodes) and not reader.constants_left, "the nodes of a part")
    part.inputs = tuple(NodeOutput(node, 0) for node in reader.inputs)
    outputs = tuple(reader.output(each) for each in about["outputs"])
    require(all(each.node in reader.made for each in outputs), "the outputs of a part")
    part.outputs = frozenset(outputs)
    part.frees = frees_of(part)
    return part, Sent({key: about[key] for key in ("inputs", "num_sizes")}, [], part.inputs, outputs)


@final
class _Reader:
    """Reads the nodes of one part, in order; a node refers only to earlier ones."""

    def __init__(
        self, inputs: list[Node], constants: Sequence[torch.Tensor], variables: dict[int, Node], num_sizes: int
    ) -> None:
        self.inputs = inputs
        self._num_sizes = num_sizes
        self.made: dict[Node, None] = {}
        self._nodes: list[Node] = []
        self._constants = iter(constants)
        self.constants_left = len(constants)
        self._variables = variables

    def node(self, position: int, about: Any) -> Node:
        require(isinstance(about, dict) and _is_text(about.get("name")) and _is_text(about.get("line")), "a node")
        kind = about.get("kind")
        fields = about.keys() - {"kind", "name", "line"}
        match kind:
            case "operation" if fields - {"is_gradient"} == {"operation", "args", "kwargs", "num_outputs"}:
                made = self._operation(about)
            case "add_n" if fields == {"inputs"} and isinstance(about["inputs"], list) and about["inputs"]:
                made = {"kind": NodeKind.ADD_N, "args": ([self.output(each) for each in about["inputs"]],)}
            case "constant" if not fields and self.constants_left:
                self.constants_left -= 1
                made = {"kind": NodeKind.CONSTANT, "value": next(self._constants)}
            case "variable" if fields == {"variable", "dtype", "shape"}:
                node = self._variable(about)
                self._nodes.append(node)
                self.made[node] = None
                return node
            case "assign" if fields == {"variable", "inputs"} and isinstance(about["inputs"], list):
                target = self._variables.get(about["variable"]) if type(about["variable"]) is int else None
                require(target is not None and len(about["inputs"]) == 1, "an assignment")
                made = {"kind": NodeKind.ASSIGN, "variable": target, "args": (self.output(about["inputs"][0]),)}
            case _:
                refuse("a node")
        num_outputs = made.pop("num_outputs", 1)
        node = _node(position, about["name"], about["line"], num_outputs=num_outputs, **made)
        self._nodes.append(node)
        self.made[node] = None
        return node

    def output(self, reference: Any) -> NodeOutput:
        require(
            isinstance(reference, list) and len(reference) == 2 and all(type(each) is int for each in reference),
            "a reference",
        )
        number, index = reference
        if number == -1:
            require(0 <= index < len(self.inputs), "a reference to an input")
            return NodeOutput(self.inputs[index], 0)
        require(0 <= number < len(self._nodes), "a reference to a node")
        node = self._nodes[number]
        require(0 <= index < len(node.outputs), "a reference to an output")
        return NodeOutput(node, index)

    def _variable(self, about: Mapping[str, Any]) -> Node:
        meta = empty_of({"dtype": about["dtype"], "shape": about["shape"]}, "meta")
        known = self._variables.get(about["variable"]) if type(about["variable"]) is int else None
        if known is None:
            refuse("a variable")
        require((known.outputs[0].shape, known.outputs[0].dtype) == (meta.shape, meta.dtype), "a variable")
        return known

    def _operation(self, about: Mapping[str, Any]) -> dict[str, Any]:
        named = about["operation"]
        require(isinstance(named, list) and len(named) == 2, "an operation")
        function = allowed_operations.operation(*named)
        if function is None:
            raise ProtocolError(f"{str(named)[:_MOST_TEXT]} is not among the operations that a task runs for another")
        args, kwargs, num_outputs = about["args"], about["kwargs"], about["num_outputs"]
        names = [each.name for each in _torch.operations.schema_of(function).arguments]
        require(isinstance(args, list) and len(args) <= len(names), f"the arguments of {named}")
        require(isinstance(kwargs, dict) and kwargs.keys() <= set(names), f"the arguments of {named}")
        require(type(num_outputs) is int and 0 <= num_outputs <= _MOST_LIST, f"the outputs of {named}")
        is_gradient = about.get("is_gradient", False)
        require(type(is_gradient) is bool, f"what {named} is")
        return {
            "kind": NodeKind.OPERATION,
            "function": checked(function),
            "args": tuple(self._value(each) for each in args),
            "kwargs": {key: self._value(each) for key, each in kwargs.items()},
            "num_outputs": num_outputs,
            "is_gradient": is_gradient,
        }

    def _value(self, value: Any) -> Any:
        match value:
            case None | bool() | float():
                return value
            case int() if -(2**63) <= value < 2**64:
                return value
            case str() if _WORD.fullmatch(value):
                return value
            case list() if len(value) <= _MOST_LIST:
                return [self._value(each) for each in value]
            case {"output": reference, **rest} if not rest:
                return self.output(reference)
            case {"size": int(number), **rest} if not rest and 0 <= number < self._num_sizes:
                return Size(int(number))
            case {"float": "inf" | "-inf" | "nan" as number, **rest} if not rest:
                return float(number)
            case {"dtype": str(name), **rest} if not rest and name in DTYPES:
                return DTYPES[name]
            case {"format": str(name), **rest} if not rest and name in _FORMATS:
                return _FORMATS[name]
            case {"device": "here", **rest} if not rest:
                return torch.device("cpu")
            case {"layout": "strided", **rest} if not rest:
                return torch.strided
        refuse("an argument")


def variable_node(about: Mapping[str, Any]) -> Node:
    """The variable that a session declares.

    Raises:
        ProtocolError: The declaration breaks a rule.
    """
    require(_is_text(about["name"]) and _is_text(about["container"]), "a variable")
    meta = empty_of(about["value"], "meta")
    return _node(0, about["name"], "", kind=NodeKind.VARIABLE, meta=meta, container=about["container"])


def _source(index: int, header: Any, num_sizes: int) -> Node:
    meta = empty_of(header, "meta", [1] * num_sizes)
    return _node(index, f"input {index}", "", kind=NodeKind.PLACEHOLDER, meta=meta)


def _node(
    number: int,
    name: str,
    line: str,
    *,
    kind: NodeKind,
    meta: torch.Tensor | None = None,
    num_outputs: int = 1,
    **fields: Any,
) -> Node:
    unknown = torch.empty(0, device="meta")
    outputs = (unknown if meta is None else meta,) * num_outputs
    type_name = str(fields.get("function") or kind.value)
    return Node(number, kind, name, type_name, spec=DeviceSpec(), line=line, outputs=outputs, **fields)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT
