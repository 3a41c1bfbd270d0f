"""Lets a task that trains use the variables of all parameter servers: push, pull and wait.

Owns the thread that talks to the servers, how variables are put together from pieces, and what is said
when a server is gone. One connection to each server is `connection`'s.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, final

import torch

from stratagem._caller import warn_caller
from stratagem.cluster import token as tokens
from stratagem.cluster.liveness import Pulse, Rhythm, chosen_timeout_s
from stratagem.cluster.membership.compatibility import Introduction
from stratagem.cluster.spec import PS, ClusterLike, ClusterSpec
from stratagem.errors import (
    ClusterError,
    ClusterSpecError,
    ParameterError,
    ParameterServerLostError,
    ProtocolError,
    StratagemWarning,
    TaskLostError,
)
from stratagem.parameters.network import bodies, tensor_streams
from stratagem.parameters.network import pieces as pieces_of
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.client import checkpoint_barrier, server_discovery
from stratagem.parameters.network.client.client_thread import Talk, raise_first
from stratagem.parameters.network.client.connection import Connection, EndedError, PendingReply, Tensors
from stratagem.parameters.network.compression import Compression, Encoder
from stratagem.parameters.network.frames import FrameKind
from stratagem.parameters.network.pieces import Parts
from stratagem.parameters.network.same_host_memory import SHARED, Nearby
from stratagem.parameters.network.server.pacing import Pacing
from stratagem.parameters.network.server.ps_server import HEARTBEAT_S, NUM_MISSED
from stratagem.parameters.network.shard_states import StateOfAll
from stratagem.parameters.protocol import OptimizerSpec, Plain, PushOutcome, ShardPlan, Verdict

_MOST_NAMED: Final = 3


@final
class Handle:
    """Something that was asked of all servers; `ParameterClient.wait` waits for it.

    Args:
        pendings: The request to each server that takes part, by its number.
        finish: Is called when all have answered.
    """

    def __init__(self, pendings: Mapping[int, PendingReply], finish: Callable[[], None]) -> None:
        self.pendings = pendings
        self.finish = finish
        self.outcomes: list[PushOutcome] | None = None


@final
class ParameterClient:
    """The variables of all parameter servers, for one task that trains.

    `push` and `pull` return at once; `wait` waits for what they gave. All of it may be used by one thread.

    Args:
        cluster: All tasks.
        job_name: The job of this task.
        task_index: Its index.
        token_file: Where the secret of the cluster is; by default `STRATAGEM_TOKEN_FILE`, or `~/.stratagem/token`.
        join_timeout_s: How long to wait for the servers, and for the chief to define the variables.
        heartbeat_s: After how long each sign of life follows the last.
        num_missed: After how many missed signs of life a server is lost whose machine does not answer either.
        heartbeat_timeout_s: After how long without any a server is lost whose machine answers; by default what
            `stratagem run --heartbeat-timeout` says, or 30 s.
        compression: How gradients are made smaller on the wire; by default they are not.
        shares_memory: Whether servers on this machine get and give tensors through memory.
        num_devices: How many devices this task drives; all that train have as many.
    Raises:
        ClusterSpecError: There is no such task, or there are no parameter servers.
        TokenError: The token file cannot be trusted.
    """

    def __init__(
        self,
        cluster: ClusterLike,
        job_name: str,
        task_index: int,
        *,
        token_file: str | os.PathLike[str] | None = None,
        join_timeout_s: float = 60.0,
        heartbeat_s: float = HEARTBEAT_S,
        num_missed: int = NUM_MISSED,
        heartbeat_timeout_s: float | None = None,
        compression: Compression | None = None,
        shares_memory: bool = True,
        num_devices: int = 1,
    ) -> None:
        self._num_devices = num_devices
        self.spec = ClusterSpec(cluster)
        self.task = self.spec.task(job_name, task_index)
        if PS not in self.spec.jobs:
            raise ClusterSpecError(f"the cluster has no job 'ps'; it has {', '.join(self.spec.jobs)}")
        rhythm = Rhythm(heartbeat_s, num_missed, chosen_timeout_s(heartbeat_timeout_s))
        self.join_timeout_s = join_timeout_s
        token = tokens.load(None if token_file is None else os.fspath(token_file))
        self._connections = [Connection(task, token, Pulse(rhythm)) for task in self.spec.tasks if task.job == PS]
        self._encoder = Encoder(compression)
        self._talk = Talk(self.task.name, self._connections, rhythm=rhythm, explained=self._explained)
        self._plan: ShardPlan | None = None
        self._num_optimizers = 0
        self._shares_memory = shares_memory
        self._nearby: dict[int, Nearby] = {}
        self._versions = [0] * len(self._connections)
        self._numbers = [0] * len(self._connections)
        self._clock = 0
        self._on_their_way: Handle | None = None

    @property
    def num_servers(self) -> int:
        """How many parameter servers there are."""
        return len(self._connections)

    def connect(self) -> Self:
        """Finds all servers and introduces this task.

        Raises:
            ClusterJoinError: A server has not come in time, or does not take this task in.
            HandshakeError: Who answers at the address of a server is none, or has another token.
        """
        jobs = self.spec.jobs
        introduction = Introduction.of_this_process(self.task, self.spec, jobs, {"devices": self._num_devices})
        deadline = time.monotonic() + self.join_timeout_s
        try:
            server_discovery.open_all(self._talk, self._connections, self.join_timeout_s)
            server_discovery.introduce(self._talk, self._connections, introduction, deadline)
        except BaseException:
            self._talk.close(is_done=False)
            raise
        return self

    def define(
        self,
        plan: ShardPlan,
        optimizers: Sequence[OptimizerSpec],
        values: Mapping[str, torch.Tensor] | None = None,
        *,
        state: StateOfAll | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        """Tells the servers which variables there are; all tasks do, and only one of them has the first values.

        What has been defined before stays as it is.

        Args:
            plan: Which part of which variable lies where.
            optimizers: How pushes are applied.
            values: The first values, whole, from the chief; others wait for it.
            state: What the servers have in place of them, from a checkpoint.
            pacing: How far workers may be apart; by default as far as they are.
        Raises:
            ParameterError: Another task has other variables.
            ParameterServerLostError: Some servers have been started anew, others have not.
            ClusterTimeoutError: The chief has not defined them in time.
        """
        body = {
            **bodies.plan_to_body(plan),
            "optimizers": [bodies.optimizer_to_body(each) for each in optimizers],
            "pacing": (pacing or Pacing()).to_body(),
            "is_open": state is None,
        }
        names = [connection.task.name for connection in self._connections]
        answers, is_new = server_discovery.define(self._talk, names, body, plan, values, self.join_timeout_s)
        self._plan, self._num_optimizers = plan, len(optimizers)
        self._clock = min(answer["clock"] for answer in answers.values())
        if others := next((answer["reason"] for answer in answers.values() if answer["reason"]), ""):
            own = len((pacing or Pacing()).members)
            warn_caller(
                f"{self.task.name} has a cluster of {own} training tasks, but the task that defined the variables "
                f"has one of {others}. Each task chooses its part of the data by that number, so some examples are "
                f"used twice or not at all. Give all tasks the same cluster",
                StratagemWarning,
            )
        if state is not None and is_new:
            checkpoint_barrier.give(self._talk, plan, self._num_optimizers, state)
        if self._shares_memory:
            self._share(plan)

    def pull(self, into: Mapping[str, torch.Tensor], rows: Mapping[str, torch.Tensor] | None = None) -> Handle:
        """Fetches variables; what comes from one server is of one version. Waits for values that are on their way.

        Args:
            into: Where whole variables go, by name.
            rows: Of which of them only some rows are fetched, and which: int64.
        """
        plan = self._defined()
        self._await_values()
        rows = rows or {}
        parts = Parts()
        pendings = {}
        for shard, pieces in enumerate(plan.shards):
            names = [piece.name for piece in pieces if piece.name in into and piece.name not in rows]
            chosen = {piece.name: pieces_of.rows_in(piece, rows[piece.name]) for piece in pieces if piece.name in rows}
            chosen = {name: indices for name, indices in chosen.items() if len(indices)}
            if rows and not names and not chosen:
                continue  # else each is asked, if only for its version
            by_name = {piece.name: piece for piece in pieces}
            rooms = [parts.room(by_name[name], into[name]) for name in names]
            rooms += [parts.room_for_rows(by_name[name], indices, into[name]) for name, indices in chosen.items()]
            body = {"names": names, "rows": [[name, len(indices)] for name, indices in chosen.items()]}
            pendings[shard] = PendingReply(FrameKind.PULL, body, list(chosen.values()), _always(rooms))
        self._on_their_way = self._ask(pendings, parts.put)
        return self._on_their_way

    def push(
        self,
        gradients: Mapping[str, torch.Tensor],
        *,
        optimizer: int = 0,
        weight: int = 1,
        options: Sequence[Mapping[str, Plain]] | None = None,
        assigned: Mapping[str, torch.Tensor] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Handle:
        """Has the servers apply gradients; each applies its part whole, once, or not at all.

        Args:
            gradients: By name, dense or sparse. They must stay as they are until this has been waited for.
            optimizer: Which of the defined optimizers applies them.
            weight: How many examples they are of, where several pushes make one update.
            options: What its groups have now.
            assigned: New values of variables that are not trained.
            into: Where the new values of all variables that are not sparse go, when values that are on their way
                have come; by default they are not fetched.
        Raises:
            ParameterError: A gradient is not like its variable.
        """
        plan = self._defined()
        parts = Parts()
        for name, value in [*gradients.items(), *(assigned or {}).items()]:
            pieces_of.require_fit(plan, name, value)
        if into is not None:
            self._await_values()
        prepared = {name: pieces_of.prepared(gradient) for name, gradient in gradients.items()}
        own = {name: tensor_streams.readable(value) for name, value in (assigned or {}).items()}
        pendings = {}
        for shard, pieces in enumerate(plan.shards):
            described: list[list[Any]] = []
            tensors: list[torch.Tensor] = []
            for piece in (each for each in pieces if each.name in prepared):
                count, encoding, sent = self._encoder.encode(piece, pieces_of.part(piece, prepared[piece.name]))
                described.append([piece.name, count, encoding])
                tensors += sent
            nearby = self._nearby.get(shard)
            if nearby is not None and (own or not nearby.has_room_for(described)):
                nearby = None
            names = [piece.name for piece in pieces if piece.name in own]
            tensors += [piece.of(own[piece.name]) for piece in pieces if piece.name in own]
            dense = [piece for piece in pieces if not piece.variable.sparse] if into is not None else []
            if nearby is not None:
                nearby.put(described, tensors)
                for piece in dense:
                    parts.take(piece, (into or {}).get(piece.name), nearby.values[piece.name])
                tensors, dense = [], []
            rooms = [parts.room(piece, (into or {}).get(piece.name)) for piece in dense]
            body = {
                "number": self._numbers[shard] + 1,
                "version": self._versions[shard],
                "clock": self._clock + 1,
                "optimizer": optimizer,
                "weight": weight,
                "options": None if options is None else list(map(bodies.options_to_body, options)),
                "gradients": described,
                "assigned": names,
                "then_pull": into is not None,
                "is_shared": nearby is not None,
            }
            pendings[shard] = PendingReply(FrameKind.PUSH, body, tensors, _always(rooms))
        self._clock += 1
        self._numbers = [number + 1 for number in self._numbers]
        handle = self._ask(pendings, parts.put)
        if into is not None:
            self._on_their_way = handle
        return handle

    def wait(self, handle: Handle) -> list[PushOutcome]:
        """Waits for a push or pull; returns what each server that took part made of it.

        Raises:
            ParameterServerLostError: A server is gone; says which variables went with it.
            TaskLostError: The servers have declared this task lost.
            ParameterError: A server refuses the request.
        """
        if handle.outcomes is not None:
            return handle.outcomes
        self._talk.wait(handle.pendings)
        if handle is self._on_their_way:
            self._on_their_way = None
        try:
            raise_first(handle.pendings.values())
            handle.finish()
        finally:
            for shard, pending in handle.pendings.items():
                is_read = pending.error is None or isinstance(pending.error, ParameterError)
                if pending.body.get("is_shared") and is_read:  # one that is lost may read it still
                    self._nearby[shard].is_used = False
        outcomes = handle.outcomes = []
        for shard, pending in handle.pendings.items():
            answer = pending.answer
            verdict = Verdict(answer["verdict"] or Verdict.APPLIED.value)
            outcomes.append(PushOutcome(verdict, answer["version"], answer["staleness"], answer["reason"]))
            if verdict not in (Verdict.APPLIED, Verdict.DUPLICATE, Verdict.STALE):
                self._numbers[shard] -= 1  # the server still waits for a push of this number
            # Some rows do not make the rest newer.
            if not pending.body["rows"] if pending.kind == FrameKind.PULL else pending.body["then_pull"]:
                self._versions[shard] = answer["version"]
        return outcomes

    def meet(self) -> None:
        """Waits until all tasks that train have come here; what they have pushed is applied.

        Raises:
            ParameterError: One of them does nothing and does not come.
        """
        self._await_values()
        asked = {shard: PendingReply(FrameKind.MEET, {}) for shard in range(len(self._defined().shards))}
        self._talk.finish(asked)
        self._clock = min(each.answer["clock"] for each in asked.values())

    def state(self) -> StateOfAll:
        """Everything that the servers have, of one moment: each push is in all of it, or in none."""
        return checkpoint_barrier.fetch(self._talk, self._defined(), self._num_optimizers)

    def close(self, *, is_done: bool = False) -> None:
        """Takes leave of the servers. A second time it does nothing.

        Args:
            is_done: Whether training is over; from the chief, the servers then end when all have left.
        """
        self._talk.close(is_done=is_done)
        self._nearby.clear()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ParameterClient of {self.task} with {self.num_servers} servers>"

    def _defined(self) -> ShardPlan:
        if self._plan is None:
            raise ClusterError("no variables are defined yet; call define() first")
        return self._plan

    def _await_values(self) -> None:
        """Newer values must not come before older ones."""
        if self._on_their_way is not None:
            self.wait(self._on_their_way)

    def _ask(self, pendings: Mapping[int, PendingReply], finish: Callable[[], None] = lambda: None) -> Handle:
        self._talk.ask(pendings)
        return Handle(pendings, finish)

    def _share(self, plan: ShardPlan) -> None:
        """Offers memory to all servers; those on this machine take it."""
        for shard, pieces in enumerate(plan.shards):
            with contextlib.ExitStack() as stack:
                made = Nearby.made(pieces, stack)
                if made is not None:
                    offer = PendingReply(FrameKind.SHARE, made[1])
                    self._talk.finish({shard: offer})
                    if offer.answer["verdict"] == SHARED:
                        self._nearby[shard] = made[0]

    def _explained(self, shard: int, error: Exception) -> Exception:
        connection = self._connections[shard]
        if isinstance(error, TaskLostError):
            return TaskLostError(f"{self.task.name}, {connection.task}: {error}")
        why = str(error) if isinstance(error, EndedError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ProtocolError):
            why = f"it broke the rules for messages: {error}"
        gone = "" if self._plan is None else f"; lost are {_named(self._plan, shard)}"
        return ParameterServerLostError(
            f"{connection.task.name} at {connection.place} is lost: {why}{gone}. Start all tasks again: "
            f"all servers come back from the same checkpoint"
        )


def _always(rooms: Tensors) -> Callable[[Body], Tensors]:
    return lambda _: rooms


def _named(plan: ShardPlan, shard: int) -> str:
    names = [piece.name for piece in plan.shards[shard]]
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return f"{len(names)} of {len(plan.variables)} parameters: {', '.join(names[:_MOST_NAMED])}{more}"
