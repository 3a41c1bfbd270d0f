"""A ps or worker task in a process of its own, which does what it is told line by line."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stratagem.parameters.network import tensor_streams
from stratagem.parameters.network.client import connection
from stratagem.parameters.network.client.parameter_client import ParameterClient
from stratagem.parameters.network.server.ps_server import ParameterServer
from tests.cluster import task_program
from tests.parameters.network.cluster import PATIENCE_S, Trainer

trainer: Trainer | None = None
server: ParameterServer | None = None


def serve(spec: Any, index: int, **options: Any) -> str:
    """Makes this process a ps task."""
    global server  # noqa: PLW0603
    server = ParameterServer(spec, index, **options).start()
    threading.Thread(target=server.serve, daemon=True).start()
    return "serving"


def train(spec: Any, index: int, **options: Any) -> str:
    """Makes this process a worker."""
    global trainer  # noqa: PLW0603
    options = {"join_timeout_s": PATIENCE_S, "shares_memory": False, **options}
    client = ParameterClient(spec, "worker", index, **options).connect()
    trainer = Trainer(client, len(spec["ps"]))
    trainer.define(has_values=index == 0)
    return "training"


def step(seed: int = 0) -> list[int]:
    """The versions of all servers after a step."""
    assert trainer is not None
    return [each.version for each in trainer.step(seed)]


def values() -> dict[str, list[float]]:
    assert trainer is not None
    trainer.pull()
    return {name: each.flatten().tolist() for name, each in trainer.copies().items()}


def die_after_half_a_push() -> None:
    """Pushes, and is killed when the first half of the gradients is on its way."""
    assert trainer is not None
    whole = tensor_streams.pieces

    def half(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, Any]]:
        for offset, piece in whole(tensors):
            yield offset, piece[: len(piece) // 2]
            # What was handed to ZeroMQ goes out in a thread of its own.
            connection.time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

    tensor_streams.pieces = half
    trainer.step(99)


if __name__ == "__main__":
    task_program.main(globals())
