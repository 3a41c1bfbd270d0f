"""Makes a ps task serve its shard: one socket for all clients, one thread for the socket.

Owns who may talk to the shard, for how long somebody may be silent or not read, and when the task is
done. What requests mean is `executor`'s, what is under way with one client `client_record`'s.
"""

import functools
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from hmac import compare_digest
from typing import Final, Self, final

import torch
import zmq

from stratagem.cluster import token as tokens
from stratagem.cluster.io_thread import log
from stratagem.cluster.listening import listen
from stratagem.cluster.liveness import Pulse, Rhythm, chosen_timeout_s, unconfirmed_by_descriptor_s
from stratagem.cluster.membership.compatibility import Introduction
from stratagem.cluster.spec import PS, TRAINING, ClusterLike, ClusterSpec
from stratagem.errors import ClusterError, ClusterSpecError, ProtocolError, StratagemError
from stratagem.parameters.network import bodies, encryption, frames, zmq_sockets
from stratagem.parameters.network.bodies import Body
from stratagem.parameters.network.encryption import Handshake
from stratagem.parameters.network.frames import FrameKind, Greeting
from stratagem.parameters.network.same_host_memory import SHARED, Nearby
from stratagem.parameters.network.server.client_record import ClientRecord
from stratagem.parameters.network.server.client_requests import ClientRequest, chief_of, number_of
from stratagem.parameters.network.server.executor import Executor
from stratagem.parameters.network.zmq_password import Door

HEARTBEAT_S: Final = 0.5
NUM_MISSED: Final = 7
"""Together 3.9 s: a network that is gone for 2 s is back in time, also when packets are sent again late."""

_HANDSHAKE_S: Final = 5.0
_MOST_STRANGERS: Final = 64
_MOST_SESSIONS: Final = 1024
_MOST_FENCED: Final = 256
_LOG_S: Final = 10.0
_RETURN_S: Final = 60.0
_FRAMES_AT_ONCE: Final = 32
_STUCK_MS: Final = 2
_CLOSE_S: Final = 30.0


@final
class ParameterServer:
    """A ps task of a cluster: keeps a part of the variables for all workers.

    It listens on the address of its task only, and talks to nobody who does not have the token.

    Args:
        cluster: All tasks.
        task_index: Which ps task this is.
        token_file: Where the secret of the cluster is; by default `STRATAGEM_TOKEN_FILE`, or `~/.stratagem/token`.
        heartbeat_s: After how long each sign of life follows the last.
        num_missed: After how many missed signs of life a client is lost whose machine does not answer either.
        heartbeat_timeout_s: After how long without any a client is lost whose machine answers; by default what
            `stratagem run --heartbeat-timeout` says, or 30 s.
        slow_reader_s: How long a client may not read what it has asked for, or not send what it has announced; by
            default as long as it may be silent.
        allow_all_interfaces: Whether to listen on all addresses of this machine.
    Raises:
        ClusterSpecError: There is no such task, or it has no address.
        TokenError: The token file cannot be trusted.
    """

    def __init__(
        self,
        cluster: ClusterLike,
        task_index: int,
        *,
        token_file: str | os.PathLike[str] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        num_missed: int = NUM_MISSED,
        heartbeat_timeout_s: float | None = None,
        slow_reader_s: float | None = None,
        allow_all_interfaces: bool = False,
    ) -> None:
        self.spec = ClusterSpec(cluster)
        self.task = self.spec.task(PS, task_index)
        if self.task.address is None:
            raise ClusterSpecError(f"{self.task.name} has no address, so other tasks cannot reach it; give it one")
        self._address = self.task.address
        self._token = tokens.load(None if token_file is None else os.fspath(token_file))
        self._rhythm = Rhythm(heartbeat_s, num_missed, chosen_timeout_s(heartbeat_timeout_s))
        self._slow_reader_s = self._rhythm.timeout_s if slow_reader_s is None else slow_reader_s
        self._everywhere = allow_all_interfaces
        self._context = zmq_sockets.new_context()
        self._door = Door(self._context, self._token)
        self._router: zmq.Socket[bytes] | None = None
        self._bell = zmq_sockets.Bell()
        self._desk = Executor(self.spec.task_indices(PS).index(task_index), ended=self._bell.ring)
        self._strangers: OrderedDict[bytes, tuple[Handshake, float]] = OrderedDict()
        self._sessions: dict[bytes, ClientRecord] = {}
        self._fenced: OrderedDict[bytes, ClientRecord] = OrderedDict()
        self._answers: deque[tuple[ClientRecord, FrameKind, Body, int, Sequence[torch.Tensor]]] = deque()
        self._told = threading.Event()
        self._serving = threading.Lock()  # held by the thread that uses the sockets
        self._is_chief_done = False
        self._absent = {task.name for task in self.spec.tasks if task.job in TRAINING}
        self._alone_since = time.monotonic()
        self._next_log = 0.0
        self._num_devices: tuple[str, object] | None = None  # who came first, and how many it drives
        self.num_refused = 0

    def start(self) -> Self:
        """Begins to listen.

        Raises:
            ClusterError: The server was closed.
            AddressInUseError: Another program listens at the address.
            AddressError: The address is not one of this machine.
        """
        if self._context.closed:
            raise ClusterError(f"{self.task.name} was closed; make a new ParameterServer")
        if self._router is None:
            # The first optimizer of a process takes a second; now nobody waits for it.
            torch.optim.SGD([torch.zeros(1)])
            listeners = listen(self.task, self._address, everywhere=self._everywhere)
            self._router = zmq_sockets.serving(self._context, listeners, self._door, self._rhythm.timeout_s)
            self._desk.start()
        return self

    def serve(self) -> None:
        """Serves until `stop` is called, or until the chief has said that training is done and all have left.

        For a task that has not come yet, or was lost and may come back, a server waits a minute.

        Raises:
            ClusterError: The shard cannot be served any more; all clients are cut off at once.
        """
        with self._serving:
            router = None if self._told.is_set() else self.start()._router
            if router is None:
                return
            try:
                self._serve(router)
            except BaseException:  # whoever waits must hear of it, also if nobody closes this server
                self._hang_up()
                raise

    def _serve(self, router: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        for each in (router, self._bell.descriptor, self._door.socket):
            poller.register(each, zmq.POLLIN)
        heartbeat_s = self._rhythm.beat_s
        next_look = next_beat = time.monotonic()
        while not (self._told.is_set() or self._is_done()):
            waiting = any(session.has_frames for session in self._sessions.values())
            poller.poll(_STUCK_MS if waiting else int(250 * heartbeat_s))
            self._bell.hear()
            if self._desk.error is not None:
                raise ClusterError(f"{self.task.name} cannot go on with its shard") from self._desk.error
            for _ in range(self._door.answer()):
                self._refuse(b"", ProtocolError("an unknown program has another token"))
            self._receive(router)
            while self._answers:
                session, kind, body, request, tensors = self._answers.popleft()
                self._answer(session, kind, body, request, tensors)
            self._send(router)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + heartbeat_s
                for session in list(self._sessions.values()):
                    if not session.has_frames:  # which are a sign of life, too
                        self._answer(session, FrameKind.BEAT, {}, 0, ())
            if now >= next_look:
                next_look = now + heartbeat_s / 4
                self._look()

    def stop(self) -> None:
        """Has `serve` return; may be called in any thread, and in a signal handler."""
        self._told.set()
        self._bell.ring()

    def close(self) -> None:
        """Has `serve` return, then ends all connections. Not for signal handlers. A second time it does nothing."""
        self.stop()
        if not self._serving.acquire(timeout=_CLOSE_S):
            raise ClusterError(f"{self.task.name} still serves {_CLOSE_S:g} s after stop(); close() it after serve()")
        try:
            self._desk.stop()
            self._hang_up()
            self._context.term()
            self._bell.close()
        finally:
            self._serving.release()

    def _hang_up(self) -> None:
        """Ends all connections: those of ZeroMQ last until nobody asks for passwords any more."""
        router, self._router = self._router, None
        if router is not None:
            router.close(linger=0)
        self._door.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ParameterServer {self.task}>"

    def _is_done(self) -> bool:
        if not self._is_chief_done or self._sessions:
            return False
        return not self._absent or time.monotonic() - self._alone_since > _RETURN_S

    # What comes

    def _receive(self, router: "zmq.Socket[bytes]") -> None:
        for _ in range(_FRAMES_AT_ONCE):
            try:
                parts = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = parts[0].bytes
            try:
                if len(parts) != 2:
                    raise ProtocolError(f"a message has one part, got {len(parts) - 1}")
                self._take(router, identity, parts[1])
            except Exception as error:  # whatever one client causes, the others are served
                self._refuse(identity, error)

    def _take(self, router: "zmq.Socket[bytes]", identity: bytes, message: zmq.Frame) -> None:
        session = self._sessions.get(identity)
        if session is None:
            fenced = self._fenced.get(identity)
            if fenced is not None:
                self._tell_fenced(router, fenced)
            else:
                self._greet(router, identity, message)
            return
        frame = message.buffer
        header = session.parse(frame)
        if header.kind == FrameKind.DATA:
            session.take(frame, header)
        else:
            self._hear(session, header.kind, session.body(frame, header), header.request)
        session.pulse.heard()
        whole = session.whole_request()
        if whole is not None:
            kind, body, request, tensors = whole
            session.is_busy = True
            answer = functools.partial(self._answer_later, session, request)
            nearby = session.nearby if body.get("is_shared") else None
            self._desk.put(ClientRequest(number_of(session.name), kind, body, tensors, answer, nearby))

    def _greet(self, router: "zmq.Socket[bytes]", identity: bytes, message: zmq.Frame) -> None:
        """The handshake, with somebody who may be anybody."""
        kind, content = frames.parse_greeting(message.buffer)
        if kind == Greeting.HELLO:
            own = encryption.new_nonce()
            self._strangers[identity] = Handshake(self._token, content, own), time.monotonic() + _HANDSHAKE_S
            if len(self._strangers) > _MOST_STRANGERS:
                self._strangers.popitem(last=False)
            _try_send(router, identity, frames.greeting(Greeting.CHALLENGE, own))
            return
        handshake, _ = self._strangers.pop(identity, (None, 0.0))
        if kind != Greeting.PROOF or handshake is None or not compare_digest(content, handshake.proof):
            _try_send(router, identity, frames.greeting(Greeting.REFUSED, bytes(frames.NONCE_BYTES)))
            raise ProtocolError("an unknown program has another token")
        if len(self._sessions) >= _MOST_SESSIONS:
            raise ProtocolError(f"{_MOST_SESSIONS} clients are here already")
        self._sessions[identity] = ClientRecord(
            identity, handshake, Pulse(self._rhythm), zmq_sockets.descriptor_of(message)
        )
        _try_send(router, identity, frames.greeting(Greeting.WELCOME, handshake.welcome))

    def _hear(self, session: ClientRecord, kind: FrameKind, body: Body, request: int) -> None:
        if kind == FrameKind.BEAT:
            return
        if kind == FrameKind.LEAVE:
            self._drop(session, "", is_done=body["is_done"])
            self._absent.discard(session.name)
            if body["is_done"] and session.name == chief_of(self.spec):
                self._is_chief_done = True
            return
        if session.is_busy:
            raise ProtocolError("a request came before the last one was answered")
        if kind == FrameKind.ATTACH:
            other = Introduction.from_body(body)
            why, twin = self._why_not(other), self._twin(session, other)
            if why or twin:
                said = {"why": bodies.shortened(why or twin), "retry": not why}
                self._answer(session, FrameKind.FAILED, said, request, ())
                return
            self._absent.add(body["task"])
            session.name, session.place = body["task"], f"pid {body['pid']} on {body['machine']}"
        elif not session.name:
            raise ProtocolError("a request came before an introduction")
        if kind == FrameKind.SHARE:
            session.nearby = Nearby.found(body, self._desk.all_pieces())
            said = bodies.done(verdict=SHARED if session.nearby is not None else "")
            self._answer(session, FrameKind.DONE, said, request, ())
            return
        if body.get("is_shared") and session.nearby is None:
            raise ProtocolError("a push says that its gradients are in shared memory, and there is none")
        session.expect(kind, body, request, self._desk.expected(kind, body))

    def _why_not(self, other: Introduction) -> str:
        """Why a task is not taken in; empty if it is."""
        own = Introduction.of_this_process(self.task, self.spec, other.jobs, None)
        for name, mine in own.versions.items():
            if other.versions.get(name) != mine:
                theirs = other.versions.get(name, "none")
                return f"{self.task.name} runs {name} {mine}, {other.task} {theirs}; install one version everywhere"
        servers = [[str(task) for task in spec.tasks if task.job == PS] for spec in (self.spec, other.spec)]
        if servers[0] != servers[1]:
            return f"{self.task.name} and {other.task} disagree on the cluster: {servers[0]} vs {servers[1]}"
        if other.task not in [task.name for task in other.spec.tasks if task.job in TRAINING]:
            return f"{other.task} is no task that trains"
        theirs = other.signature.get("devices", 1)
        if self._num_devices is None:
            self._num_devices = other.task, theirs
        first, number = self._num_devices
        if theirs != number:
            return (
                f"{first} uses {number} devices and {other.task} uses {theirs}, but the data is divided by that "
                f"number; give all tasks the same number of devices, with devices=[...] or CUDA_VISIBLE_DEVICES"
            )
        return ""

    def _twin(self, session: ClientRecord, other: Introduction) -> str:
        """Says that a task of this name is here already; a new life of it may come when the old one is lost."""
        for each in self._sessions.values():
            if each is not session and each.name == other.task:
                return f"{other.task} is here already ({each.place})"
        return ""

    # What goes

    def _answer_later(
        self, session: ClientRecord, request: int, kind: FrameKind, body: Body, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Sends an answer; from the thread of the desk."""
        self._answers.append((session, kind, body, request, tensors))
        self._bell.ring()

    def _answer(
        self, session: ClientRecord, kind: FrameKind, body: Body, request: int, tensors: Sequence[torch.Tensor]
    ) -> None:
        if kind != FrameKind.BEAT:
            session.is_busy = False
        if not session.is_fenced:
            try:
                session.send(kind, body, request, tensors)
            except StratagemError as error:
                self._drop(session, str(error))

    def _send(self, router: "zmq.Socket[bytes]") -> None:
        """A few frames to each client that has room for them."""
        for session in list(self._sessions.values()):
            for _ in range(_FRAMES_AT_ONCE):
                try:
                    frame = session.next_frame()
                    if frame is None:
                        break
                    router.send_multipart([session.identity, frame], zmq.NOBLOCK)
                except zmq.Again:
                    if session.stuck_s() > self._slow_reader_s:
                        self._drop(session, f"it has not read what it asked for within {self._slow_reader_s:g} s")
                    break
                except zmq.ZMQError:  # no such client any more
                    self._drop(session, "its connection has ended")
                    break
                except Exception as error:  # whatever one client asked for, the others are served
                    self._drop(session, f"what it asked for could not be sent: {error}")
                    break
                session.sent()

    def _look(self) -> None:
        for session in list(self._sessions.values()):
            if why := session.pulse.why_lost(unconfirmed_by_descriptor_s(session.descriptor)):
                self._drop(session, why)
            elif session.owes_s > self._slow_reader_s:
                self._drop(session, f"it has not sent what it announced within {self._slow_reader_s:g} s")
        now = time.monotonic()
        while self._strangers and next(iter(self._strangers.values()))[1] < now:
            self._strangers.popitem(last=False)

    # Who is out

    def _drop(self, session: ClientRecord, why: str, *, is_done: bool = False) -> None:
        """Ends a session; what it still sends is not taken."""
        if self._sessions.pop(session.identity, None) is None:
            return
        session.fence(why)
        self._alone_since = time.monotonic()
        if session.name:
            self._desk.fence(number_of(session.name), is_done=is_done)
        if why:
            log.info("%s: %s (%s) is lost: %s", self.task.name, session.name or "a client", session.place, why)
            self._fenced[session.identity] = session
            if len(self._fenced) > _MOST_FENCED:
                self._fenced.popitem(last=False)

    def _tell_fenced(self, router: "zmq.Socket[bytes]", session: ClientRecord) -> None:
        del self._fenced[session.identity]
        session.send(
            FrameKind.FENCED, {"why": bodies.shortened(f"{self.task.name} had declared it lost: {session.why_fenced}")}
        )
        while (sealed := session.next_frame()) is not None:  # what was sealed before must go before
            _try_send(router, session.identity, sealed)
            session.sent()
        raise ProtocolError(f"{session.name} was declared lost, and still sends")

    def _refuse(self, identity: bytes, error: Exception) -> None:
        """Counts, and logs now and then: a stranger must not be able to fill a disk."""
        session = self._sessions.get(identity)
        if session is not None:
            self._drop(session, str(error))
        self.num_refused += 1
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_S
            log.warning("%s refused a message (%d so far): %s", self.task.name, self.num_refused, error)


def _try_send(router: "zmq.Socket[bytes]", identity: bytes, frame: bytes | memoryview) -> None:
    """Sends, if there is room; who does not read what it asked for goes without."""
    try:
        router.send_multipart([identity, frame], zmq.NOBLOCK)
    except zmq.ZMQError:
        log.debug("an answer could not be sent")
