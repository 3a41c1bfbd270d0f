"""Turns calls of torch into nodes of a graph, without running them.

Owns what becomes a node: operations on tensors of the graph, gradients included. Parameters of the program become
variables, its other tensors constants. In-place operations are recorded as what they compute; tensors that show
part of a changed one are made again. Functions that only concern the program's own tensors run at once.
"""

import dataclasses
import importlib
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stratagem import _torch, _tree
from stratagem._caller import shown_line, users_line
from stratagem.devices.device_spec import DeviceSpec
from stratagem.errors import GraphError
from stratagem.graphs import recording_rules
from stratagem.graphs.drawn import Draw, DrawnNumbers
from stratagem.graphs.graph_tensor import Cell, GraphTensor, View, no_value
from stratagem.graphs.nodes import (
    Node,
    NodeKind,
    NodeOutput,
    Size,
    described,
    example_of,
    filled,
    outputs_in,
    same_form,
)
from stratagem.placement import scopes
from stratagem.placement.names import NameCounter
from stratagem.placement.residence import device_of

if TYPE_CHECKING:
    from stratagem.graphs.symbolic_sizes import UnknownSizes

_aten: Final = torch.ops.aten
_META: Final = torch.device("meta")


@final
class GraphRecorder:
    """Records into one graph.

    Args:
        is_trace: Whether a function is recorded as a whole. Then every tensor that the program made before is a
            variable, not only parameters.

    Attributes:
        sizes: The unknown sizes of the graph, if it has any.
        drawn: The random numbers that the program has made while it recorded.
        optimizer_steps: The steps of optimizers in it that no session has taken yet, each with its line.
    """

    def __init__(self, *, is_trace: bool = False) -> None:
        self.nodes: list[Node] = []
        self.names = NameCounter()
        self.sizes: UnknownSizes | None = None
        self.assignments: dict[Node, Node] = {}
        self.optimizer_steps: list[str] = []
        self._made: list[weakref.ref[GraphTensor]] = []
        self.is_trace = is_trace
        self._adopted: dict[int, tuple[torch.Tensor, Cell]] = {}
        self._constants = WeakIdKeyDictionary()
        self._born = WeakIdKeyDictionary()
        self.drawn = DrawnNumbers()
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._by_sequence: dict[int, Node] = {}

    # Making nodes

    def add(self, kind: NodeKind, type_name: str, outputs: Sequence[torch.Tensor], **fields: Any) -> Node:
        """A new node with the device of the scopes around the caller."""
        wanted = fields.pop("name", None)
        name = self.names.unique(wanted or type_name)
        inputs = tuple(outputs_in((fields.get("args", ()), fields.get("kwargs", {}))))
        num_bytes = sum(each.numel() * each.element_size() for each in outputs) if kind is NodeKind.VARIABLE else None
        operation = scopes.Operation(type_name, name, tuple(each.node for each in inputs), num_bytes)
        spec = scopes.spec_for(operation)
        file, line = fields.pop("made_at", None) or users_line()
        fields |= {"spec": spec, "line": shown_line(file, line), "file": file, "outputs": tuple(outputs)}
        node = Node(len(self.nodes), kind, name, type_name, **fields)
        self._note_gradient(node)
        self.nodes.append(node)
        return node

    def placeholder(self, shape: Sequence[int | None], dtype: torch.dtype, name: str | None) -> GraphTensor:
        """A node whose value is fed."""
        if None not in shape:
            meta = torch.empty(shape, dtype=dtype, device=_META)  # type: ignore[arg-type]
            return self.tensor(self.add(NodeKind.PLACEHOLDER, "Placeholder", [meta], name=name))
        if self.sizes is None:  # loads what no other graph needs
            self.sizes = importlib.import_module("stratagem.graphs.symbolic_sizes").UnknownSizes()
        node = self.add(NodeKind.PLACEHOLDER, "Placeholder", [], name=name)
        node.outputs = (self.sizes.placeholder(node.name, shape, dtype),)
        return self.tensor(node)

    def tensor(self, node: Node, index: int = 0, **how: Any) -> GraphTensor:
        """The tensor that stands for a result of a node."""
        requires_grad = how.pop("requires_grad", False)
        made = GraphTensor(self, Cell(NodeOutput(node, index), **how), requires_grad=requires_grad)
        if self.is_trace:
            self._made.append(weakref.ref(made))
        return made

    def constant(self, value: torch.Tensor, **fields: Any) -> Node:
        """A node with a value of its own."""
        kept = value.detach().clone()
        return self.add(NodeKind.CONSTANT, "Const", [kept.to(_META)], value=kept, **fields)

    def assign(self, variable: Node, value: NodeOutput) -> Node:
        """A node that gives a variable a new value."""
        node = self.add(
            NodeKind.ASSIGN, "Assign", [value.meta], args=(value,), variable=variable, name=f"{variable.name}/Assign"
        )
        self.assignments[variable] = node
        return node

    def sum(self, tensors: Sequence[torch.Tensor], name: str | None = None) -> GraphTensor:
        """One node for a sum of tensors of one shape and type."""
        outputs = self._templates(list(tensors))
        return self.tensor(self.add(NodeKind.ADD_N, "AddN", [outputs[0].meta], args=(outputs,), name=name))

    def lookup(self, tensor: torch.Tensor) -> NodeOutput | None:
        """What is fetched or fed with a tensor; of a variable, its value. None if it is not of this graph."""
        if isinstance(tensor, GraphTensor):
            cell = tensor.cell if tensor.recorder is self else None
        elif id(tensor) in self._adopted:
            cell = self._adopted[id(tensor)][1]
        else:
            cell = self._captured(tensor) if tensor in self.drawn else None
        if cell is None:
            return None
        return NodeOutput(cell.variable, 0) if cell.variable is not None else self._current(cell)

    # What torch calls

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of torch: noted if it concerns the graph, otherwise run."""
        tensors = [each for each in _tree.leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not (self._concerns(function, tensors) or self._has_symbols(args)):
            return self._at_once(function, args, kwargs)
        if function in recording_rules.NEEDS_VALUES:
            raise no_value(self._name(tensors[0]), recording_rules.NEEDS_VALUES[function])
        if function in recording_rules.SAME:
            return GraphTensor(self, self._cell(args[0]))
        function = recording_rules.DEFINITE.get(function, function)
        if function in recording_rules.BATCH_NORM:
            return self._batch_norm(args, kwargs)
        if _torch.operations.schema_of(function).is_mutable:
            return self._in_place(function, args, kwargs)
        return self._out_of_place(function, args, kwargs)

    def _at_once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What concerns only tensors of the program; those that it makes belong where the scopes are now."""
        written = [*recording_rules.written(function, args, kwargs)]
        if written and not any(each in self._born for each in written):
            return function(*args, **kwargs)  # into what was there before: weights, buffers, data
        result = self.drawn.run(function, args, kwargs)
        if function not in recording_rules.SAME or args[0] in self._born:  # `parameter.data` is the parameter's memory
            for each in _tree.leaves(result):
                if isinstance(each, torch.Tensor) and each not in self._born:
                    self._born[each] = scopes.frame()
        return result

    def _concerns(self, function: Any, tensors: Sequence[torch.Tensor]) -> bool:
        if any(isinstance(each, GraphTensor) or id(each) in self._adopted for each in tensors):
            return True
        if self.is_trace:
            return any(each not in self._born for each in tensors)
        reads = torch.is_grad_enabled() and not _torch.operations.schema_of(function).is_mutable
        return reads and any(_is_parameter(each) for each in tensors)

    def _has_symbols(self, args: tuple[Any, ...]) -> bool:
        return self.sizes is not None and any(isinstance(each, torch.SymInt) for each in _tree.leaves(args))

    def _out_of_place(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node, result = self._operation(function, args, kwargs)
        view = None
        if any(each.alias_info is not None for each in _torch.operations.schema_of(function).returns):
            base = self._cell(args[0])
            view = View(base, base.version, function, args, kwargs)
        leaves, structure = _tree.flatten(result)
        indices = iter(range(len(node.outputs)))
        made = [None if each is None else self.tensor(node, next(indices), view=view) for each in leaves]
        return _tree.unflatten(made, structure)

    def _operation(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **fields: Any
    ) -> tuple[Node, Any]:
        """The node of an operation, and what it returns with tensors that have only a shape."""
        args, kwargs = self._templates(args), {name: self._templates(each) for name, each in kwargs.items()}
        type_name = recording_rules.type_name(function)
        result = self._metas(function, type_name, args, kwargs)
        metas = [each for each in _tree.leaves(result) if each is not None]
        if not all(isinstance(each, torch.Tensor) for each in metas):
            raise GraphError(f"{function} gives something that is not a tensor; a graph holds tensors only")
        node = self.add(NodeKind.OPERATION, type_name, metas, function=function, args=args, kwargs=kwargs, **fields)
        if self.sizes is not None:
            try:
                self.sizes.require_no_number(node)
            except GraphError:
                self.nodes.remove(node)
                raise
        if not metas:
            for each in node.inputs:
                each.node.checks.append(node)
        return node, result

    def _metas(self, function: Any, type_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The shapes that an operation gives, or the error that says why it cannot be."""
        args, kwargs = self._with_metas(args), {name: self._with_metas(each) for name, each in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        try:
            return function(*args, **kwargs) if self.sizes is None else self.sizes.compute(function, args, kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            shapes = ", ".join(described(each) for each in _tree.leaves(args) if isinstance(each, torch.Tensor))
            why = str(error).strip().partition("\n")[0]
            if "symbolic sizes" in why:
                why = "torch needs the number of an unknown size for it; give the placeholder that size"
            elif "dynamic" in why or "data-dependent" in why or isinstance(error, NotImplementedError):
                why = f"its shape depends on values, or torch does not know it without them ({why})"
            legend = "" if self.sizes is None else self.sizes.legend()
            raise GraphError(f"{type_name} cannot be recorded for {shapes}: {why}{legend}") from error

    def _in_place(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overload = recording_rules.functional(function)
        if overload is None:
            raise GraphError(
                f"{function} writes into its arguments in a way that a graph does not record; use a function that "
                f"returns its result"
            )
        targets = [self._written(each) for each in _tree.leaves(args[0])]
        if torch.is_grad_enabled():
            for target in targets:
                self._require_whole(target, recording_rules.type_name(function))
        defaults = recording_rules.defaults_after(function, len(args))
        if overload is _aten.bernoulli.p and _memory_order(targets[0].output.meta) != [*range(args[0].dim())]:
            self._change(targets[0], self._chance(targets[0], (*args[1:], *defaults), kwargs))
            return args[0]
        node, _ = self._operation(overload, (*args, *defaults), kwargs)
        for index, target in enumerate(targets):
            self._change(target, NodeOutput(node, index))
        return args[0]

    def _chance(self, target: Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NodeOutput:
        """Random numbers in the order of memory, as in place, so that the same seed gives the same ones."""
        meta = target.output.meta
        order = _memory_order(meta)
        there = GraphTensor(self, Cell(self._current(target))).permute(order)
        drawn, _ = self._operation(_aten.bernoulli.p, (there, *args), kwargs)
        back = sorted(range(meta.dim()), key=order.__getitem__)
        return self._current(self._cell(self.tensor(drawn).permute(back)))

    def _require_whole(self, target: Cell, what: str) -> None:
        if target.view is not None:
            raise GraphError(
                f"{what} changes {target.output.name!r} in place, which is part of {target.view.base.output.name!r}; a "
                f"graph records changes of whole tensors, and of parts under torch.no_grad(). Make a new tensor with "
                f"torch.where, torch.cat or the like"
            )

    def _change(self, target: Cell, output: NodeOutput) -> None:
        if not same_form(output.meta, target.output.meta):
            raise GraphError(
                f"{target.output.name!r} is {described(target.output.meta)}, and cannot become "
                f"{described(output.meta)} in place"
            )
        target.change(output if target.variable is None else NodeOutput(self.assign(target.variable, output), 0))
        if target.view is not None:
            self._change_around(target, target.view)

    def _change_around(self, part: Cell, view: View) -> None:
        """What shows a part of a tensor has changed, and with it that tensor."""
        whole, new = (GraphTensor(self, Cell(each)) for each in (self._current(view.base), part.output))
        made = recording_rules.put_back(view.function, view.args[1:], whole, new)
        if made is None:
            self._require_whole(part, recording_rules.type_name(view.function))
        else:
            self._change(view.base, self._current(self._cell(made)))
            part.view = dataclasses.replace(view, version=view.base.version)

    def _batch_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its running statistics are written without the schema saying so."""
        values, weight, bias, mean, variance, training, momentum, eps = args
        if not training or mean is None:
            return self._out_of_place(_aten.native_batch_norm.default, args, kwargs)
        statistics = [self._written(each) for each in (mean, variance)]
        function = _aten._native_batch_norm_legit_functional.default
        changed, _ = self._operation(function, (values, weight, bias, mean, variance, training, momentum, eps), {})
        for index, cell in enumerate(statistics, start=3):
            self._change(cell, NodeOutput(changed, index))
        return tuple(self.tensor(changed, index) for index in range(3))

    # What the tensors of a call stand for

    def _templates(self, args: Any) -> Any:
        def template(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return self._current(self._cell(each))
            if isinstance(each, torch.SymInt | torch.SymFloat) and self.sizes is not None:
                return self.sizes.size(each)
            return each

        return _tree.map(template, args)

    def _with_metas(self, template: Any) -> Any:
        sizes = self.sizes
        if sizes is None:
            return filled(template, lambda output: output.meta)
        return filled(template, lambda each: sizes.symbol(each) if isinstance(each, Size) else sizes.form(each.meta))

    def _cell(self, tensor: torch.Tensor) -> Cell:
        if isinstance(tensor, GraphTensor):
            return tensor.cell
        adopted = self._adopted.get(id(tensor))
        if adopted is not None:
            return adopted[1]
        if _is_parameter(tensor) or (self.is_trace and tensor not in self._born):
            return self.adopt(tensor)
        return self._captured(tensor)

    def give_back_gradients(self) -> None:
        """Takes gradients that were recorded off the program's own tensors, which had others or none."""
        for tensor, gradient in self._gradients:
            if isinstance(tensor.grad, GraphTensor):
                tensor.grad = gradient

    def alive_besides(self, known: Sequence[Any]) -> list[GraphTensor]:
        """The tensors of the graph that somebody holds, other than these, and those that they are views of."""
        held = [each for each in known if isinstance(each, GraphTensor)]
        excused = {id(each) for each in held}
        while held:
            view = held.pop().cell.view
            origins = [] if view is None else [each for each in view.args if isinstance(each, GraphTensor)]
            held += [each for each in origins if id(each) not in excused]
            excused |= {id(each) for each in origins}
        made = [each for reference in self._made if (each := reference()) is not None]
        return [each for each in made if id(each) not in excused]

    def _written(self, tensor: torch.Tensor) -> Cell:
        """Of a tensor that is changed in place; one that the program had before the graph keeps what is written."""
        if isinstance(tensor, GraphTensor) or id(tensor) in self._adopted:
            return self._cell(tensor)
        if _torch.tensors.is_view(tensor):
            raise GraphError(
                f"a part {described(tensor)} of a tensor of the program would be changed in place; a graph records "
                f"changes of whole tensors. Make a new tensor with torch.where, torch.cat or the like"
            )
        if tensor not in self._born:
            return self.adopt(tensor)
        cell = self._cell(tensor)
        self._adopted[id(tensor)] = (tensor, cell)  # from here on it stands for a value of the graph
        return cell

    def adopt(self, tensor: torch.Tensor) -> Cell:
        """Makes a variable of a tensor of the program, whose value it takes and changes; it is where the tensor is."""
        node = self.add(NodeKind.VARIABLE, "Variable", [tensor.detach().to(_META)], tensor=tensor)
        device = device_of(tensor)
        node.spec = DeviceSpec(device_type=device.device_type, device_index=device.index)
        cell = Cell(NodeOutput(node, 0), variable=node)
        self._adopted[id(tensor)] = (tensor, cell)
        if _is_parameter(tensor):
            self._gradients.append((tensor, tensor.grad))
        return cell

    def _captured(self, tensor: torch.Tensor) -> Cell:
        """A tensor of the program as it is now; kept once while it does not change."""
        known = self._constants.get(tensor)  # type: ignore[no-untyped-call]
        if known is None or known[0] != _torch.tensors.version_of(tensor):
            known = (_torch.tensors.version_of(tensor), Cell(self._value_of(tensor)))
            self._constants[tensor] = known
        cell: Cell = known[1]
        return cell

    def _value_of(self, tensor: torch.Tensor) -> NodeOutput:
        """A constant, or what draws random numbers, where the program has made it."""
        found = self.drawn.draw_of(tensor)
        if found is None:
            with scopes.inside(self._born.get(tensor) or scopes.frame()):  # type: ignore[no-untyped-call]
                return NodeOutput(self.constant(tensor), 0)
        draw, slot = found
        # Numbers that the program drew before are drawn before: the same seed gives what torch gives.
        earlier = itertools.takewhile(lambda each: each is not draw, self.drawn.sources())
        for each in (*earlier, draw):
            if each.node is None:
                each.node = self._redrawn(each)
        return NodeOutput(draw.node, slot)  # type: ignore[arg-type]

    def _redrawn(self, draw: Draw) -> Node:
        draw.require_unchanged()
        with scopes.recording(), scopes.inside(draw.frame):
            node, _ = self._operation(draw.function, draw.args, draw.kwargs, made_at=draw.made_at)
        return node

    def _current(self, cell: Cell) -> NodeOutput:
        """What a cell stands for; a part of a tensor that was changed is taken of it again."""
        view = cell.view
        if view is not None:
            self._current(view.base)
            if view.base.version != view.version:
                node, _ = self._operation(view.function, view.args, view.kwargs)
                cell.change(NodeOutput(node, cell.output.slot))
                cell.view = dataclasses.replace(view, version=view.base.version)
        return cell.output

    # Where gradients run

    def _note_gradient(self, node: Node) -> None:
        """An operation of a backward pass runs where the one runs whose gradient it is, whatever the scopes ask."""
        running = _torch.backward_passes.current_autograd_node()
        if running is None:
            # What follows without a gradient of its own has the same number.
            self._by_sequence.setdefault(_torch.backward_passes.next_sequence_number() - 1, node)
            return
        node.is_gradient = "AccumulateGrad" not in running.name()  # an optimizer may step in hooks of that
        node.beside = self._by_sequence.get(_torch.backward_passes.sequence_number(running))
        if node.beside is not None:
            node.spec = node.beside.spec

    def _name(self, tensor: torch.Tensor) -> str:
        return self._cell(tensor).output.node.name


def _memory_order(meta: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, those first along which memory is farthest apart."""
    return sorted(range(meta.dim()), key=lambda each: example_of(meta.stride(each)), reverse=True)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf
