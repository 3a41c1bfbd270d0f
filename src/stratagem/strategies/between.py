"""The connection between the first replicas of all machines, as a step uses it.

When it fails in the middle of a step what was under way is half done: the failure must get past an
`except Exception` of the program's own, or it would go on with gradients of one machine.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, final

import torch

from stratagem.collectives.contract import Collective
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.errors import CollectiveError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@final
class Between(Collective):
    """A connection whose failures are final.

    Args:
        inner: The connection.
        final_error: What to raise for one of its errors.
    """

    def __init__(self, inner: TorchDistributed, final_error: Callable[[CollectiveError], BaseException]) -> None:
        super().__init__(inner.rank, inner.size)
        self._inner = inner
        self._final_error = final_error

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._do(self._inner.all_reduce, tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        return self._do(self._inner.broadcast, tensor, root)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._do(self._inner.all_gather, tensor)

    def barrier(self) -> None:
        self._do(self._inner.barrier)

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """The bytes of all, which all must exchange for the same reason."""
        return self._do(self._inner.exchange, what, data)

    def start_exchange(self, what: str, data: bytes) -> Callable[[], list[bytes]]:
        """Begins to exchange bytes; the result waits for those of all."""
        wait = self._do(self._inner.start_exchange, what, data)
        return lambda: self._do(wait)

    def start_sum(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to sum a flat tensor that all are known to sum next, in place; the result waits, and gives it."""
        wait = self._do(self._inner.start_known_sum, flat)
        return lambda: self._do(wait)

    def close(self) -> None:
        """Ends the connection, also while somebody waits."""
        self._inner.cut()
        self._inner.close()

    def _do(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        try:
            return function(*args, **kwargs)
        except CollectiveError as error:
            raise self._final_error(error) from None
