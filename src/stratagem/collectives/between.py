"""The connection between the first replicas of all machines, as a step uses it.

When it fails in the middle of a step what was under way is half done: the failure must get past an
`except Exception` of the program's own, or it would go on with gradients of one machine.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, final

import torch

from stratagem.collectives.collective import Collective
from stratagem.collectives.mesh import Mesh
from stratagem.collectives.torch_distributed import TorchDistributed
from stratagem.errors import CollectiveError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@final
class Between(Collective):
    """A connection whose failures are final.

    Args:
        mesh: Carries what is in the memory of the machines.
        connect_accelerators: Connects what carries tensors of accelerators, when the first of them is exchanged.
        final_error: What to raise for an error.
    """

    def __init__(
        self,
        mesh: Mesh,
        connect_accelerators: Callable[[], TorchDistributed],
        final_error: Callable[[CollectiveError], BaseException],
    ) -> None:
        super().__init__(mesh.rank, mesh.size)
        self._mesh = mesh
        self._connect_accelerators = connect_accelerators
        self._accelerators: TorchDistributed | None = None
        self._final_error = final_error

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._do(self._way(tensor).all_reduce, tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        return self._do(self._way(tensor).broadcast, tensor, root)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._do(self._way(tensor).all_gather, tensor)

    def barrier(self) -> None:
        self._do(self._mesh.barrier)

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """The bytes of all, which all must exchange for the same reason."""
        return self._do(self._mesh.exchange, what, data)

    def start_sum(self, row: torch.Tensor, dtype: torch.dtype) -> Callable[[], bool]:
        """Begins to sum a flat tensor in place, which travels as a type; what it returns is as of `Mesh.start_sum`."""
        wait = self._do(self._mesh.start_sum, row, dtype)
        return lambda: self._do(wait)

    def close(self) -> None:
        """Ends the connection, also while somebody waits."""
        if self._accelerators is not None:
            self._accelerators.cut()
            self._accelerators.close()
        self._mesh.close()

    def _way(self, tensor: torch.Tensor) -> Collective:
        if tensor.device.type == "cpu":
            return self._mesh
        if self._accelerators is None:
            self._accelerators = self._do(self._connect_accelerators)
        return self._accelerators

    def _do(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        try:
            return function(*args, **kwargs)
        except CollectiveError as error:
            raise self._final_error(error) from None
