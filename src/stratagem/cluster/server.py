"""Makes a task of a cluster answer at its address: authenticated, and there only.

Owns the listening sockets, who may try to get in and how long. What a message leads to is decided by
whoever has registered for its kind (`membership`); a server itself says who it is, and can be stopped.
"""

import asyncio
import contextlib
import importlib
import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Final, Self, TypeAlias, final

from stratagem._caller import warn_caller
from stratagem._checks import StaysHere, require_seconds
from stratagem.cluster import channel as channels
from stratagem.cluster import token as tokens
from stratagem.cluster.address import SCHEME
from stratagem.cluster.channel import Channel, ClosedError
from stratagem.cluster.io_thread import IoThread, in_thread, log
from stratagem.cluster.listening import listen
from stratagem.cluster.membership.member_messages import Body, MessageKind, shortened
from stratagem.cluster.spec import LOCAL, ClusterLike, ClusterSpec, Task
from stratagem.errors import ClusterError, ClusterSpecError, ClusterWarning, HandshakeError, ProtocolError

Handler: TypeAlias = Callable[[Channel, Body], Coroutine[Any, Any, None]]

_MOST_STRANGERS: Final = 64
_LOG_S: Final = 10.0


class _TerminatedError(BaseException):
    """SIGTERM has come while the program waits in `join`."""


@final
class Server(StaysHere):
    """A task of a cluster that answers at its address, as in TensorFlow.

    It listens at the address of its task only, and refuses connections without the token.

    Args:
        cluster: All tasks.
        job_name: The job of this task; may be left out if there is one job.
        task_index: Its index; may be left out if the job has one task.
        token_file: The file with the secret of the cluster; by default `STRATAGEM_TOKEN_FILE`, or `~/.stratagem/token`.
        allow_all_interfaces: Whether to listen on all addresses of this machine, if it does not have that of the task.
        start: Whether to start listening at once.

    Raises:
        ClusterSpecError: There is no such task, or it has no address.
        AddressInUseError: Another program listens at the address.
        AddressError: The address is not one of this machine.
        TokenError: The token file cannot be trusted.

    Example:
        >>> import tempfile
        >>> from stratagem.cluster import token
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     token.create(f"{folder}/token")
        ...     with Server.create_local_server(token_file=f"{folder}/token") as server:
        ...         print(server.target.rpartition(":")[0])
        stratagem://127.0.0.1
    """

    def __init__(
        self,
        cluster: ClusterLike,
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        allow_all_interfaces: bool = False,
        start: bool = True,
    ) -> None:
        self.spec = ClusterSpec(cluster)
        self.task = _only_task(self.spec, job_name, task_index)
        if self.task.address is None:
            raise ClusterSpecError(f"{self.task.name} has no address, so it cannot listen; give it one")
        self._address = self.task.address
        self._token = tokens.load(None if token_file is None else os.fspath(token_file))
        self._everywhere = allow_all_interfaces
        self._thread = IoThread(f"stratagem-{self.task.name}")
        self._handlers: dict[MessageKind, Handler] = {
            MessageKind.PING: self._answer,
            MessageKind.STOP: self._end,
            MessageKind.CALL: self._serve_session,
        }
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._listeners: list[asyncio.Server] = []
        self._service: Any = None
        self._told = threading.Event()
        self._is_running = False
        self._next_log = 0.0
        self.num_refused = 0
        if start:
            self.start()

    @classmethod
    def create_local_server(cls, *, token_file: str | os.PathLike[str] | None = None) -> Self:
        """Returns the server of a cluster with one task, on this machine, at a free port of the loopback address."""
        listener = socket.create_server(("127.0.0.1", 0))
        try:
            port = listener.getsockname()[1]
            server = cls({LOCAL: [f"127.0.0.1:{port}"]}, LOCAL, 0, token_file=token_file, start=False)
            server._start([listener])
        except BaseException:
            listener.close()
            raise
        return server

    @property
    def target(self) -> str:
        """The address of this task for sessions: `stratagem://host:port`."""
        return f"{SCHEME}{self._address}"

    @property
    def token(self) -> tokens.Token:
        """The secret of the cluster."""
        return self._token

    @property
    def thread(self) -> IoThread:
        """The thread that serves all sockets of this task."""
        return self._thread

    def start(self) -> None:
        """Starts listening. If the server listens already, this does nothing."""
        if self._is_running:
            return
        if self._told.is_set():
            raise ClusterError(f"the server of {self.task.name} was stopped; make a new one")
        listeners = listen(self.task, self._address, everywhere=self._everywhere)
        self._warn_if_unreachable(listeners)
        self._start(listeners)

    def handle(self, kind: MessageKind, handler: Handler | None) -> None:
        """Registers a function for each message of a kind that opens a conversation; None removes it."""
        if handler is None:
            self._handlers.pop(kind, None)
        else:
            self._handlers[kind] = handler

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the cluster is told to stop, or this process gets Ctrl-C or SIGTERM; then stops the server.

        Args:
            timeout_s: The longest wait; after it the server goes on.
        """
        if timeout_s is not None:
            require_seconds(ClusterSpecError, or_zero=True, timeout_s=timeout_s)
        with contextlib.suppress(KeyboardInterrupt, _TerminatedError), _noticing_termination():
            if not self._told.wait(timeout_s):
                return
        self.stop()

    def stop(self) -> None:
        """Ends all connections and stops listening. A second call does nothing."""
        self._told.set()
        if self._is_running:
            self._is_running = False
            self._thread.run(self._stop_listening())
            self._thread.stop()
            self._service = None  # and with it the variables of sessions

    def stop_cluster(self) -> list[str]:
        """Tells the servers of all tasks to stop, also this one; returns the names of the tasks that were reached."""
        reached = self._thread.run(self._tell_all())
        self.stop()
        return [*reached, self.task.name]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Server of {self.task}>"

    def _start(self, listeners: list[socket.socket]) -> None:
        self._thread.start()
        self._is_running = True
        self._thread.run(self._listen(listeners))

    def _warn_if_unreachable(self, listeners: list[socket.socket]) -> None:
        """Some systems give a machine's own name a loopback address, where no other machine can reach it."""
        own = [str(listener.getsockname()[0]) for listener in listeners]
        others = {task.address.host for task in self.spec.tasks if task.address is not None} - {self._address.host}
        if others and self._address.host not in own and all(ipaddress.ip_address(each).is_loopback for each in own):
            warn_caller(
                f"the name {self._address.host!r} of {self.task.name} resolves to {' and '.join(own)} on this "
                f"machine, where no other machine can reach it; give an address of its network, or correct /etc/hosts",
                ClusterWarning,
            )

    async def _listen(self, listeners: list[socket.socket]) -> None:
        self._listeners = [await asyncio.start_server(self._serve, sock=listener) for listener in listeners]

    async def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from a stranger's first byte to its end."""
        if len(self._strangers) >= _MOST_STRANGERS:
            # The longest waiting one: whoever belongs here has said so within moments.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            channel = await channels.accept(reader, writer, self._token)
        except HandshakeError as error:
            self._refuse(f"{error}, from {writer.get_extra_info('peername')}")
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            self._strangers.pop(writer, None)
        try:
            await self._talk(channel)
            await channel.close()
        except ClosedError:
            pass
        except (ProtocolError, TimeoutError) as error:
            self._refuse(f"{error}, from {channel.peer_host}")
        finally:
            channel.abort()

    async def _talk(self, channel: Channel) -> None:
        async with asyncio.timeout(channels.HANDSHAKE_S):
            kind, body = await channel.receive()
        handler = self._handlers.get(kind)
        if handler is None:
            channel.send(MessageKind.REFUSED, {"why": f"{self.task.name} does not take {kind.name} now", "retry": True})
        else:
            await handler(channel, body)

    async def _answer(self, channel: Channel, body: Body) -> None:
        channel.send(MessageKind.PONG, place_of(self.task))

    async def _end(self, channel: Channel, body: Body) -> None:
        log.info("%s was told to stop: %s", self.task.name, body["why"])
        channel.send(MessageKind.DONE)
        self._told.set()

    async def _serve_session(self, channel: Channel, body: Body) -> None:
        # Loads torch, which only tasks need that run graphs.
        service = await in_thread(lambda: importlib.import_module("stratagem.graphs.sessions.task_service"))
        if self._service is None:
            self._service = service.TaskService(self.task, self.spec)
        await self._service.serve(channel, body)

    async def _tell_all(self) -> list[str]:
        others = [task for task in self.spec.tasks if task != self.task and task.address is not None]
        told = await asyncio.gather(*(self._tell(task) for task in others))
        return [task.name for task, reached in zip(others, told, strict=True) if reached]

    async def _tell(self, task: Task) -> bool:
        if task.address is None:
            return False
        try:
            channel = await channels.connect(task.address.host, task.address.port, self._token)
        except (OSError, HandshakeError):
            return False
        try:
            channel.send(MessageKind.STOP, {"why": f"{self.task.name} says so"})
            async with asyncio.timeout(channels.HANDSHAKE_S):
                return (await channel.receive())[0] == MessageKind.DONE
        except (ClosedError, ProtocolError, TimeoutError):
            return False
        finally:
            channel.abort()

    def _refuse(self, why: str) -> None:
        """Counts, and logs now and then: a stranger must not be able to fill a disk."""
        self.num_refused += 1
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_S
            log.warning("%s refused a connection (%d so far): %s", self.task.name, self.num_refused, why)


def place_of(task: Task) -> Body:
    """Which task this process is, and where it runs."""
    address = "" if task.address is None else str(task.address)
    return {"task": task.name, "address": address, "machine": shortened(socket.gethostname()), "pid": os.getpid()}


def _only_task(spec: ClusterSpec, job_name: str | None, task_index: int | None) -> Task:
    names = ", ".join(task.name for task in spec.tasks) or "no tasks"
    if job_name is None:
        if len(spec.jobs) != 1:
            raise ClusterSpecError(f"job_name must say which task this is; cluster has {names}")
        job_name = spec.jobs[0]
    if task_index is None:
        if spec.num_tasks(job_name) != 1:
            raise ClusterSpecError(f"task_index must say which task of {job_name!r} this is; cluster has {names}")
        task_index = spec.task_indices(job_name)[0]
    return spec.task(job_name, task_index)


@contextlib.contextmanager
def _noticing_termination() -> Iterator[None]:
    """Raises where the main thread waits when SIGTERM comes; elsewhere signals cannot be noticed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
