"""What a parameter server knows of one client: keys, what is coming from it, what is going to it."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, final

import torch

from stratagem.cluster.liveness import Pulse
from stratagem.errors import ProtocolError
from stratagem.parameters.network import bodies, tensor_streams
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.encryption import FrameOpener, Handshake, Sealer
from stratagem.parameters.network.frames import Bytes, FrameKind, Header
from stratagem.parameters.network.same_host_memory import Nearby
from stratagem.parameters.network.tensor_streams import Inflow

_MOST_WAITING: Final = 64


@final
class ClientRecord:
    """A client that has shown that it has the token.

    Args:
        identity: By which ZeroMQ sends to it.
        handshake: What both sides have said.
        pulse: How long it may be silent.
        descriptor: The socket of the system over which it came.
    """

    def __init__(self, identity: bytes, handshake: Handshake, pulse: Pulse, descriptor: int) -> None:
        self.identity = identity
        self.pulse = pulse
        self.descriptor = descriptor
        self.name = ""
        self.place = ""
        self.is_fenced = False
        self.is_busy = False
        self.why_fenced = ""
        self.nearby: Nearby | None = None
        up, down = handshake.keys()
        self._opener, self._sealer = FrameOpener(up), Sealer(down)
        self._asked: tuple[FrameKind, Body, int] | None = None
        self._inflow: Inflow | None = None
        self._heard_at = 0.0
        self._outgoing: deque[Iterator[tuple[FrameKind, Bytes, int, int]]] = deque()
        self._unsent: memoryview | None = None
        self._stuck_since = float("inf")

    # What comes

    def parse(self, frame: Bytes) -> Header:
        """The header of its next frame."""
        return self._opener.parse(frame)

    def body(self, frame: Bytes, header: Header) -> Body:
        """The body of a frame."""
        return bodies.decode(header.kind, self._opener.open(frame, header))

    def expect(self, kind: FrameKind, body: Body, request: int, tensors: Sequence[torch.Tensor]) -> None:
        """A request has begun; these are to come."""
        self._asked, self._inflow = (kind, body, request), Inflow(tensors)
        self._heard_at = self.pulse.clock.now_s()

    def take(self, frame: Bytes, header: Header) -> None:
        """The next bytes of the request."""
        if self._inflow is None or self._asked is None or header.request != self._asked[2]:
            raise ProtocolError("data came for no request")
        self._inflow.take(self._opener, frame, header)
        self._heard_at = self.pulse.clock.now_s()

    @property
    def owes_s(self) -> float:
        """For how long it has not sent what it announced."""
        return 0.0 if self._inflow is None else self.pulse.clock.now_s() - self._heard_at

    def whole_request(self) -> tuple[FrameKind, Body, int, Sequence[torch.Tensor]] | None:
        """The request that is under way, once all of it has come."""
        if self._asked is None or self._inflow is None or not self._inflow.is_complete:
            return None
        asked, tensors = self._asked, self._inflow.tensors
        self._asked = self._inflow = None
        return (*asked, tensors)

    # What goes

    def send(self, kind: FrameKind, body: Body, request: int = 0, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Puts an answer into the queue, with tensors after it."""
        if len(self._outgoing) >= _MOST_WAITING:
            raise ProtocolError("it does not read what it is sent")
        self._outgoing.append(_frames(kind, bodies.encode(kind, body), request, tensors))

    def next_frame(self) -> memoryview | None:
        """What is to be sent next; the same again until `sent` is called."""
        while self._unsent is None and self._outgoing:
            found = next(self._outgoing[0], None)
            if found is None:
                self._outgoing.popleft()
            else:
                kind, content, request, offset = found
                self._unsent = self._sealer.seal(kind, content, request=request, offset=offset)
        return self._unsent

    def sent(self) -> None:
        """It is on its way."""
        self._unsent = None
        self._stuck_since = float("inf")

    def stuck_s(self) -> float:
        """It could not be sent; tells for how long that has been so."""
        now = self.pulse.clock.now_s()
        self._stuck_since = min(self._stuck_since, now)
        return now - self._stuck_since

    @property
    def has_frames(self) -> bool:
        """Whether something is to be sent."""
        return self._unsent is not None or bool(self._outgoing)

    def fence(self, why: str) -> None:
        """Forgets all but the keys: whatever it says from now on, it hears that it is out."""
        self.is_fenced, self.why_fenced, self.nearby = True, why, None
        self._outgoing.clear()
        self._asked = self._inflow = None


def _frames(
    kind: FrameKind, body: bytes, request: int, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[FrameKind, Bytes, int, int]]:
    yield kind, body, request, 0
    for offset, piece in tensor_streams.pieces(tensors):
        yield FrameKind.DATA, piece, request, offset
