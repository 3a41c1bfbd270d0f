"""Brings the tasks of a cluster together and keeps them in touch: the part that others use.

Owns the life of a membership and the store's operations as plain calls. What is said on the wire is in
`keeper`, for the first task, and `follower`, for all others; both run in a thread of their own.
"""

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self, TypeVar, final

from stratagem._caller import warn_caller
from stratagem._checks import require_seconds
from stratagem.cluster import token as tokens
from stratagem.cluster.io_thread import IoThread, log
from stratagem.cluster.liveness import Rhythm, chosen_timeout_s
from stratagem.cluster.membership.compatibility import Introduction
from stratagem.cluster.membership.follower import Follower
from stratagem.cluster.membership.keeper import Keeper
from stratagem.cluster.membership.member_messages import MessageKind
from stratagem.cluster.membership.members import Member, TaskLost
from stratagem.cluster.membership.shared_values import LOST, OK, TIMEOUT, Reply, ValueRequest, check_value
from stratagem.cluster.server import Server
from stratagem.cluster.spec import ClusterLike, ClusterSpec, Task
from stratagem.errors import (
    ClusterError,
    ClusterSpecError,
    ClusterTimeoutError,
    StratagemWarning,
    TaskLostError,
    in_words,
)

_WAIT_S: Final = 60.0
_SILENT_S: Final = 5.0  # how long to wait without a word

_Result = TypeVar("_Result")


@final
class Membership:
    """Makes this process a task of a cluster, from `join` until `leave`.

    The first task is the keeper: it listens at its address, and the others connect to it. All tasks compare the
    cluster, versions and signature when they join. Then each sends heartbeats; a task that dies,
    stops or is cut off is declared lost within seconds, and all others are told. A membership ends with the first
    loss: a lost task stays lost, and a new start needs a new membership.

    Args:
        cluster: All tasks.
        job_name: The job of this task.
        task_index: Its index.
        jobs: Which jobs take part; by default all.
        signature: What all tasks must agree on besides, as values of JSON.
        join_timeout_s: How long to wait for the others.
        heartbeat_s: The seconds between two heartbeats. Of this and the next two options the keeper's values count.
        num_missed: The number of missed heartbeats after which a task is lost if its machine does not answer either.
        heartbeat_timeout_s: The seconds without heartbeats after which a task is lost although its machine answers; by
            default the value of `stratagem run --heartbeat-timeout`, or 30.
        server: The server of this task, if it has one already; it is left running.
        token_file: Where the secret of the cluster is; by default `STRATAGEM_TOKEN_FILE`, or `~/.stratagem/token`.
        allow_all_interfaces: Whether the keeper may listen on all addresses of its machine.

    Raises:
        ClusterSpecError: There is no such task, or an argument breaks a rule.

    Example:
        >>> with Membership({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 0) as m:  # doctest: +SKIP
        ...     m.set("greeting", b"hello")
        ...     m.raise_if_lost()
    """

    def __init__(
        self,
        cluster: ClusterLike,
        job_name: str,
        task_index: int,
        *,
        jobs: Sequence[str] | None = None,
        signature: Mapping[str, Any] | None = None,
        join_timeout_s: float = 60.0,
        heartbeat_s: float = 1.0,
        num_missed: int = 3,
        heartbeat_timeout_s: float | None = None,
        server: Server | None = None,
        token_file: str | os.PathLike[str] | None = None,
        allow_all_interfaces: bool = False,
    ) -> None:
        self.spec = ClusterSpec(cluster)
        self.task = self.spec.task(job_name, task_index)
        self.participants = _participants(self.spec, self.task, jobs)
        require_seconds(ClusterSpecError, join_timeout_s=join_timeout_s)
        self.join_timeout_s = join_timeout_s
        self._rhythm = Rhythm(heartbeat_s, num_missed, chosen_timeout_s(heartbeat_timeout_s))
        self._introduction = Introduction.of_this_process(
            self.task, self.spec, list(dict.fromkeys(task.job for task in self.participants)), signature
        )
        self._given_server, self._server = server, server
        self._token_file = token_file
        self._everywhere = allow_all_interfaces
        self._thread = IoThread(f"stratagem-{self.task.name}")
        self._side: Keeper | Follower | None = None
        self._losses: tuple[TaskLost, ...] = ()
        self._callbacks: list[Callable[[TaskLost], None]] = []
        self._has_joined = False
        self._lock = threading.Lock()  # never held while anything waits
        self._kept: list[object] = []

    # Who takes part

    @property
    def rank(self) -> int:
        """The number of this task among the participants."""
        return self.participants.index(self.task)

    @property
    def size(self) -> int:
        """The number of participants."""
        return len(self.participants)

    @property
    def is_keeper(self) -> bool:
        """Whether this is the task to which the others connect."""
        return self.rank == 0

    @property
    def incarnation(self) -> str:
        """An identifier of this run of the task, different in every run."""
        return self._introduction.incarnation

    @property
    def takes_part(self) -> bool:
        """Whether this task has joined and has not left."""
        return self._has_joined and not self._is_forked()

    @property
    def members(self) -> list[Member]:
        """The tasks that take part now, in the order of the cluster, with their machines and processes."""
        return list(self._joined_side().members)

    @property
    def heartbeat_timeout_s(self) -> float:
        """The seconds without heartbeats after which a task is lost in any case."""
        return self._rhythm.timeout_s

    @property
    def own_host(self) -> str:
        """An address at which the other tasks of the cluster can reach this machine."""
        return self._joined_side().own_host

    # Its life

    def join(self, waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> Self:
        """Joins the cluster; waits until all tasks have joined.

        Args:
            waiting: A context manager that is entered only around the wait, for callers that must be able to
                interrupt it; what happens before and after the wait is never interrupted.

        Raises:
            ClusterJoinError: A task has not joined in time, does not fit, or has joined twice.
            HandshakeError: The program at the address of the keeper is not a task of this cluster.
            AddressInUseError: Another program listens at the address of this task.
            TokenError: The token file cannot be trusted.
        """
        if self._side is not None:
            raise ClusterError(f"{self.task.name} has joined already, or tried to; make a new Membership to join again")
        try:
            self._side = self._begin()
            self._wait_for_all(self._side, waiting)
        except BaseException:
            self._stop()
            raise
        self._has_joined = True
        return self

    def _wait_for_all(self, side: Keeper | Follower, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Joins; says whom it waits for when that takes long."""
        joining = self._thread.submit(side.join(self.join_timeout_s))
        try:
            with waiting():
                if concurrent.futures.wait([joining], _SILENT_S).not_done:
                    missing = [str(task) for task in self.participants if task.name not in side.present]
                    warn_caller(
                        f"{self.task.name} waits for {', '.join(missing)}, {self.join_timeout_s:g} s at most "
                        f"(join_timeout_s)",
                        StratagemWarning,
                    )
                joining.result()
        except BaseException:
            joining.cancel()
            raise

    def leave(self, linger_s: float = 5.0) -> None:
        """Leaves the cluster; the other tasks do not count this as a loss. A second call does nothing.

        Args:
            linger_s: The seconds that the keeper, which keeps the store, waits for the others to leave first.
        """
        self._finish(lambda side: side.leave(linger_s))

    def fail(self, why: str) -> None:
        """Tells the others that this task has failed, then leaves. The others count it as lost, for this reason."""
        self._finish(lambda side: side.fail(why))

    def __enter__(self) -> Self:
        return self.join()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.leave()
        elif isinstance(error, TaskLostError):
            self.leave(linger_s=0.0)  # all know of that loss; that it ended this task too tells them nothing
        else:
            self.fail(in_words(error))

    def __repr__(self) -> str:
        return f"<Membership of {self.task} in a cluster of {self.size}>"

    # Who is lost

    @property
    def lost(self) -> TaskLost | None:
        """The first task that was lost; None if no task is lost."""
        return self._losses[0] if self._losses else None

    @property
    def losses(self) -> tuple[TaskLost, ...]:
        """All lost tasks, in the order of notice; also this task, if the others have declared it lost."""
        return self._losses

    def on_lost(self, callback: Callable[[TaskLost], None]) -> None:
        """Calls a function with each lost task, in a separate thread; for tasks that are lost already, at once."""
        with self._lock:
            self._callbacks.append(callback)
            known = self._losses
        if known:
            _call_later([(callback, lost) for lost in known])

    def raise_if_lost(self) -> None:
        """Raises an error if a task is lost.

        Raises:
            TaskLostError: A task is lost; the error says which task, where it ran and why.
        """
        if self._losses:
            first, *others = self._losses
            then = f"; then also {', '.join(lost.member.task for lost in others)}" if others else ""
            raise TaskLostError(f"{first}{then}")

    # What the tasks tell each other

    def set(self, key: str, value: bytes) -> None:
        """Stores a value of up to 64 KiB, which all tasks can read."""
        check_value(key, value)
        self._ask(ValueRequest("set", (key,), (value,)))

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Stores several values at once, 512 KiB together at most."""
        for key, value in values.items():
            check_value(key, value)
        self._ask(ValueRequest("set", tuple(values), tuple(values.values())))

    def get(self, key: str, *, wait: bool = True, timeout_s: float = _WAIT_S) -> bytes:
        """Returns a value that a task has stored.

        Args:
            wait: Whether to wait until a task has stored it.
            timeout_s: How long to wait.

        Raises:
            ClusterTimeoutError: No task has stored it in time.
            TaskLostError: A task was lost during the wait.
        """
        return self._ask(ValueRequest("get", (key,), timeout_s=timeout_s if wait else 0.0)).values[0]

    def get_many(self, keys: Sequence[str], timeout_s: float = _WAIT_S) -> tuple[bytes, ...]:
        """Waits for several values and returns them, 512 KiB together at most."""
        return self._ask(ValueRequest("get", tuple(keys), timeout_s=timeout_s)).values if keys else ()

    def wait(self, keys: Sequence[str], timeout_s: float = _WAIT_S) -> None:
        """Waits until all keys have values."""
        if keys:
            self._ask(ValueRequest("check", tuple(keys), timeout_s=timeout_s))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys have values now."""
        return not keys or bool(self._ask(ValueRequest("check", tuple(keys))).number)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number that starts at 0; returns the sum."""
        return self._ask(ValueRequest("add", (key,), amount=amount)).number

    def append(self, key: str, value: bytes) -> None:
        """Adds bytes to the end of a value that starts empty."""
        check_value(key, value)
        self._ask(ValueRequest("append", (key,), (value,)))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Stores a value if the current value is the expected one; `b""` expects that there is no value yet.

        Returns the value after the call, or the expected value if there is none.
        """
        check_value(key, expected)
        check_value(key, desired)
        return self._ask(ValueRequest("compare_set", (key,), (expected, desired))).values[0]

    def delete(self, key: str) -> bool:
        """Removes a value; returns whether there was one."""
        return bool(self._ask(ValueRequest("delete", (key,))).number)

    def num_keys(self) -> int:
        """Returns the number of values."""
        return self._ask(ValueRequest("num_keys")).number

    def sign(self, message: bytes) -> bytes:
        """Returns a signature of a message, 32 bytes that only tasks of this cluster can compute."""
        return tokens.load(None if self._token_file is None else os.fspath(self._token_file)).sign(message)

    def keep(self, user: object) -> None:
        """Keeps a reference to an object until this task leaves."""
        self._kept.append(user)

    def _begin(self) -> Keeper | Follower:
        """Starts the thread and whatever this task listens with."""
        if self.is_keeper and self._server is None:
            self._server = Server(
                self.spec,
                self.task.job,
                self.task.index,
                token_file=self._token_file,
                allow_all_interfaces=self._everywhere,
            )
        if self._server is not None:
            self._server.start()
            self._thread, token = self._server.thread, self._server.token
        else:
            token = tokens.load(None if self._token_file is None else os.fspath(self._token_file))
            self._thread.start()
        if self.is_keeper and self._server is not None:
            keeper = Keeper(self._introduction, self.participants, self._rhythm, self._note_lost)
            self._server.handle(MessageKind.JOIN, keeper.serve)
            return keeper
        address = self.participants[0].address
        if address is None:
            raise ClusterSpecError(f"{self.participants[0].name} is the keeper; give its address")
        return Follower(self._introduction, self.participants, address, token, self._rhythm, self._note_lost)

    def _finish(self, last_words: Callable[[Keeper | Follower], Coroutine[Any, Any, None]]) -> None:
        if self._side is not None and self.takes_part:
            self._has_joined = False
            try:
                self._thread.run(last_words(self._side))
            finally:
                self._stop()

    def _stop(self) -> None:
        self._kept.clear()
        if self._given_server is not None:
            self._given_server.handle(MessageKind.JOIN, None)
        elif self._server is not None:
            self._server.stop()
        else:
            self._thread.stop()

    def _is_forked(self) -> bool:
        """Whether this process is a child that only looks like the task."""
        return os.getpid() != self._introduction.pid

    def _joined_side(self) -> Keeper | Follower:
        if self._is_forked():
            raise ClusterError(f"this process was forked from {self.task.name} and is not a task of the cluster")
        if self._side is None or not self._has_joined:
            raise ClusterError(f"{self.task.name} does not take part in its cluster now; call join() first")
        return self._side

    def _ask(self, request: ValueRequest) -> Reply:
        reply = self._thread.run(self._joined_side().request(request))
        if reply.status == OK:
            return reply
        if reply.status == TIMEOUT:
            waited = f" within {request.timeout_s:g} s" if request.timeout_s else ""
            raise ClusterTimeoutError(
                f"no task has set {' and '.join(map(repr, request.keys))}{waited}; {self.task.name} asked for it"
            )
        if reply.status == LOST:
            self.raise_if_lost()
            raise TaskLostError(f"a task was lost while {self.task.name} waited for {request.keys}")
        raise ClusterError(reply.message)

    def _note_lost(self, lost: TaskLost) -> None:
        """Is called in the thread of the sockets, which must not wait for anybody."""
        log.info("%s: %s", self.task.name, lost)
        with self._lock:
            self._losses += (lost,)
            callbacks = list(self._callbacks)
        if callbacks:
            _call_later([(callback, lost) for callback in callbacks])


def _participants(spec: ClusterSpec, task: Task, jobs: Sequence[str] | None) -> list[Task]:
    chosen = spec.jobs if jobs is None else [job for job in spec.jobs if job in jobs]
    found = [each for each in spec.tasks if each.job in chosen]
    if task not in found:
        raise ClusterSpecError(f"{task.name} is not of the jobs that take part: {', '.join(chosen) or 'none'}")
    return found


def _call_later(calls: Sequence[tuple[Callable[[TaskLost], None], TaskLost]]) -> None:
    """Calls functions of the program in a thread of their own: they may take as long as they like."""

    def call_all() -> None:
        for callback, lost in calls:
            try:
                callback(lost)
            except Exception:
                log.exception("a callback of on_lost has failed")

    threading.Thread(target=call_all, name="stratagem-lost", daemon=True).start()
