"""What a client asks of a shard, once all of it has come; and how shards call tasks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import final

import torch

from stratagem.cluster.spec import CHIEF, MASTER, TRAINING, ClusterSpec
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.same_host_memory import Nearby

Tensors = Sequence[torch.Tensor]


@final
@dataclasses.dataclass(frozen=True)
class ClientRequest:
    """Something that a client asks for.

    Args:
        worker: Who asks, by number.
        kind: What is asked for.
        body: The details.
        tensors: What came with it, in the order of `Desk.expected`.
        answer: Is called with what to send, in the thread of the desk.
        nearby: Memory that its worker shares, if its tensors are there.
    """

    worker: int
    kind: FrameKind
    body: Body
    tensors: Tensors
    answer: Callable[[FrameKind, Body, Tensors], None]
    nearby: Nearby | None = None


def chief_of(spec: ClusterSpec) -> str:
    """The task that makes the variables and saves them: the chief, or the first worker."""
    return next(task.name for task in spec.tasks if task.job in TRAINING)


def number_of(task: str) -> int:
    """The number by which a shard knows a training task."""
    job, _, index = task.rpartition("/")
    return 0 if job in (CHIEF, MASTER) else int(index) + 1


def name_of(worker: int) -> str:
    """What the task with a number is called."""
    return f"worker/{worker - 1}" if worker else "the chief"
