"""Fetches what all parameter servers have, of one moment, and gives them what was saved.

First all are asked to hold what comes, and say what they have applied; then for their states, once each has applied
what any of them had. So a push is in all of a checkpoint or in none of it, while workers go on.
"""

from typing import Final

from stratagem.errors import ClusterTimeoutError
from stratagem.parameters.network.client.client_thread import Talk, raise_first
from stratagem.parameters.network.client.connection import PendingReply, RetryError
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.shard_states import StateOfAll
from stratagem.parameters.protocol import ShardPlan

_NUM_TRIES: Final = 3


def fetch(talk: Talk, plan: ShardPlan, num_optimizers: int) -> StateOfAll:
    """Everything that the servers have.

    Args:
        talk: The way to them.
        plan: Which part of which variable lies where.
        num_optimizers: How many optimizers they apply.
    Raises:
        ParameterServerLostError: A server is gone.
        ClusterTimeoutError: Pushes come to one server long after the others.
    """
    shards = range(len(plan.shards))
    for _ in range(_NUM_TRIES):
        held = {shard: PendingReply(FrameKind.HOLD, {}) for shard in shards}
        talk.finish(held)
        up_to: dict[str, int] = {}
        for pending in held.values():
            for worker, number in pending.answer["lives"].items():
                up_to[worker] = max(number, up_to.get(worker, 0))
        asked = {
            shard: PendingReply(FrameKind.STATE, {"up_to": up_to}, (), StateOfAll.rooms(plan, shard))
            for shard in shards
        }
        talk.settle(asked)
        if not any(isinstance(each.error, RetryError) for each in asked.values()):
            break
    for each in asked.values():
        if isinstance(each.error, RetryError):
            raise ClusterTimeoutError(
                f"the states of all parameter servers at one moment could not be read in {_NUM_TRIES} tries: "
                f"{each.error}"
            )
    raise_first(asked.values())
    return StateOfAll.joined(plan, num_optimizers, [(each.answer, each.received) for each in asked.values()])


def give(talk: Talk, plan: ShardPlan, num_optimizers: int, state: StateOfAll) -> None:
    """Gives the servers what `fetch` gave, of whichever number of servers; nobody has pushed yet.

    Raises:
        ParameterError: The state is of other variables.
    """
    parts = state.divided(plan, num_optimizers)
    talk.finish({shard: PendingReply(FrameKind.LOAD, body, tensors) for shard, (body, tensors) in enumerate(parts)})
