"""Puts the states of all shards together, so that a checkpoint does not depend on how many there are."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch

from stratagem._dtypes import DTYPES, name_of
from stratagem.errors import ParameterError
from stratagem.parameters.network.bodies import LIKE, Body
from stratagem.parameters.protocol import Piece, ShardPlan, Variable

Tensors = Sequence[torch.Tensor]
States = Sequence[Mapping[str, Mapping[str, Any]]]
"""For each optimizer what it keeps, by variable and key: tensors, or numbers."""

Saved = list[list[Any]]
"""How such states are described: optimizer, key, form, and the places of the variables that have it."""

_MOST_KEPT: Final = 64


@final
@dataclasses.dataclass(frozen=True)
class StateOfAll:
    """What all servers have, by variable and not by server.

    Args:
        version: The most that a server has applied.
        values: By name, whole.
        optimizers: For each optimizer what it keeps, by name: tensors like the variable, or numbers.
    """

    version: int
    values: Mapping[str, torch.Tensor]
    optimizers: tuple[Mapping[str, Mapping[str, Any]], ...]

    @staticmethod
    def rooms(plan: ShardPlan, shard: int) -> Callable[[Body], Tensors]:
        """Memory for the state of one shard, given its description."""
        pieces = plan.shards[shard]
        return lambda body: state_rooms(pieces, body["saved"])

    @classmethod
    def joined(cls, plan: ShardPlan, num_optimizers: int, parts: Sequence[tuple[Body, Tensors]]) -> "StateOfAll":
        """The states of all shards as one."""
        values = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in plan.variables}
        optimizers: list[dict[str, dict[str, Any]]] = [{} for _ in range(num_optimizers)]
        for pieces, (body, tensors) in zip(plan.shards, parts, strict=True):
            state = state_of(pieces, num_optimizers, body["version"], body["saved"], tensors)
            for piece in pieces:
                piece.of(values[piece.name]).copy_(state["values"][piece.name])
                for whole, own in zip(optimizers, state["optimizers"], strict=True):
                    for key, value in own.get(piece.name, {}).items():
                        _join(whole.setdefault(piece.name, {}), key, value, piece)
        return cls(max(body["version"] for body, _ in parts), values, tuple(optimizers))

    def divided(self, plan: ShardPlan, num_optimizers: int) -> list[tuple[Body, list[torch.Tensor]]]:
        """What each shard of a plan is to have: its description, and its tensors.

        Raises:
            ParameterError: The state is of other variables.
        """
        if self.values.keys() != {each.name for each in plan.variables} or len(self.optimizers) != num_optimizers:
            raise ParameterError(
                f"the state has the variables {sorted(self.values)} and {len(self.optimizers)} optimizers, the model "
                f"{sorted(each.name for each in plan.variables)} and {num_optimizers}; use the model that was saved"
            )
        for variable in plan.variables:
            self._require_fit(variable)
        parts = []
        for pieces in plan.shards:
            own = [
                {
                    piece.name: {key: _part(value, piece) for key, value in states[piece.name].items()}
                    for piece in pieces
                    if piece.name in states
                }
                for states in self.optimizers
            ]
            saved, tensors = described(pieces, own)
            values = [piece.of(self.values[piece.name]) for piece in pieces]
            parts.append(({"version": self.version, "saved": saved}, [*values, *tensors]))
        return parts

    def _require_fit(self, variable: Variable) -> None:
        kept = [states.get(variable.name, {}).items() for states in self.optimizers]
        found = [("the value", self.values[variable.name]), *((f"{key!r}", each) for own in kept for key, each in own)]
        for what, value in found:
            is_wrong = isinstance(value, torch.Tensor) and form_of(value) == LIKE and value.shape != variable.shape
            if is_wrong or (what == "the value" and (value.shape, value.dtype) != (variable.shape, variable.dtype)):
                raise ParameterError(
                    f"{what} of {variable.name!r} in the state is {value.dtype} {tuple(value.shape)}, the variable is "
                    f"{variable.dtype} {variable.shape}; use the model that was saved"
                )


def described(pieces: Sequence[Piece], states: States) -> tuple[Saved, list[torch.Tensor]]:
    """What optimizers keep of some pieces: described, and its tensors in that order."""
    groups: dict[tuple[int, str, type, Any], tuple[list[int], list[torch.Tensor]]] = {}
    for number, by_name in enumerate(states):
        for place, piece in enumerate(pieces):
            for key, value in by_name.get(piece.name, {}).items():
                form = form_of(value)
                places, tensors = groups.setdefault((number, key, type(form), form), ([], []))
                places.append(place)
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
    saved = [[number, key, form, places] for (number, key, _, form), (places, _) in groups.items()]
    return saved, [each for _, tensors in groups.values() for each in tensors]


def state_rooms(pieces: Sequence[Piece], saved: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    """Memory for the tensors of a shard's state: all values, then what optimizers keep.

    Raises:
        ParameterError: The state has a variable that the shard does not have.
    """
    rooms = [room(piece) for piece in pieces]
    counts = [0] * len(pieces)
    for _, _, form, places in saved:
        for place in places:
            if place >= len(pieces):
                raise ParameterError(f"a state has variable {place} of a shard that has {len(pieces)}")
            counts[place] += 1
            if counts[place] > _MOST_KEPT:
                raise ParameterError(f"a state has more than {_MOST_KEPT} parts for variable {place}")
            if _is_tensor(form):
                rooms.append(room(pieces[place]) if form == LIKE else torch.empty((), dtype=DTYPES[form]))
    return rooms


def state_of(
    pieces: Sequence[Piece], num_optimizers: int, version: int, saved: Sequence[Sequence[Any]], tensors: Tensors
) -> dict[str, Any]:
    """A state as `Shard.state_dict` gives it, of what has come."""
    optimizers: list[dict[str, dict[str, Any]]] = [{} for _ in range(num_optimizers)]
    rest = iter(tensors[len(pieces) :])
    for number, key, form, places in saved:
        if number >= num_optimizers:
            raise ParameterError(f"a state has an optimizer {number}, there are {num_optimizers}")
        for place in places:
            value = next(rest) if _is_tensor(form) else form
            optimizers[number].setdefault(pieces[place].name, {})[key] = value
    values = {piece.name: each for piece, each in zip(pieces, tensors, strict=False)}
    return {"version": version, "values": values, "optimizers": optimizers}


def form_of(value: Any) -> Any:
    """How a part of an optimizer's state is described: as its variable, as one number of a dtype, or by itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return LIKE if value.dim() else name_of(value.dtype)


def room(piece: Piece) -> torch.Tensor:
    """Memory for a piece."""
    return torch.empty(piece.shape, dtype=piece.variable.dtype)


def _is_tensor(form: Any) -> bool:
    return isinstance(form, str)


def _part(value: Any, piece: Piece) -> Any:
    return piece.of(value) if isinstance(value, torch.Tensor) and form_of(value) == LIKE else value


def _join(state: dict[str, Any], key: str, value: Any, piece: Piece) -> None:
    if form_of(value) != LIKE or not isinstance(value, torch.Tensor):
        state[key] = value
        return
    if key not in state:
        state[key] = torch.empty(piece.variable.shape, dtype=value.dtype)
    piece.of(state[key]).copy_(value)
