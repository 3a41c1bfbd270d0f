"""Connects a client with one parameter server, and carries its requests there, one after the other.

Opened in the thread of the program; from then on everything happens in the thread of `client`. Owns the
handshake from the side that connects, and how the end of a server is noticed.
"""

import contextlib
import dataclasses
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hmac import compare_digest
from typing import Final, final

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from stratagem.cluster.liveness import Pulse, unconfirmed_by_descriptor_s
from stratagem.cluster.membership.members import missing_text
from stratagem.cluster.spec import Task
from stratagem.cluster.token import Token
from stratagem.errors import (
    ClusterJoinError,
    ClusterSpecError,
    HandshakeError,
    ParameterError,
    ProtocolError,
    TaskLostError,
)
from stratagem.parameters.network import bodies, encryption, frames, tensor_streams, zmq_sockets
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.encryption import FrameOpener, Handshake, Sealer
from stratagem.parameters.network.frames import Bytes, FrameKind, Greeting
from stratagem.parameters.network.tensor_streams import Inflow
from stratagem.parameters.network.zmq_password import take_key

_HANDSHAKE_S: Final = 5.0
_RETRY_S: Final = 0.1
_FRAMES_AT_ONCE: Final = 32
_REFUSED: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDED: Final = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | _REFUSED
)

Tensors = Sequence[torch.Tensor]


class EndedError(Exception):
    """The connection has ended; never shown to users as it is."""


class RetryError(Exception):
    """The server says that it may do later what it does not do now; never shown to users as it is."""


@final
@dataclasses.dataclass
class PendingReply:
    """A request to one server, until it is answered.

    Args:
        kind: What is asked for.
        body: The details.
        tensors: What is sent with it.
        rooms: Given the answer, memory for the tensors that follow it.
    """

    kind: FrameKind
    body: Body
    tensors: Tensors = ()
    rooms: Callable[[Body], Tensors] = lambda _: ()
    answer: Body = dataclasses.field(default_factory=dict)
    received: Tensors = ()
    error: Exception | None = None
    is_answered: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.encoded = bodies.encode(self.kind, self.body)  # here, where the caller hears what is wrong with it

    def fail(self, error: Exception) -> None:
        """It is not answered any more."""
        self.error = error
        self.is_answered.set()


@final
class Connection:
    """The way to one parameter server.

    Args:
        task: The server.
        token: The secret of the cluster.
        pulse: How long it may be silent.
    """

    def __init__(self, task: Task, token: Token, pulse: Pulse) -> None:
        if task.address is None:
            raise ClusterSpecError(f"{task.name} has no address, so other tasks cannot reach it; give it one")
        self.task = task
        self.place = str(task.address)
        self._host, self._port = task.address.host, task.address.port
        self._token = token
        self._pulse = pulse
        self._dealer: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._sealer: Sealer | None = None
        self._opener: FrameOpener | None = None
        self._waiting: deque[PendingReply] = deque()
        self._current: PendingReply | None = None
        self._inflow: Inflow | None = None
        self._outgoing: Iterator[tuple[FrameKind, Bytes, int]] | None = None
        self._unsent: memoryview | None = None
        self._number = 0
        self._heard_at = 0.0
        self._descriptor = -1

    # Opening, in the thread of the program

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Has both sides prove that they have the token.

        Raises:
            HandshakeError: Who listens there is no parameter server, or has another token.
        """
        dealer = self._dealer = zmq_sockets.connecting(context)
        take_key(dealer, self._token)
        self._monitor = dealer.get_monitor_socket(_ENDED)
        dealer.connect(f"tcp://{self.task.address}")
        own = encryption.new_nonce()
        self._say(dealer, Greeting.HELLO, own)
        kind, other = self._greeting()
        handshake = Handshake(self._token, own, other)
        if kind == Greeting.CHALLENGE:
            self._say(dealer, Greeting.PROOF, handshake.proof)
            kind, proof = self._greeting()
            if kind == Greeting.WELCOME and compare_digest(proof, handshake.welcome):
                up, down = handshake.keys()
                self._sealer, self._opener = Sealer(up), FrameOpener(down)
                return
        raise self._other_token()

    def _other_token(self) -> HandshakeError:
        return HandshakeError(
            f"{self.place} has another token than this task, which reads {str(self._token.path)!r}; copy one token "
            f"file to all machines"
        )

    def await_listener(self, deadline: float, timeout_s: float, present: Sequence[str]) -> None:
        """Waits until somebody listens where the server is to be.

        Args:
            deadline: Until when.
            timeout_s: How long that was from the beginning.
            present: Which other servers are there.
        Raises:
            ClusterJoinError: Nobody does in time.
        """
        while True:
            try:
                socket.create_connection((self._host, self._port), timeout=_HANDSHAKE_S).close()
                return
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                if time.monotonic() >= deadline or error.errno == errno.EACCES:
                    raise ClusterJoinError(missing_text([self.task], present, timeout_s, reason)) from None
            time.sleep(_RETRY_S)

    def _say(self, dealer: "zmq.Socket[bytes]", kind: Greeting, content: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the connection has ended already: nobody will answer
            dealer.send(frames.greeting(kind, content), zmq.NOBLOCK)

    def _greeting(self) -> tuple[Greeting, bytes]:
        stranger = f"{self.place} is not a stratagem parameter server"
        if not self._poll(_HANDSHAKE_S):
            raise HandshakeError(f"{stranger}: it did not answer within {_HANDSHAKE_S:g} s")
        if self._dealer is None or not self._dealer.poll(0):
            if self._monitor is not None and recv_monitor_message(self._monitor)["event"] == _REFUSED:
                raise self._other_token()
            raise HandshakeError(f"{stranger}: it does not speak its protocol")
        try:
            message = self._dealer.recv(copy=False)
            self._descriptor = zmq_sockets.descriptor_of(message)
            return frames.parse_greeting(message.buffer)
        except ProtocolError as error:
            raise HandshakeError(f"{stranger}: {error}") from None

    def _poll(self, timeout_s: float) -> bool:
        poller = zmq.Poller()
        for each in self.sockets:
            poller.register(each, zmq.POLLIN)
        return bool(poller.poll(int(1000 * timeout_s)))

    # Requests, in the thread of the client

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """What to wait for."""
        return [each for each in (self._dealer, self._monitor) if each is not None]

    @property
    def has_frames(self) -> bool:
        """Whether something is to be sent."""
        return self._unsent is not None or self._outgoing is not None or (bool(self._waiting) and not self._current)

    def begin(self, pending: PendingReply) -> None:
        """Asks the server, after what it was asked before."""
        self._waiting.append(pending)

    def beat(self) -> None:
        """Gives a sign of life, unless frames are under way, which are one."""
        if self._unsent is None and self._outgoing is None and self._dealer is not None and self._sealer is not None:
            self._unsent = self._sealer.seal(FrameKind.BEAT, bodies.encode(FrameKind.BEAT, {}))
            self.send()

    def why_lost(self) -> str:
        """Why the server counts as lost; nothing while it does not."""
        return self._pulse.why_lost(unconfirmed_by_descriptor_s(self._descriptor))

    @property
    def owes_s(self) -> float:
        """For how long the server has not gone on with an answer that it began."""
        return 0.0 if self._inflow is None else self._pulse.clock.now_s() - self._heard_at

    def send(self) -> None:
        """Sends what there is room for."""
        if self._dealer is None:
            return
        for _ in range(_FRAMES_AT_ONCE):
            frame = self._next_frame()
            if frame is None:
                return
            try:
                self._dealer.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent = None

    def receive(self) -> None:
        """Takes what has come.

        Raises:
            EndedError: The connection has ended.
            TaskLostError: The server has declared this task lost.
            ProtocolError: What came is not from the server.
        """
        for _ in range(_FRAMES_AT_ONCE):
            if self._dealer is None:
                return
            try:
                frame = self._dealer.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._take(frame.buffer)
        else:
            return  # there may be more: the end comes after it
        if self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            raise EndedError("its connection has ended: its process has ended, or the network to it is cut")

    def fail(self, error: Exception) -> None:
        """Nothing is answered any more."""
        for pending in [*([self._current] if self._current else []), *self._waiting]:
            pending.fail(error)
        self._waiting.clear()
        self._current = None

    def leave(self, *, is_done: bool) -> None:
        """Takes leave; what was sent is given a moment to go."""
        if self._dealer is not None and self._sealer is not None and self._unsent is None and self._outgoing is None:
            with contextlib.suppress(zmq.ZMQError):
                body = bodies.encode(FrameKind.LEAVE, {"is_done": is_done})
                self._dealer.send(self._sealer.seal(FrameKind.LEAVE, body), zmq.NOBLOCK)

    def close(self, linger_ms: int = 0) -> None:
        """Ends the connection. A second time it does nothing."""
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(linger=0)
                self._monitor = None
            dealer.close(linger=linger_ms)

    def _next_frame(self) -> memoryview | None:
        if self._unsent is not None or self._sealer is None:
            return self._unsent
        if self._outgoing is None and self._current is None and self._waiting:
            self._current = self._waiting.popleft()
            self._number += 1
            self._outgoing = _frames(self._current)
        if self._outgoing is not None:
            found = next(self._outgoing, None)
            if found is None:
                self._outgoing = None
            else:
                kind, content, offset = found
                self._unsent = self._sealer.seal(kind, content, request=self._number, offset=offset)
        return self._unsent

    def _take(self, frame: memoryview) -> None:
        if self._opener is None:
            raise ProtocolError("a frame came before the handshake was over")
        header = self._opener.parse(frame)
        current = self._current
        if header.kind == FrameKind.DATA:
            if self._inflow is None or header.request != self._number:
                raise ProtocolError("data came that nobody asked for")
            self._inflow.take(self._opener, frame, header)
            self._heard_at = self._pulse.clock.now_s()
        else:
            body = bodies.decode(header.kind, self._opener.open(frame, header))
            if header.kind == FrameKind.FENCED:
                raise TaskLostError(f"this task no longer takes part: {body['why']}")
            if header.kind == FrameKind.BEAT:
                self._pulse.heard()
                return
            if current is None or header.request != self._number or self._inflow is not None:
                raise ProtocolError(f"a {header.kind.name} frame came that nobody waits for")
            if header.kind == FrameKind.FAILED:
                self._current = self._outgoing = None
                current.fail(RetryError(body["why"]) if body["retry"] else ParameterError(body["why"]))
                return
            if header.kind != FrameKind.DONE:
                raise ProtocolError(f"a server does not send {header.kind.name}")
            current.answer = body
            self._inflow = Inflow(current.rooms(body), in_use=True)  # they may be parameters themselves
            self._heard_at = self._pulse.clock.now_s()
        self._pulse.heard()
        if current is not None and self._inflow is not None and self._inflow.is_complete:
            current.received = self._inflow.tensors
            self._inflow = self._current = None
            current.is_answered.set()


def _frames(pending: PendingReply) -> Iterator[tuple[FrameKind, Bytes, int]]:
    yield pending.kind, pending.encoded, 0
    for offset, piece in tensor_streams.pieces(pending.tensors):
        yield FrameKind.DATA, piece, offset
