"""Keeps the table of who takes part, on the first task of a cluster, and tells all when one is lost.

Owns who is let in, who is declared lost, and that nobody who was comes back. Everything here runs in
the thread of the server. How the others do their part is in `follower`.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from stratagem.cluster.channel import Channel, ClosedError
from stratagem.cluster.liveness import Pulse, Rhythm, keep_looking
from stratagem.cluster.membership.compatibility import Introduction, disagreement
from stratagem.cluster.membership.member_messages import Body, MessageKind, shortened
from stratagem.cluster.membership.members import Member, TaskLost, missing_text, why_closed
from stratagem.cluster.membership.shared_values import Reply, ValueRequest, Values
from stratagem.cluster.spec import Task
from stratagem.errors import ClusterJoinError, ProtocolError

_MOST_REQUESTS: Final = 1024
_LOOK_S: Final = 0.02
_PATIENCE_S: Final = 1.0


@dataclasses.dataclass(eq=False)
class _Joined:
    """A task that the keeper has let in."""

    member: Member
    incarnation: str
    channel: Channel
    pulse: Pulse
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    is_lost: bool = False
    has_left: bool = False
    requests: set["asyncio.Task[None]"] = dataclasses.field(default_factory=set)

    def send(self, kind: MessageKind, body: Body | None = None) -> None:
        """Sends, if it can; that it cannot is noticed by whoever reads."""
        try:
            self.channel.send(kind, body)
        except ClosedError:
            self.channel.abort()


@final
class Keeper:
    """The side of the first task.

    Args:
        own: What this task says of itself.
        participants: All tasks that are to come, this one first.
        rhythm: Of signs of life.
        on_lost: Is told of each task that is lost.
    """

    def __init__(
        self,
        own: Introduction,
        participants: Sequence[Task],
        rhythm: Rhythm,
        on_lost: Callable[[TaskLost], None],
    ) -> None:
        self._own = own
        self._expected = {task.name: task for task in participants}
        self._rhythm = rhythm
        self._on_lost = on_lost
        self._joined: dict[str, _Joined] = {}
        self._fenced: dict[str, TaskLost] = {}
        self._is_ready = self._is_over = False
        self._gathered: asyncio.Future[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._values = Values()
        address = participants[0].address
        self.own_host = "" if address is None else address.host

    @property
    def present(self) -> list[str]:
        """Who has come so far."""
        return [member.task for member in self.members]

    @property
    def members(self) -> list[Member]:
        """Who takes part now, in the order of the cluster."""
        everyone = {name: joined.member for name, joined in self._joined.items()} | {self._own.task: self._self()}
        return [everyone[name] for name in self._expected if name in everyone]

    async def join(self, timeout_s: float) -> None:
        """Waits until all have come.

        Raises:
            ClusterJoinError: Somebody has not come in time, or does not fit.
        """
        self._gathered = asyncio.get_running_loop().create_future()
        self._looking = asyncio.create_task(keep_looking(self._rhythm, self._beat, self._look))
        self._announce()
        try:
            async with asyncio.timeout(timeout_s):
                await self._gathered
        except TimeoutError:
            here = [member.task for member in self.members]
            why = missing_text(self._expected.values(), here, timeout_s)
            self._call_off(why)
            await self._until_all_have_gone()
            raise ClusterJoinError(why) from None
        except ClusterJoinError:
            await self._until_all_have_gone()
            raise

    async def serve(self, channel: Channel, body: Body) -> None:
        """One task that wants to join, until its connection ends."""
        who = Introduction.from_body(body)
        refusal = self._why_refused(who, channel)
        if refusal is not None:
            why, retry = refusal
            channel.send(MessageKind.REFUSED, {"why": shortened(why), "retry": retry})
            return
        task = self._expected[who.task]
        address = channel.peer_host if task.address is None else str(task.address)
        member = Member(who.task, address, who.machine, who.pid)
        joined = _Joined(member, who.incarnation, channel, Pulse(self._rhythm))
        self._joined[who.task] = joined
        self.own_host = channel.own_host
        self._announce()
        try:
            why = await self._listen(joined)
        except ClosedError as error:
            why = why_closed(error)
        except ProtocolError as error:
            why = f"it broke the rules for messages: {error}"
        finally:
            joined.ended.set()
            for request in list(joined.requests):
                request.cancel()
        self._gone(joined, why)

    async def request(self, request: ValueRequest) -> Reply:
        """What this task itself wants of the store."""
        return await self._values.answer(request)

    async def leave(self, linger_s: float) -> None:
        """Takes leave of all, after giving them time to take theirs: the store is here."""
        deadline = time.monotonic() + linger_s
        while self._joined and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        await self._end(MessageKind.LEFT, {"task": self._own.task})

    async def fail(self, why: str) -> None:
        """Tells all that this task has failed."""
        await self._end(MessageKind.LOST, TaskLost(self._self(), shortened(why)).to_body())

    def _self(self) -> Member:
        return Member(self._own.task, str(self._expected[self._own.task].address), self._own.machine, self._own.pid)

    def _why_refused(self, who: Introduction, channel: Channel) -> tuple[str, bool] | None:
        """Why a task is not let in, and whether it may try again."""
        if who.incarnation in self._fenced:
            return f"it was declared lost: {self._fenced[who.incarnation].why}", False
        taken = self._self() if who.task == self._own.task else None
        if who.task in self._joined:
            taken = self._joined[who.task].member
        if taken is not None and not self._is_over:
            return (
                f"{who.task} has come already: pid {taken.pid} on {taken.machine} ({taken.address}); this one is pid "
                f"{who.pid} on {who.machine} ({channel.peer_host}). Start each task once, with its own index",
                False,
            )
        if self._is_over or self._fenced:
            return "the cluster is shutting down", True
        why = disagreement(who, self._own)
        if why is None and who.task not in self._expected:
            why = f"{who.task} does not take part; {', '.join(self._expected)} do"
        if why is not None:
            if not self._is_ready:
                self._call_off(why)
            return why, False
        if self._is_ready:
            return f"the cluster is complete without {who.task}, which has left it", True
        return None

    def _announce(self) -> None:
        """Tells those who wait who has come; once all have, that it can begin."""
        if self._is_ready or self._is_over:
            return
        here = self.members
        if len(here) < len(self._expected):
            self._tell_all(MessageKind.HERE, {"tasks": [member.task for member in here]})
        elif self._gathered is not None and not self._gathered.done():
            self._is_ready = True
            self._tell_all(
                MessageKind.READY,
                {
                    "members": [member.to_body() for member in here],
                    **dataclasses.asdict(self._rhythm),
                },
            )
            self._gathered.set_result(None)

    def _call_off(self, why: str) -> None:
        """Tells all who wait that nothing comes of it, and why."""
        self._is_over = True
        if self._looking is not None:
            self._looking.cancel()
        self._tell_all(MessageKind.REFUSED, {"why": shortened(why), "retry": False})
        if self._gathered is not None and not self._gathered.done():
            self._gathered.set_exception(ClusterJoinError(why))

    async def _listen(self, joined: _Joined) -> str:
        """Reads what a task sends; returns why it has ended."""
        while True:
            kind, body = await joined.channel.receive()
            if joined.is_lost:
                joined.send(MessageKind.FENCED, {"why": self._fenced[joined.incarnation].why})
                continue
            joined.pulse.heard()
            if kind == MessageKind.REQUEST:
                if len(joined.requests) >= _MOST_REQUESTS:
                    raise ProtocolError(f"more than {_MOST_REQUESTS} requests at once")
                request = asyncio.create_task(self._answer(joined, body["id"], ValueRequest.from_body(body)))
                joined.requests.add(request)
                request.add_done_callback(joined.requests.discard)
            elif kind == MessageKind.LEAVE:
                joined.has_left = True
                joined.send(MessageKind.LEFT, {"task": joined.member.task})
                return ""
            elif kind == MessageKind.FAIL:
                return str(body["why"])
            elif kind != MessageKind.BEAT:
                raise ProtocolError(f"a task that has joined does not send {kind.name}")

    async def _answer(self, joined: _Joined, number: int, request: ValueRequest) -> None:
        joined.send(MessageKind.REPLY, (await self._values.answer(request)).to_body(number))

    def _gone(self, joined: _Joined, why: str) -> None:
        if self._is_over or joined.is_lost or self._joined.get(joined.member.task) is not joined:
            return
        del self._joined[joined.member.task]
        if not self._is_ready:
            self._announce()  # it may come again
        elif joined.has_left:
            self._tell_all(MessageKind.LEFT, {"task": joined.member.task})
        else:
            self._lose(joined, why)

    def _lose(self, joined: _Joined, why: str) -> None:
        """Declares a task lost, for good: it is told so if it can be reached, now or later."""
        lost = TaskLost(joined.member, why)
        joined.is_lost = True
        self._fenced[joined.incarnation] = lost
        self._tell_all(MessageKind.LOST, lost.to_body())
        joined.send(MessageKind.FENCED, {"why": why})
        self._values.give_up()
        self._on_lost(lost)

    def _beat(self) -> None:
        self._tell_all(MessageKind.BEAT)

    def _look(self) -> None:
        for joined in list(self._joined.values()):
            why = joined.pulse.why_lost(joined.channel.unconfirmed_s)
            if not why:
                continue
            del self._joined[joined.member.task]
            if self._is_ready:
                self._lose(joined, why)
            else:
                joined.channel.abort()
                self._announce()

    def _tell_all(self, kind: MessageKind, body: Body | None = None) -> None:
        for joined in list(self._joined.values()):
            joined.send(kind, body)

    async def _end(self, kind: MessageKind, body: Body) -> None:
        self._is_over = True
        if self._looking is not None:
            self._looking.cancel()
        self._tell_all(kind, body)
        await self._until_all_have_gone()

    async def _until_all_have_gone(self) -> None:
        """Gives those who were told of the end a moment to hang up; did this side, they might never read it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                for joined in list(self._joined.values()):
                    await joined.ended.wait()
