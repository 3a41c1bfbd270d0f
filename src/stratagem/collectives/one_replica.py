"""The collective of a replica that is alone: the reference for all others."""

from typing import final

import torch

from stratagem.collectives.collective import Collective, check_operation, check_root, flat


@final
class OneReplica(Collective):
    """Gives back what it is given."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_operation(tensor, op)
        return _copy(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_root(root, self.size)
        return _copy(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [_copy(tensor)]

    def barrier(self) -> None:
        """Everyone is here."""

    def close(self) -> None:
        """There is nothing to give up."""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return flat(tensor).clone().view(tensor.shape)
