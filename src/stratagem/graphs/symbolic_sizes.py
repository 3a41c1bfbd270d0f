"""Sizes of a graph that are only known when it is run: `sg.placeholder(torch.float32, [None, 784])`.

Owns the symbols that stand for them while operations are recorded, what is computed of these, and the check that a
graph still fits when the numbers are there. torch's symbolic shapes do the arithmetic; they are loaded, with sympy,
when the first unknown size comes.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from stratagem import _torch, _tree
from stratagem._caller import LIBRARIES, short_line
from stratagem.errors import FeedError, GraphError
from stratagem.graphs.nodes import Node, NodeKind, NodeOutput, Size, described, filled

# Stand-ins for an unknown number; that a result has the same form for both shows that it does not depend on one of
# them. Both can be halved and divided by three, as programs do to whole batches.
_EXAMPLE: Final = 12
_OTHER: Final = 24
_RECURRENT: Final = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_TORCH: Final = Path(torch.__file__).parent
_sym_min: Final[Any] = torch.sym_min
_sym_max: Final[Any] = torch.sym_max
_ARITHMETIC: Final = (str(_TORCH / "__init__.py"), str(_TORCH / "fx"), str(_TORCH / "utils"), sympy.__path__[0])


@final
class UnknownSizes:
    """The unknown sizes of one graph."""

    def __init__(self) -> None:
        self._environment = _Environment(specialize_zero_one=False, duck_shape=False)
        self._mode = _torch.without_values.FakeTensorMode(shape_env=self._environment)
        self._expressions: list[Any] = []
        self._symbols: list[Any] = []
        self._sizes: dict[Any, Size] = {}
        self._names: dict[Any, str] = {}

    # While operations are recorded

    def placeholder(self, name: str, shape: Sequence[int | None], dtype: torch.dtype) -> torch.Tensor:
        """The form of a placeholder, with a symbol for each size that is not given."""
        full = [self._new(name, index) if size is None else size for index, size in enumerate(shape)]
        with _torch.modes.without_dispatch_modes(), self._mode:
            return torch.empty(full, dtype=dtype, device="meta")

    @contextlib.contextmanager
    def recording(self, function: Any) -> Iterator[None]:
        """Around a function of torch: a size may be 0 or 1, and what it does must not depend on that."""
        # Written in C++ for known sizes; torch has them in Python too.
        recurrent = getattr(function, "__name__", "") in _RECURRENT
        with (
            _torch.without_values.any_size(),
            _torch.modes.python_dispatcher() if recurrent else contextlib.nullcontext(),
        ):
            yield

    def compute(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an operation gives for forms.

        Raises:
            NotImplementedError: How many elements that are depends on values.
        """
        with self._computing():
            result = function(*args, **kwargs)
            if not self._has_made_up(result):
                return result
            if function is torch.ops.aten.slice.Tensor:
                return _sliced(*args, **kwargs)
        raise NotImplementedError("torch makes up a size of its result")

    def _has_made_up(self, result: Any) -> bool:
        """Whether torch has put a new symbol for a size that it could not compute of others."""
        shapes = [each.shape for each in _tree.leaves(result) if isinstance(each, torch.Tensor)]
        symbols: list[Any] = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
        return any(not each.node.expr.free_symbols <= self._names.keys() for each in symbols)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Around an operation on forms; what it finds out about sizes is checked with the numbers instead."""
        log = _torch.without_values.fake_tensor_log
        before, log.disabled = log.disabled, True  # what fails is told in one sentence
        try:
            with self._environment.suppress_guards(), self._mode, _torch.modes.python_dispatcher():
                yield
        finally:
            log.disabled = before

    def form(self, meta: torch.Tensor) -> torch.Tensor:
        """A tensor without values that can be computed with in `compute`."""
        is_form = isinstance(meta, _torch.without_values.FakeTensor)
        return meta if is_form else self._mode.from_tensor(meta, static_shapes=True)

    def size(self, symbol: torch.SymInt | torch.SymFloat) -> Size:
        """What stands for a symbol in the arguments of a node."""
        expression = symbol.node.expr
        if expression not in self._sizes:
            self._sizes[expression] = Size(len(self._symbols))
            self._symbols.append(symbol)
            self._expressions.append(expression)
        return self._sizes[expression]

    def symbol(self, size: Size) -> Any:
        """The symbol that a size of a node stands for."""
        return self._symbols[size.number]

    def require_no_number(self, node: Node) -> None:
        """Refuses an operation whose result has another form than its symbols say.

        Raises:
            GraphError: It needs the number.
        """
        numbers = Numbers(self, dict.fromkeys(self._names, _OTHER))
        try:
            self._check(node, numbers)
        except FeedError as error:
            names = ", ".join(self._names.values())
            raise GraphError(
                f"{node.type} needs the number of an unknown size ({names}), because it would be another operation "
                f"for each number. Give the placeholder that size, or use operations that work for any size. An "
                f"example of the difference: {error}"
            ) from None

    # When the numbers are there

    def numbers(self, feeds: Mapping[NodeOutput, torch.Tensor]) -> "Numbers":
        """The numbers that the values of a run give to the unknown sizes.

        Raises:
            FeedError: Two values contradict each other.
        """
        found: dict[Any, int] = {}
        for output, value in feeds.items():
            for index, size in enumerate(output.meta.shape):
                if isinstance(size, torch.SymInt) and _torch.without_values.expression_of(size).is_Symbol:
                    number = found.setdefault(_torch.without_values.expression_of(size), value.shape[index])
                    if number != value.shape[index]:
                        raise FeedError(
                            f"{output.node.name!r} was fed shape {tuple(value.shape)}, whose size {index} must be "
                            f"{number}, as in the other tensors that were fed"
                        )
        numbers = Numbers(self, found)
        for output, value in feeds.items():
            if numbers.shape_of(output.meta, None) not in (tuple(value.shape), None):
                wanted = numbers.shape_of(output.meta, None)
                raise FeedError(f"{output.node.name!r} takes shape {wanted} here, it was fed {tuple(value.shape)}")
        return numbers

    def check(self, nodes: Iterable[Node], numbers: "Numbers") -> None:
        """Refuses numbers for which a graph would compute something else than was recorded.

        Raises:
            FeedError: An operation cannot be computed for these numbers, or has another form for them.
        """
        nodes = list(nodes)
        lines = {node.line for node in nodes if node.kind is NodeKind.OPERATION}
        for decision, line in self._environment.decisions.items():
            if line in lines and numbers.value_of(decision) is False:
                raise FeedError(f"{line} takes sizes with {_relation(decision)} only{self.legend()}, not {numbers}")
        for node in nodes:
            if node.kind in (NodeKind.OPERATION, NodeKind.ADD_N) and node.inputs:
                self._check(node, numbers)

    def legend(self) -> str:
        """What the symbols in a message mean."""
        return f" ({', '.join(f'{symbol} is {name}' for symbol, name in self._names.items())})"

    def name_of(self, symbol: Any) -> str:
        """Which size a symbol is."""
        return self._names[symbol]

    def expression(self, number: int) -> Any:
        """What is computed for a size of a node."""
        return self._expressions[number]

    def _check(self, node: Node, numbers: "Numbers") -> None:
        def value_of(each: NodeOutput | Size) -> Any:
            return numbers.of(each, node) if isinstance(each, Size) else numbers.form_of(each.meta, node)

        expected = [numbers.shape_of(each, node) for each in node.outputs]
        try:
            if node.kind is NodeKind.ADD_N:
                found = [tuple(sum(filled(node.args, value_of)[0]).shape)]
            else:
                named = {name: filled(each, value_of) for name, each in node.kwargs.items()}
                if named.get("device") is not None:
                    named["device"] = torch.device("meta")
                results = _tree.leaves(node.function(*filled(node.args, value_of), **named))
                found = [tuple(each.shape) for each in results if each is not None]
        except FeedError:
            raise
        except Exception as error:
            shapes = ", ".join(described(numbers.form_of(each.meta, node)) for each in node.inputs)
            why = str(error).strip().partition("\n")[0]
            raise FeedError(f"{node.name} (made at {node.line}) cannot be computed for {shapes}: {why}") from error
        if found != expected:
            raise FeedError(
                f"{node.name} (made at {node.line}) gives {_listed(found)} for {numbers}, where {_listed(expected)} "
                f"was recorded"
            )

    def _new(self, name: str, index: int) -> Any:
        source = _torch.without_values.constant_source(f"{name}_{index}")
        symbol = self._environment.create_symbol(
            _EXAMPLE, source=source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
        )
        self._names[symbol] = f"size {index} of {name!r}"
        return self._environment.create_symintnode(symbol, hint=_EXAMPLE, source=source)


@final
class Numbers:
    """The numbers that unknown sizes have in one run.

    Args:
        sizes: The unknown sizes.
        found: The number of each symbol, as far as they are known.
    """

    def __init__(self, sizes: UnknownSizes, found: Mapping[Any, int]) -> None:
        self._sizes = sizes
        self._found = {symbol: sympy.Integer(number) for symbol, number in found.items()}
        self.key = frozenset(found.items())
        self._values: dict[int, int | float] = {}

    def size(self, symbol: torch.SymInt) -> Size:
        """What stands for a symbol in the arguments of a node."""
        return self._sizes.size(symbol)

    def of(self, size: Size, node: Node | None = None) -> int | float:
        """The number that a size of a node stands for.

        Raises:
            FeedError: It depends on something that was not fed.
        """
        value = self._values.get(size.number)
        if value is None:
            expression = self._sizes.expression(size.number)
            known = self.value_of(expression)
            if known is None:
                missing = next(each for each in expression.free_symbols if each not in self._found)
                needed = "" if node is None else f" by {node.name} (made at {node.line})"
                raise FeedError(f"{self._sizes.name_of(missing)} is needed{needed} and not known; feed that tensor too")
            value = self._values[size.number] = known
        return value

    def value_of(self, expression: Any) -> Any:
        """What an expression comes to; None if some of it is not known."""
        found = expression.xreplace(self._found)
        if found.free_symbols:
            return None
        if found in (sympy.true, sympy.false):
            return bool(found)
        return int(found) if found.is_integer else float(found)

    def shape_of(self, meta: torch.Tensor, node: Node | None) -> Any:
        """The shape of a tensor in this run; without a node, None if it is not known."""
        return self._resolved(meta.shape, node)

    def form_of(self, meta: torch.Tensor, node: Node) -> torch.Tensor:
        """A tensor without values that has the shape, order and type of one in this run."""
        if not isinstance(meta, _torch.without_values.FakeTensor):
            return meta
        shape, strides = (self._resolved(each, node) or () for each in (meta.shape, meta.stride()))
        return torch.empty_strided(shape, strides, dtype=meta.dtype, device="meta")

    def _resolved(self, sizes: Sequence[Any], node: Node | None) -> tuple[Any, ...] | None:
        found = []
        for each in sizes:
            value = each
            if isinstance(each, torch.SymInt):
                value = self.value_of(each.node.expr) if node is None else self.of(self._sizes.size(each), node)
            if value is None:
                return None
            found.append(value)
        return tuple(found)

    def __repr__(self) -> str:
        known = [f"{self._sizes.name_of(symbol)} = {number}" for symbol, number in self._found.items()]
        return ", ".join(known) or "no sizes"


class _Environment(ShapeEnv):
    """Symbols of which no program may ask the number.

    Attributes:
        decisions: What torch has taken for granted about sizes, and the line of the program where it did.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._num_symbols = 0
        self.decisions: dict[Any, str] = {}

    def evaluate_expr(self, orig_expr: Any, *args: Any, **options: Any) -> Any:
        asker, in_python = _asker()
        if asker is not None and self._maybe_evaluate_static(orig_expr) is None:
            raise _number_needed(asker)
        num_known = len(self.guards)
        found = super().evaluate_expr(orig_expr, *args, **options)
        if in_python and orig_expr.is_Boolean and not self._suppress_guards_tls():
            self._decide(orig_expr if found else sympy.Not(orig_expr))
        for guard in self.guards[num_known:]:
            # In C++ that is a question of the order of memory, which has one answer that always serves.
            if in_python or not (isinstance(guard.expr, sympy.Ne) and guard.expr.rhs == 1):
                self._decide(guard.expr)
        return found

    def _decide(self, expression: Any) -> None:
        if expression is not sympy.true:
            self.decisions.setdefault(expression, short_line())

    def _generate_unique_id(self, source_name: str) -> int:
        self._num_symbols += 1
        return self._num_symbols - 1

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        if tgt.is_number:
            raise _number_needed(short_line())
        super()._set_replacement(a, tgt, msg)


def _sliced(form: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> torch.Tensor:
    """The form of `form[start:end:step]`, where torch does not find out which numbers are larger; before 2.12 often."""
    shape, strides = list(form.shape), list(form.stride())
    first, last = _within(shape[dim], start or 0), _within(shape[dim], sys.maxsize if end is None else end)
    offset = form.storage_offset() + first * strides[dim]
    shape[dim] = (_sym_max(last - first, 0) + step - 1) // step
    strides[dim] *= step
    return form.as_strided(shape, strides, offset)


def _within(size: Any, index: Any) -> Any:
    """An index of a slice as Python understands it: from the end if negative, and not past either end."""
    if isinstance(index, int) and index == sys.maxsize:
        return size
    return _sym_min(size, _sym_max(0, index + size if index < 0 else index))


def _number_needed(line: str) -> GraphError:
    return GraphError(
        f"{line} needs the number of an unknown size, which is only known when the graph is run; give the placeholder "
        f"that size, or leave the number to torch: x.reshape(-1, 3), x.flatten(1), x.mean(0)"
    )


def _asker() -> tuple[str | None, bool]:
    """Who asks for a number: the line of the program, if it does so itself; and whether it was asked in Python."""
    frame: Any = sys._getframe(2)
    in_python = False
    while frame is not None and frame.f_code.co_filename.startswith((*_ARITHMETIC, __file__)):
        in_python = in_python or frame.f_code.co_filename == _ARITHMETIC[0]
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(LIBRARIES):
        return None, in_python
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", in_python


def _relation(expression: Any) -> str:
    """`s0 != 1` for `Ne(s0, 1)`."""
    return f"{expression.lhs} {expression.rel_op} {expression.rhs}" if expression.is_Relational else str(expression)


def _listed(shapes: Sequence[Any]) -> str:
    return f"{len(shapes)} results" if len(shapes) > 3 else ", ".join(map(str, shapes)) or "nothing"
