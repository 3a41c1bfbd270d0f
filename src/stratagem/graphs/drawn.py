"""Random numbers that a program draws while a graph is open: which of its tensors hold such, and how they were made.

The program has them as values: it feeds them, fills weights, orders data. A graph that uses them draws them anew in
each run, as in TensorFlow; `recorder` makes the nodes for that. What is computed of random numbers is random, too.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stratagem import _torch, _tree
from stratagem._caller import users_line
from stratagem.errors import GraphError
from stratagem.graphs import recording_rules
from stratagem.graphs.nodes import Node, described
from stratagem.placement import scopes

_HOST: Final = torch.device("cpu")


@final
@dataclasses.dataclass(eq=False)
class Draw:
    """One call of torch that has made random numbers.

    Args:
        function: What was called; where that writes in place, the operation that computes the same.
        args: Its arguments.
        kwargs: Those with names.
        versions: How often each tensor among them had been changed.
        frame: The device scopes around it.
        made_at: The file and the line of the program.
        node: What draws them in a graph, once something there uses them.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[tuple[torch.Tensor, int], ...]
    frame: scopes.Frame
    made_at: tuple[str, int]
    node: Node | None = None

    def require_unchanged(self) -> None:
        """Refuses to compute with what is no longer what it was."""
        if any(_version(each) != version for each, version in self.versions):
            file, line = self.made_at
            raise GraphError(
                f"the result of {recording_rules.type_name(self.function)} at {file}:{line} holds random numbers, "
                f"which a graph draws in each run, but the tensor that it was computed from was changed in place "
                f"later; replace that change by a function that returns its result"
            )


class _Place(NamedTuple):
    """Where a tensor comes from: which result of a draw it is, while it has this version."""

    draw: Draw
    slot: int
    version: int


@final
class DrawnNumbers:
    """The random numbers of one graph's block."""

    def __init__(self) -> None:
        self._places = WeakIdKeyDictionary()  # None: random in a way that cannot be computed again

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the program, and notes what it has made if that is random."""
        tensors = [each for each in _tree.leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not (_is_random(function) or any(each in self._places for each in tensors)):
            return function(*args, **kwargs)
        if function in recording_rules.SAME:
            result = function(*args, **kwargs)
            self._places[result] = self._places.get(args[0])  # type: ignore[no-untyped-call]
            return result
        if _torch.operations.schema_of(function).is_mutable:
            return self._in_place(function, args, kwargs)
        draw = self._drawn(function, args, kwargs, tensors)
        result = function(*args, **kwargs)
        made = [each for each in _tree.leaves(result) if each is not None]
        for slot, each in enumerate(made):
            if isinstance(each, torch.Tensor):
                self._places[each] = _Place(draw, slot, _version(each))
        return result

    def keep(self, tensor: torch.Tensor | None) -> None:
        """Lets a tensor be the numbers that it has now: it is state of a model."""
        self._places.pop(tensor, None)  # type: ignore[no-untyped-call]

    def draw_of(self, tensor: torch.Tensor) -> tuple[Draw, int] | None:
        """What has made a tensor, and which of its results it is; None if it is not random.

        Raises:
            GraphError: It is random in a way that cannot be computed again.
        """
        base = _torch.tensors.base_of(tensor)
        if tensor not in self._places and (base is None or base not in self._places):
            return None
        place = self._places.get(tensor)  # type: ignore[no-untyped-call]
        if place is None or place.version != _version(tensor):
            raise GraphError(
                f"a tensor {described(tensor)} is used in the graph, which draws random numbers in each run, but "
                f"random numbers were written into it in a way that a graph does not record; make a new tensor "
                f"with torch.where, torch.cat or the like, or keep these numbers with sg.constant(tensor)"
            )
        return place.draw, place.slot

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._places

    def sources(self) -> Iterator[Draw]:
        """All draws that need no other tensor and whose numbers the program still has, in its order."""
        places = [self._places.get(each) for each in self._places]  # type: ignore[no-untyped-call]
        return (each.draw for each in places if each is not None and not each.draw.versions)

    def _in_place(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else None
        overload = recording_rules.functional(function)
        if not isinstance(target, torch.Tensor) or overload is None or _torch.tensors.is_view(target):
            result = function(*args, **kwargs)
            for each in recording_rules.written(function, args, kwargs):
                self._places[each] = None
                base = _torch.tensors.base_of(each)
                if base is not None:
                    self._places[base] = None
            return result
        before = target.detach().clone()
        if target in self._places:
            draw, slot = self.draw_of(target)  # type: ignore[misc]
            self._places[before] = _Place(draw, slot, _version(before))
        args = (before, *args[1:], *recording_rules.defaults_after(function, len(args)))
        tensors = [each for each in _tree.leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        draw = self._drawn(overload, args, kwargs, tensors)
        result = function(target, *args[1:], **kwargs)
        # torch counts the change when this has returned.
        self._places[target] = _Place(draw, 0, _version(target) + 1)
        return result

    def _drawn(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]) -> Draw:
        if not tensors and any(each.name == "device" for each in _torch.operations.schema_of(function).arguments):
            kwargs = {"device": _HOST, **kwargs}
        versions = tuple((each, _version(each)) for each in tensors)
        return Draw(function, args, kwargs, versions, scopes.frame(), users_line())


def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else _torch.tensors.version_of(tensor)
