"""Reads what a run is asked for: nested fetches, and values to feed; every rule that they obey."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch

from stratagem import _tree
from stratagem.errors import FeedError, GraphError, GraphTypeError
from stratagem.graphs.graph import Graph, VariablesInitializer
from stratagem.graphs.graph_tensor import GraphTensor
from stratagem.graphs.nodes import Node, NodeOutput, described, shape_text
from stratagem.graphs.trace import Traced


@final
@dataclasses.dataclass(frozen=True)
class Fetches:
    """What is fetched, in what form.

    Args:
        leaves: What each place of the form holds: an output; a value that a traced function returns besides tensors, in
            a box; or None for what returns nothing.
        structure: The form.
        others: What must run, but is not returned.
        initialized: Variables that get their first values.
    """

    leaves: tuple["NodeOutput | _Box | None", ...]
    structure: Any
    others: tuple[NodeOutput, ...]
    initialized: tuple[Node, ...]

    @property
    def returned(self) -> tuple[NodeOutput, ...]:
        """All whose values are returned, each once."""
        return tuple(dict.fromkeys(each for each in self.leaves if isinstance(each, NodeOutput)))

    @property
    def outputs(self) -> tuple[NodeOutput, ...]:
        """All that must be computed, each once."""
        return tuple(dict.fromkeys([*self.returned, *self.others]))

    def filled(self, values: Mapping[NodeOutput, Any]) -> Any:
        """The same form with values."""
        found = [
            values[each] if isinstance(each, NodeOutput) else None if each is None else each.value
            for each in self.leaves
        ]
        return _tree.unflatten(found, self.structure)


@final
@dataclasses.dataclass(frozen=True)
class _Box:
    """Something that is returned as it is."""

    value: Any


def read_fetches(graph: Graph, fetches: Any) -> Fetches:
    """Checks what is fetched.

    Raises:
        GraphError: Something is not in the graph.
        GraphTypeError: Something is None.
    """
    others: list[NodeOutput] = []
    initialized: list[Node] = []

    def opened(fetch: Any) -> Any:
        if not isinstance(fetch, Traced):
            return fetch
        if fetch.graph is not graph:
            raise GraphError("the function was traced into another graph than the one of this session")
        others.extend(_output(graph, each) for each in fetch.updates)
        return _tree.map(lambda each: each if isinstance(each, torch.Tensor) else _Box(each), fetch.outputs)

    leaves, structure = _tree.flatten(_tree.map(opened, fetches))
    found: list[NodeOutput | _Box | None] = []
    for each in leaves:
        if isinstance(each, VariablesInitializer):
            if each.graph is not graph:
                raise GraphError("the initializer is of another graph than the one of this session")
            initialized.extend(each.variables)
            found.append(None)
        elif isinstance(each, _Box):
            found.append(each)
        elif each is None:
            raise GraphTypeError(
                "None cannot be fetched. optimizer.step() returns None; fetch what it changes: "
                "session.run([loss, graph.updates])"
            )
        else:
            found.append(_output(graph, each))
    return Fetches(tuple(found), structure, tuple(others), tuple(initialized))


def read_feeds(graph: Graph, feed_dict: Mapping[Any, Any] | None) -> dict[NodeOutput, torch.Tensor]:
    """Checks what is fed.

    Raises:
        FeedError: A value does not have the shape or the type that its tensor has.
        GraphError: Something is not in the graph.
    """
    if feed_dict is None:
        return {}
    if not isinstance(feed_dict, Mapping):
        raise FeedError(f"feed_dict maps tensors of the graph to values, got {feed_dict!r}")
    return {(output := _output(graph, key)): _fed_value(output, value) for key, value in feed_dict.items()}


def _output(graph: Graph, fetch: Any) -> NodeOutput:
    if isinstance(fetch, str):
        return graph.output_by_name(fetch)
    if isinstance(fetch, torch.Tensor):
        output = graph.recorder.lookup(fetch)
        if output is None:
            what = f"{fetch!r} is" if isinstance(fetch, GraphTensor) else f"a tensor {described(fetch)} is"
            raise GraphError(f"{what} not part of this session's graph; use tensors that were recorded in it")
        return output
    raise GraphError(f"only tensors of the graph, their names, and lists and dicts of these can be used, got {fetch!r}")


def _fed_value(output: NodeOutput, value: Any) -> torch.Tensor:
    meta = output.meta
    name = output.node.name
    if isinstance(value, GraphTensor):
        raise FeedError(f"{name!r} was fed {value!r}, which has no value itself; feed an ordinary tensor or numbers")
    given: torch.Tensor | None = value
    if isinstance(value, np.ndarray):
        given = torch.from_numpy(np.ascontiguousarray(value)) if value.dtype != object else None
    elif not isinstance(value, torch.Tensor):
        given = _from_numbers(value, meta.dtype)
    if given is None:
        raise FeedError(
            f"{name!r} takes {described(meta)}, it was fed {reprlib.repr(value)}, which is not a tensor and cannot "
            f"become one"
        )
    if given.layout is not torch.strided or given.is_meta or given.is_nested:
        what = "has no values" if given.is_meta else "is not dense"
        raise FeedError(
            f"{name!r} takes a dense tensor in memory, it was fed one that {what}; feed x.to_dense() or the like"
        )
    if not _fits(given.shape, meta.shape):
        raise FeedError(f"{name!r} takes shape {shape_text(meta)}, it was fed one of shape {tuple(given.shape)}")
    if given.dtype != meta.dtype:
        wanted, came = (str(each).removeprefix("torch.") for each in (meta.dtype, given.dtype))
        raise FeedError(
            f"{name!r} takes values of type {wanted}, it was fed {came}; convert them with .to(torch.{wanted})"
        )
    return given.detach()


def _fits(given: torch.Size, wanted: torch.Size) -> bool:
    """An unknown size takes any number."""
    return len(given) == len(wanted) and all(
        isinstance(size, torch.SymInt) or size == number for number, size in zip(given, wanted, strict=True)
    )


def _from_numbers(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Python's numbers take the type that is wanted, if they keep their value."""
    try:
        given = torch.as_tensor(value)
        made = given.to(dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError):
        return None
    fits = torch.can_cast(given.dtype, dtype) or given.numel() == 0
    return made if fits else given
