"""How a task joins the parameter servers: finds them, is taken in, and agrees with all on the variables."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from stratagem.cluster.membership.compatibility import Introduction
from stratagem.errors import ClusterJoinError, ClusterTimeoutError, ParameterError, ParameterServerLostError
from stratagem.parameters.network import tensor_streams
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.client.client_thread import Talk, raise_first
from stratagem.parameters.network.client.connection import Connection, PendingReply, RetryError
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.protocol import ShardPlan

_RETRY_S: Final = 0.05


def open_all(talk: Talk, connections: Sequence[Connection], timeout_s: float) -> None:
    """Connects with all servers, and begins to talk with them.

    Args:
        talk: The way to them.
        connections: To each of them.
        timeout_s: How long to wait for all.
    Raises:
        ClusterJoinError: One has not come in time.
        HandshakeError: Who answers at the address of a server is none, or has another token.
    """
    deadline = time.monotonic() + timeout_s
    present: list[str] = []
    for connection in connections:  # first, since who is connected must give signs of life
        connection.await_listener(deadline, timeout_s, present)
        present.append(connection.task.name)
    for connection in connections:
        connection.open(talk.context)
    talk.start()


def introduce(talk: Talk, connections: Sequence[Connection], introduction: Introduction, deadline: float) -> None:
    """Has all servers take this task in; waits while one believes that an earlier life of it is still there.

    Raises:
        ClusterJoinError: One does not.
        ParameterServerLostError: One is gone.
    """
    _repeated(
        talk,
        range(len(connections)),
        lambda _: PendingReply(FrameKind.ATTACH, introduction.to_body()),
        deadline,
        lambda shard, error: ClusterJoinError(f"{connections[shard].task} refuses {introduction.task}: {error}"),
    )


def define(
    talk: Talk,
    names: Sequence[str],
    body: Body,
    plan: ShardPlan,
    values: Mapping[str, torch.Tensor] | None,
    timeout_s: float,
) -> tuple[dict[int, Body], bool]:
    """Agrees with all servers on the variables.

    Args:
        talk: The way to the servers.
        names: What they are called.
        body: What all are told.
        plan: Which part of which variable lies where.
        values: The first values, whole, from the chief; others wait for it.
        timeout_s: How long to wait for the chief.
    Returns:
        What each has answered, and whether the values were needed: the servers may have some from before.
    Raises:
        ParameterError: Another task has other variables.
        ParameterServerLostError: Some servers have been started anew, others have not.
        ClusterTimeoutError: The chief has not defined them in time.
    """

    def request(shard: int, whole: Mapping[str, torch.Tensor] | None = None) -> PendingReply:
        own = [] if whole is None else [piece.of(whole[piece.name]) for piece in plan.shards[shard]]
        said = {**body, "shard": shard, "has_values": whole is not None}
        return PendingReply(FrameKind.DEFINE, said, list(map(tensor_streams.readable, own)))

    def no_chief(shard: int, error: Exception) -> Exception:
        if isinstance(error, ParameterError):
            return error
        return ClusterTimeoutError(
            f"the chief has not defined the variables of {names[shard]} within {timeout_s:g} s; check that it runs, or "
            f"raise join_timeout_s"
        )

    shards = range(len(names))
    if values is None:
        return _repeated(talk, shards, request, time.monotonic() + timeout_s, no_chief), False
    known = _answered(talk, {shard: request(shard) for shard in shards})
    if not known:
        return _answered(talk, {shard: request(shard, values) for shard in shards}), True
    if new := [name for shard, name in enumerate(names) if shard not in known]:
        old = ", ".join(names[shard] for shard in known)
        raise ParameterServerLostError(
            f"{', '.join(new)} has been restarted, but {old} still has its trained values: together they are not one "
            f"state of the model. Start all tasks again, also the parameter servers: then all begin with the same "
            f"checkpoint"
        )
    return known, False


def _repeated(
    talk: Talk,
    shards: Sequence[int],
    request: Callable[[int], PendingReply],
    deadline: float,
    refused: Callable[[int, Exception], Exception],
) -> dict[int, Body]:
    """Asks again those that say that they may answer later."""
    answers: dict[int, Body] = {}
    while True:
        pendings = {shard: request(shard) for shard in shards if shard not in answers}
        talk.settle(pendings)
        is_late = time.monotonic() >= deadline
        for shard, pending in pendings.items():
            if isinstance(pending.error, ParameterError) or (isinstance(pending.error, RetryError) and is_late):
                raise refused(shard, pending.error)
            if pending.error is None:
                answers[shard] = pending.answer
            elif not isinstance(pending.error, RetryError):
                raise pending.error
        if len(answers) == len(shards):
            return answers
        time.sleep(_RETRY_S)


def _answered(talk: Talk, pendings: Mapping[int, PendingReply]) -> dict[int, Body]:
    """Asks once; the answers of those that have one."""
    talk.settle(pendings)
    raise_first(each for each in pendings.values() if not isinstance(each.error, RetryError))
    return {shard: each.answer for shard, each in pendings.items() if each.error is None}
