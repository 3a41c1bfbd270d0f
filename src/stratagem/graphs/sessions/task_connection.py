"""The connection of a session to one task that runs parts of its graph.

Owns calls and their answers, signs of life, and that everybody who waits hears of a task that is gone. Everything
here runs in the thread of the session's sockets.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, final

import torch

from stratagem import _clock
from stratagem.cluster import channel as channels
from stratagem.cluster.address import Address
from stratagem.cluster.channel import Channel, ClosedError
from stratagem.cluster.liveness import Pulse, Rhythm, chosen_timeout_s, keep_looking
from stratagem.cluster.membership.member_messages import MOST_BYTES, Body, MessageKind
from stratagem.cluster.token import Token
from stratagem.devices.memory import OutOfMemoryError
from stratagem.errors import DeviceNotFoundError, ProtocolError, SessionError, TaskLostError
from stratagem.graphs.sessions import sent_tensors

HEARTBEAT_S: Final = 1.0
NUM_MISSED: Final = 4
_CONNECT_S: Final = 10.0
_OPENING_S: Final = 60.0
_ERRORS: Final = {each.__name__: each for each in (OutOfMemoryError, DeviceNotFoundError, SessionError)}


async def send_pieces(channel: Channel, data: memoryview, noted: Callable[[], None]) -> None:
    """Sends bytes; each piece that the other side has room for is a sign of life, and is noted."""
    for start in range(0, len(data), MOST_BYTES):
        await channel.send_bytes(data[start : start + MOST_BYTES])
        noted()


async def receive_pieces(channel: Channel, into: memoryview, noted: Callable[[], None]) -> None:
    """The same for bytes that come.

    Raises:
        TimeoutError: The other side has stopped in the middle.
    """
    for start in range(0, len(into), MOST_BYTES):
        async with _clock.timeout(chosen_timeout_s()):
            await channel.receive_bytes(into[start : start + MOST_BYTES])
        noted()


@final
@dataclasses.dataclass(frozen=True)
class _TaskCall:
    """A call that waits for its answer, and where the tensors of the answer go."""

    answer: "asyncio.Future[Body]"
    expected: Sequence[torch.Tensor]


@final
class TaskConnection:
    """One task, from the side of a session.

    Args:
        name: What the task is called in messages.
        channel: The connection.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self._channel = channel
        self._sending = asyncio.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, _TaskCall] = {}
        self._gone: str | None = None
        self._rhythm = Rhythm(HEARTBEAT_S, NUM_MISSED, chosen_timeout_s())
        self._pulse = Pulse(Rhythm(HEARTBEAT_S, NUM_MISSED, max(_OPENING_S, self._rhythm.timeout_s)))
        self._listening = asyncio.create_task(self._listen())
        self._watching = asyncio.create_task(self._keep_alive())

    @classmethod
    async def connect(cls, name: str, address: Address, token: Token) -> Self:
        """Reaches a task.

        Raises:
            TaskLostError: Nobody is there.
            HandshakeError: Somebody else is there.
        """
        try:
            async with asyncio.timeout(_CONNECT_S):
                channel = await channels.connect(address.host, address.port, token)
        except OSError as error:
            why = error.strerror or str(error) or "it does not answer"
            raise TaskLostError(
                f"{name} at {address} cannot be reached: {why}. Start it with sg.Server, then make a new session"
            ) from None
        return cls(name, channel)

    async def open(self, options: Body) -> Body:
        """Opens the session in the task; the first one may have to wait until torch is loaded there."""
        about = await self.call("open", options)
        self._pulse = Pulse(self._rhythm)
        return about

    async def call(
        self, call: str, about: Body, tensors: Sequence[torch.Tensor] = (), *, expected: Sequence[torch.Tensor] = ()
    ) -> Body:
        """Asks the task for something.

        Args:
            call: For what.
            about: Of what.
            tensors: What goes with it.
            expected: What comes back is written into these.

        Raises:
            TaskLostError: The task is gone.
            SessionError: It could not do it.
        """
        return await self.call_with_bytes(
            call, about, [sent_tensors.bytes_of(each) for each in tensors], expected=expected
        )

    async def call_with_bytes(
        self, call: str, about: Body, pieces: Sequence[memoryview], *, expected: Sequence[torch.Tensor] = ()
    ) -> Body:
        """The same with bytes."""
        if self._gone is not None:
            raise TaskLostError(self._gone)
        number = next(self._numbers)
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._calls[number] = _TaskCall(answer, expected)
        try:
            async with self._sending:
                sizes = [len(each) for each in pieces]
                self._channel.send(MessageKind.CALL, {"id": number, "call": call, "about": about, "sizes": sizes})
                for piece in pieces:
                    await send_pieces(self._channel, piece, self._note_life)
            reply = await answer
        except ClosedError as error:
            self._lose(str(error))
            raise TaskLostError(self._gone or "") from None
        finally:
            self._calls.pop(number, None)
        if reply["error"]:
            raise _ERRORS.get(reply["error"], SessionError)(reply["message"])
        about_reply: Body = reply["about"]
        return about_reply

    async def close(self) -> None:
        """Ends the connection."""
        self._lose("the session was closed", by_task=False)
        self._listening.cancel()
        await asyncio.gather(self._listening, self._watching, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                kind, body = await self._channel.receive()
                self._note_life()
                if kind == MessageKind.RETURN:
                    await self._take(body)
                elif kind == MessageKind.REFUSED:
                    raise ProtocolError(body["why"])
                elif kind != MessageKind.BEAT:
                    raise ProtocolError(f"{kind.name} came in the middle of a session")
        except (ClosedError, ProtocolError, TimeoutError) as error:
            self._lose(str(error) or "it has stopped in the middle of an answer")

    async def _take(self, reply: Body) -> None:
        call = self._calls.get(reply["id"])
        if call is None:
            raise ProtocolError("an answer came that nobody waits for")
        sizes = [] if reply["error"] else [each.nbytes for each in call.expected]
        if sizes != reply["sizes"]:
            raise ProtocolError("an answer has tensors of other sizes than are expected")
        for each in call.expected if sizes else ():
            await receive_pieces(self._channel, sent_tensors.bytes_of(each), self._note_life)
        if not call.answer.done():
            call.answer.set_result(reply)

    def _note_life(self) -> None:
        self._pulse.heard()

    async def _keep_alive(self) -> None:
        """A task that stops or is cut off closes no connection: it falls silent."""
        await asyncio.sleep(self._rhythm.beat_s)  # what comes first is a call
        await keep_looking(self._rhythm, self._beat, self._look)

    def _beat(self) -> None:
        if not self._sending.locked():  # while tensors are on their way, they are the sign
            with contextlib.suppress(ClosedError):
                self._channel.send(MessageKind.BEAT)

    def _look(self) -> None:
        if self._gone is None and (why := self._pulse.why_lost(self._channel.unconfirmed_s)):
            self._lose(why)

    def _lose(self, why: str, *, by_task: bool = True) -> None:
        if self._gone is None:
            self._gone = f"{self.name} is gone: {why}" if by_task else why
        self._channel.abort()
        self._watching.cancel()
        error: Any = TaskLostError(self._gone) if by_task else SessionError(self._gone)
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)
