"""Cuts what a worker has into the pieces of shards, and puts pieces together again."""

from typing import final

import torch

from stratagem.errors import ParameterError
from stratagem.parameters.network import tensor_streams
from stratagem.parameters.protocol import Piece, Rows, ShardPlan


@final
class Parts:
    """Memory for what is fetched, and what must be copied to its place afterwards."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def room(self, piece: Piece, target: torch.Tensor | None) -> torch.Tensor:
        """The piece's own place in the variable, if bytes can go there; else a place of its own."""
        if target is None:
            return torch.empty(piece.shape, dtype=piece.variable.dtype)
        place = piece.of(target.detach())
        if place.device.type == "cpu" and place.is_contiguous() and place.dtype == piece.variable.dtype:
            return place
        room = torch.empty(piece.shape, dtype=piece.variable.dtype)
        self._copies.append((place, room, None))
        return room

    def take(self, piece: Piece, target: torch.Tensor | None, room: torch.Tensor) -> None:
        """Notes that a piece will be found elsewhere."""
        if target is not None:
            self._copies.append((piece.of(target.detach()), room, None))

    def room_for_rows(self, piece: Piece, indices: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A place of its own for some rows."""
        room = torch.empty((len(indices), *piece.shape[1:]), dtype=piece.variable.dtype)
        self._copies.append((piece.of(target.detach()), room, indices))
        return room

    def put(self) -> None:
        """Copies what is not in its place yet."""
        for place, room, indices in self._copies:
            if indices is None:
                place.copy_(room)
            else:
                place.index_copy_(0, indices.to(place.device), room.to(place.device))


def require_fit(plan: ShardPlan, name: str, value: torch.Tensor) -> None:
    """Refuses what is not like its variable, before a server does.

    Raises:
        ParameterError: It is not.
    """
    variable = plan.by_name.get(name)
    if variable is None:
        raise ParameterError(f"there is no variable {name!r}; there are {', '.join(plan.by_name)}")
    if tuple(value.shape) != variable.shape or value.dtype != variable.dtype:
        raise ParameterError(
            f"the value for {name!r} is {variable.dtype} {variable.shape}, got {value.dtype} {tuple(value.shape)}"
        )


def prepared(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in the memory of the host; a sparse one with each row once, in order."""
    return gradient.detach().coalesce().to("cpu") if gradient.is_sparse else tensor_streams.readable(gradient)


def part(piece: Piece, gradient: torch.Tensor) -> torch.Tensor | Rows:
    """The part of a prepared gradient that belongs to a piece."""
    if not gradient.is_sparse:
        return piece.of(gradient)
    indices = gradient.indices()[0]
    first, last = torch.searchsorted(indices, torch.tensor([piece.first, piece.last])).tolist()
    return Rows(indices[first:last] - piece.first, gradient.values()[first:last].contiguous())


def rows_in(piece: Piece, indices: torch.Tensor) -> torch.Tensor:
    """Which rows of a piece are meant, counted from its first."""
    unique: torch.Tensor = torch.unique(indices)
    return unique[(unique >= piece.first) & (unique < piece.last)] - piece.first
