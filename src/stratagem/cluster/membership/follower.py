"""Joins a task to the keeper of its cluster, and notices if the keeper or another task is lost.

Owns the one connection to the keeper. Everything here runs in the thread of the task's sockets. What the
keeper does with it is in `keeper`.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final, final

from stratagem.cluster import channel as channels
from stratagem.cluster.address import Address
from stratagem.cluster.channel import Channel, ClosedError, SilentError
from stratagem.cluster.liveness import Pulse, Rhythm, keep_looking
from stratagem.cluster.membership.compatibility import Introduction
from stratagem.cluster.membership.member_messages import Body, MessageKind, shortened
from stratagem.cluster.membership.members import Member, TaskLost, missing_text, why_closed
from stratagem.cluster.membership.shared_values import Reply, ValueRequest
from stratagem.cluster.spec import Task
from stratagem.cluster.token import Token
from stratagem.errors import ClusterJoinError, ProtocolError, TaskLostError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_SILENT_TRIES: Final = 2
_PATIENCE_S: Final = 1.0


@final
class Follower:
    """The side of every task but the first.

    Args:
        own: What this task says of itself.
        participants: All tasks that are to come, the keeper first.
        address: Where the keeper listens.
        token: The secret of the cluster.
        rhythm: Of signs of life, until the keeper says.
        on_lost: Is told of each task that is lost.
    """

    def __init__(
        self,
        own: Introduction,
        participants: Sequence[Task],
        address: Address,
        token: Token,
        rhythm: Rhythm,
        on_lost: Callable[[TaskLost], None],
    ) -> None:
        self._own = own
        self._participants = participants
        self._address = address
        self._token = token
        self._rhythm = rhythm
        self._on_lost = on_lost
        self._pulse = Pulse(rhythm)
        self._channel: Channel | None = None
        self._present: list[str] = [own.task]
        self._keeper_is_gone: str | None = None
        self._is_leaving = self._is_fenced = self._has_ended = False
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._came: list[Member] = []
        self._gone: set[str] = set()

    @property
    def members(self) -> list[Member]:
        """Who takes part now, in the order of the cluster."""
        return [member for member in self._came if member.task not in self._gone]

    @property
    def present(self) -> list[str]:
        """Who has come so far, as far as this task knows."""
        return list(self._present)

    @property
    def own_host(self) -> str:
        """The address of this machine with which it reaches the keeper."""
        return "" if self._channel is None else self._channel.own_host

    async def join(self, timeout_s: float) -> None:
        """Connects to the keeper, again and again while it is not there, and waits until all have come.

        Raises:
            ClusterJoinError: Somebody has not come in time, or this task was not let in.
            HandshakeError: Who answers is no task of this cluster.
        """
        reason, pause_s, num_silent = "", _FIRST_PAUSE_S, 0
        try:
            async with asyncio.timeout(timeout_s) as limit:
                first_limit = limit.when()
                while True:
                    try:
                        channel = await channels.connect(self._address.host, self._address.port, self._token)
                        reason = await self._ask(channel, limit, timeout_s)
                        if not reason:
                            return
                        limit.reschedule(first_limit)
                    except SilentError as error:
                        num_silent += 1
                        if num_silent == _SILENT_TRIES:
                            raise
                        reason = str(error)
                    except OSError as error:
                        reason = f"last try: {_reason(error)}"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError:
            raise ClusterJoinError(missing_text(self._participants, self._present, timeout_s, reason)) from None

    async def request(self, request: ValueRequest) -> Reply:
        """Asks the store of the keeper.

        Raises:
            TaskLostError: The keeper is gone.
        """
        if self._channel is None or self._keeper_is_gone is not None:
            raise TaskLostError(self._keeper_is_gone or "this task has not joined the cluster")
        number = next(self._numbers)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._channel.send(MessageKind.REQUEST, request.to_body(number))
            return await answer
        except ClosedError as error:
            raise TaskLostError(f"{self._participants[0]}, which keeps the store, is gone: {error}") from None
        finally:
            del self._waiting[number]

    async def leave(self, linger_s: float) -> None:
        """Takes leave of the keeper, and waits a moment for its answer. Nobody needs this task to linger."""
        await self._end(MessageKind.LEAVE, {})

    async def fail(self, why: str) -> None:
        """Tells the keeper, and so all, that this task has failed."""
        await self._end(MessageKind.FAIL, {"why": shortened(why)})

    async def _ask(self, channel: Channel, limit: asyncio.Timeout, timeout_s: float) -> str:
        """Waits for the keeper to take this task in; returns why it should try again, or nothing."""
        self._channel, has_come = channel, False
        looking: asyncio.Task[None] | None = None
        try:
            channel.send(MessageKind.JOIN, self._own.to_body())
            looking = asyncio.create_task(keep_looking(self._rhythm, self._beat, lambda: None))
            while True:
                kind, body = await channel.receive()
                if kind == MessageKind.HERE:
                    self._present = [*dict.fromkeys([*body["tasks"], self._own.task])]
                    if not has_come:
                        # From now on the keeper knows best how long to wait; who gives up before it is missed by all.
                        has_come = True
                        limit.reschedule(asyncio.get_running_loop().time() + timeout_s + _PATIENCE_S)
                elif kind == MessageKind.READY:
                    self._begin(body, channel)
                    return ""
                elif kind == MessageKind.REFUSED and not body["retry"]:
                    raise ClusterJoinError(body["why"])
                elif kind != MessageKind.BEAT:
                    why = f"says: {body['why']}" if kind == MessageKind.REFUSED else "has ended"
                    break
        except ClosedError as error:
            why = f"was there, then {error}"
        finally:
            if looking is not None:
                looking.cancel()
            if not self._came:
                channel.abort()
        self._present = [self._own.task]
        return f"{self._participants[0].name} {why}"

    def _begin(self, body: Body, channel: Channel) -> None:
        self._came = [Member(**each) for each in body["members"]]
        self._rhythm = Rhythm(body["heartbeat_s"], body["num_missed"], body["timeout_s"])
        self._pulse = Pulse(self._rhythm)
        self._tasks = [
            asyncio.create_task(self._read(channel)),
            asyncio.create_task(keep_looking(self._rhythm, self._beat, self._look)),
        ]

    async def _read(self, channel: Channel) -> None:
        try:
            while not self._has_ended:
                kind, body = await channel.receive()
                self._pulse.heard()
                self._take(kind, body)
        except ClosedError as error:
            self._lose_keeper(why_closed(error))
        except ProtocolError as error:
            self._lose_keeper(f"it broke the rules for messages: {error}")
        channel.abort()

    def _take(self, kind: MessageKind, body: Body) -> None:
        keeper = self._came[0]
        if kind == MessageKind.REPLY:
            answer = self._waiting.get(body["id"])
            if answer is not None and not answer.done():
                answer.set_result(Reply.from_body(body))
        elif kind == MessageKind.LOST:
            lost = TaskLost.from_body(body)
            self._gone.add(lost.member.task)
            if lost.member.task == keeper.task:
                self._has_ended = True
                self._lose_keeper(lost.why)
            else:
                self._on_lost(lost)
        elif kind == MessageKind.FENCED:
            self._fence(f"{keeper.task} had declared this task lost: {body['why']}")
        elif kind == MessageKind.LEFT:
            self._gone.add(body["task"])
            if body["task"] == keeper.task:
                self._has_ended = True
                self._give_up(f"{keeper}, which keeps the store, has left the cluster")
        elif kind != MessageKind.BEAT:
            raise ProtocolError(f"the keeper does not send {kind.name}")

    def _beat(self) -> None:
        self._send(MessageKind.BEAT)

    def _look(self) -> None:
        if self._keeper_is_gone is None and self._channel is not None:
            why = self._pulse.why_lost(self._channel.unconfirmed_s)
            if not why:
                return
            self._send(MessageKind.FAIL, {"why": f"it lost contact with {self._came[0].task}: {why}"})
            self._lose_keeper(why)

    def _send(self, kind: MessageKind, body: Body | None = None) -> None:
        """Sends, unless the keeper is gone; that it is gone is noticed by whoever reads."""
        if self._channel is not None and self._keeper_is_gone is None:
            try:
                self._channel.send(kind, body)
            except ClosedError:
                self._channel.abort()

    def _lose_keeper(self, why: str) -> None:
        if self._keeper_is_gone is None and not self._is_leaving:
            lost = TaskLost(self._came[0], why)
            self._gone.add(lost.member.task)
            self._give_up(str(lost))
            self._on_lost(lost)

    def _fence(self, why: str) -> None:
        """The others go on without this task, or not at all; it says nothing more to them."""
        if not self._is_fenced and not self._is_leaving:
            self._is_fenced = True
            self._give_up(why)
            self._on_lost(TaskLost(next(member for member in self._came if member.task == self._own.task), why))

    def _give_up(self, why: str) -> None:
        """The keeper is gone: what was asked of it is not answered any more."""
        self._keeper_is_gone = why
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(TaskLostError(why))

    async def _end(self, kind: MessageKind, body: Body) -> None:
        if self._channel is None:
            return
        self._send(kind, body)
        self._is_leaving = True
        if self._tasks and self._keeper_is_gone is None:
            await asyncio.wait(self._tasks[:1], timeout=_PATIENCE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # one of them may be reading
        self._give_up("this task has left the cluster")
        await self._channel.close()


def _reason(error: OSError) -> str:
    """Why it was not reached, in few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)
