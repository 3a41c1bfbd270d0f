"""Somebody who speaks to a parameter server as no client of ours would, with the token or without it."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import zmq

from stratagem.cluster import token as tokens
from stratagem.cluster.membership.compatibility import Introduction
from stratagem.cluster.spec import ClusterSpec
from stratagem.parameters.network import bodies, encryption, frames, zmq_password
from stratagem.parameters.network.encryption import FrameOpener, Handshake, Sealer
from stratagem.parameters.network.frames import FrameKind, Greeting

PATIENCE_S = 20.0


class Attacker(contextlib.ExitStack):
    """A bare socket that has passed the door; `log_in` proves that it has the token, `attach` that it is a worker."""

    def __init__(self, spec: dict[str, list[str]], server: int = 0, *, queue: int = 100) -> None:
        super().__init__()
        self.spec = spec
        self._context = self.enter_context(zmq.Context())
        self.socket = self.enter_context(self._context.socket(zmq.DEALER))
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, queue)
        zmq_password.take_key(self.socket, tokens.load())
        self.socket.connect(f"tcp://{spec['ps'][server]}")
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)
        self.socket.send(frame)

    def receive(self) -> bytes:
        assert self.socket.poll(int(1000 * PATIENCE_S)), "the server says nothing"
        return self.socket.recv()

    def log_in(self) -> None:
        own = encryption.new_nonce()
        self.send(frames.greeting(Greeting.HELLO, own))
        kind, other = frames.parse_greeting(self.receive())
        assert kind == Greeting.CHALLENGE
        handshake = Handshake(tokens.load(), own, other)
        self.send(frames.greeting(Greeting.PROOF, handshake.proof))
        assert frames.parse_greeting(self.receive()) == (Greeting.WELCOME, handshake.welcome)
        up, down = handshake.keys()
        self.sealer, self.opener = Sealer(up), FrameOpener(down)

    def attach(self, worker: int = 0) -> None:
        self.log_in()
        spec = ClusterSpec(self.spec)
        introduction = Introduction.of_this_process(spec.task("worker", worker), spec, spec.jobs, None)
        self.ask(FrameKind.ATTACH, introduction.to_body())
        assert self.answer()[0] == FrameKind.DONE

    def ask(self, kind: FrameKind, body: dict[str, Any], request: int = 1) -> None:
        self.say(kind, bodies.encode(kind, body), request=request)

    def say(self, kind: FrameKind, content: bytes, **header: int) -> None:
        self.send(bytes(self.sealer.seal(kind, content, **header)))

    def answer(self) -> tuple[FrameKind, Any]:
        """The next thing that the server says, other than signs of life."""
        while True:
            frame = self.receive()
            header = self.opener.parse(frame)
            content = self.opener.open(frame, header)
            if header.kind != FrameKind.BEAT:
                return header.kind, content if header.kind == FrameKind.DATA else bodies.decode(header.kind, content)

    def is_out(self) -> bool:
        """Whether the server takes nothing from it any more, and has told it so."""
        self.say(FrameKind.BEAT, b"{}")
        kind, body = self.answer()
        return kind == FrameKind.FENCED and "declared it lost" in body["why"]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
