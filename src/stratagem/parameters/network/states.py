"""Puts the states of all shards together, so that a checkpoint does not depend on how many there are."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from stratagem.errors import ParameterError
from stratagem.parameters.contract import Piece, ShardPlan
from stratagem.parameters.network.bodies import LIKE, SCALAR, Body

Tensors = Sequence[torch.Tensor]


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
        parts = []
        for pieces in plan.shards:
            saved: list[list[Any]] = []
            tensors = [piece.of(self.values[piece.name]) for piece in pieces]
            for number, states in enumerate(self.optimizers):
                for piece in pieces:
                    for key, value in states.get(piece.name, {}).items():
                        form = form_of(value)
                        saved.append([number, piece.name, key, form])
                        if isinstance(value, torch.Tensor):
                            tensors.append(piece.of(value) if form == LIKE else value)
            parts.append(({"version": self.version, "saved": saved}, tensors))
        return parts


def state_rooms(pieces: Sequence[Piece], saved: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    """Memory for the tensors of a shard's state: all values, then what optimizers keep.

    Raises:
        ParameterError: The state has a variable that the shard does not have.
    """
    by_name = {piece.name: piece for piece in pieces}
    for _, name, _, _ in saved:
        if name not in by_name:
            raise ParameterError(f"a state has {name!r}, which is not in its shard")
    return [room(piece) for piece in pieces] + [
        room(by_name[name]) if form == LIKE else torch.empty(()) for _, name, _, form in saved if _is_tensor(form)
    ]


def state_of(
    pieces: Sequence[Piece], num_optimizers: int, version: int, saved: Sequence[Sequence[Any]], tensors: Tensors
) -> dict[str, Any]:
    """A state as `Shard.state_dict` gives it, of what has come."""
    optimizers: list[dict[str, dict[str, Any]]] = [{} for _ in range(num_optimizers)]
    rest = iter(tensors[len(pieces) :])
    for number, name, key, form in saved:
        if number >= num_optimizers:
            raise ParameterError(f"a state has an optimizer {number}, there are {num_optimizers}")
        optimizers[number].setdefault(name, {})[key] = next(rest) if _is_tensor(form) else form
    values = {piece.name: each for piece, each in zip(pieces, tensors, strict=False)}
    return {"version": version, "values": values, "optimizers": optimizers}


def form_of(value: Any) -> Any:
    """How a part of an optimizer's state is described: as its variable, as one number, or by itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return SCALAR if value.dim() == 0 and value.dtype == torch.float32 else LIKE


def room(piece: Piece) -> torch.Tensor:
    """Memory for a piece."""
    return torch.empty(piece.shape, dtype=piece.variable.dtype)


def _is_tensor(form: Any) -> bool:
    return isinstance(form, str)


def _join(state: dict[str, Any], key: str, value: Any, piece: Piece) -> None:
    if form_of(value) != LIKE or not isinstance(value, torch.Tensor):
        state[key] = value
        return
    if key not in state:
        state[key] = torch.empty(piece.variable.shape, dtype=value.dtype)
    piece.of(state[key]).copy_(value)
