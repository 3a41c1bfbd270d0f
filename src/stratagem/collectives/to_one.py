"""Takes everything to one replica, combines it there, and brings the result back.

The oldest design, with the parameters in one place: simple to follow, and slower the more replicas
there are. How tensors travel is the business of the collective that it wraps.
"""

from typing import final

import torch

from stratagem.collectives.collective import (
    Collective,
    check_calls,
    check_operation,
    check_root,
    combine,
    describe_call,
    flat,
)

_CENTRE = 0


@final
class ToOne(Collective):
    """Reduces on replica 0, for all.

    The parts are combined in the order of the replicas, so that the result is, bit for bit, that
    of the collectives that divide the work.

    Args:
        inner: What carries the tensors; closed with this one.
    """

    def __init__(self, inner: Collective) -> None:
        super().__init__(inner.rank, inner.size)
        self._inner = inner

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        check_operation(tensor, op)
        row = flat(tensor)
        self._agree(describe_call(f"all_reduce({op!r})", tensor))
        parts = self._inner.all_gather(row)
        total = combine(parts, op) if self.rank == _CENTRE else torch.empty_like(row)
        return self._inner.broadcast(total, _CENTRE).view(tensor.shape)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        check_root(root, self.size)
        self._agree(describe_call(f"broadcast(root={root})", tensor))
        return self._inner.broadcast(tensor, root)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._agree(describe_call("all_gather", tensor), any_shape=True)
        return self._inner.all_gather(tensor)

    def barrier(self) -> None:
        self._agree(describe_call("barrier"))

    def close(self) -> None:
        self._inner.close()

    def _agree(self, call: str, *, any_shape: bool = False) -> None:
        """Makes sure that all replicas do the same, which the calls to the inner collective hide."""
        text = torch.frombuffer(bytearray(call.encode()), dtype=torch.uint8)
        calls = [bytes(each.tolist()).decode() for each in self._inner.all_gather(text)]
        check_calls(calls, any_shape=any_shape)
