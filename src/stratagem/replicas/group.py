"""Drives the children of one strategy from the controller: starts, calls, watches, stops them.

Owns the judgement of who has died or stalled, and the choice of the one error that is shown.
Knows nothing of what the calls do.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from stratagem.devices.device import mib
from stratagem.devices.host import Host
from stratagem.errors import ReplicaDiedError, ReplicaError, ReplicaStalledError, StratagemError, StrategyError
from stratagem.replicas import launcher
from stratagem.replicas.child import DONE, PRINTED
from stratagem.replicas.functions import find_unsendable
from stratagem.replicas.registry import Registry
from stratagem.replicas.wire import Packed, Wire, can_be_packed, pack

_STATUS_WAIT_S = 2.0
_STOP_GRACE_S = 2.0
_SLICE_S = 0.1
_MAX_ROUNDS = 1000
_STOPPED, _ENDED = frozenset({"T", "t"}), frozenset({"Z", "X", "gone"})

Failure = tuple[BaseException | None, str, str]


@final
class Replica:
    """A child, as the controller sees it."""

    def __init__(self, number: int, pid: int, wire: Wire) -> None:
        self.number = number
        self.pid = pid
        self.wire = wire
        self.num_calls = 0
        self.busy = False
        self.answer: Any = None
        self.failure: Failure | None = None

    def __str__(self) -> str:
        return f"replica {self.number} (pid {self.pid})"


@final
class ReplicaGroup:
    """The children of one strategy: replicas 1 and up.

    Args:
        num_children: How many.
        registry: The names of the distributed objects that calls may mention.
        stall_timeout_s: How long others may wait for a replica before it counts as stalled.
        host: The machine.
    """

    def __init__(
        self, num_children: int, *, registry: Registry, stall_timeout_s: float = 60.0, host: Host | None = None
    ) -> None:
        self._num_children = num_children
        self._registry = registry
        self.stall_timeout_s = stall_timeout_s
        self._poll = select.poll()
        self._by_descriptor: dict[int, Replica] = {}
        self._host = host or Host()
        self._num_oom_kills = 0
        self._orders: list[tuple[int, socket.socket]] = []
        self.replicas: list[Replica] = []
        self.run_number = 0
        self.on_failure: Callable[[], None] = lambda: None  # ends the waits of others for the one that failed
        self._server: launcher.ForkServer | None = None
        self._owner = os.getpid()

    def begin(self) -> None:
        """Asks for the children, without waiting for them."""
        self._num_oom_kills = self._host.num_oom_kills()
        self._server = launcher.acquire()
        try:
            for _ in range(self._num_children):
                self._orders.append(self._server.order())
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Waits for the children to be there; they wait for calls."""
        if self._server is None:
            self.begin()
        try:
            for number in range(1, self._num_children + 1):
                pid = self._server.started(self._orders[0][0])  # type: ignore[union-attr]
                _, sock = self._orders.pop(0)
                sock.settimeout(self.stall_timeout_s)
                wire = Wire(sock, self._registry.reference, self._registry.resolve, keeps_classes=True)
                replica = Replica(number, pid, wire)
                self.replicas.append(replica)
                self._by_descriptor[replica.wire.fileno()] = replica
                self._poll.register(replica.wire.fileno(), select.POLLIN)
        except BaseException:
            self.stop()
            raise

    def call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        reference: Callable[[Any], Any] | None = None,
    ) -> None:
        """Sends each child its call; `collect` brings the answers.

        Args:
            function: A function of the library.
            arguments: For each child its own.
            reference: How objects are named on the way, if not by the registry alone; may refuse some.
        """
        # All are packed before any is sent: what cannot be sent is an error before anything runs.
        packed = [self._pack((function, own), reference or self._registry.reference) for own in arguments]
        # The last first: one that shares this process' core comes after those that can begin beside it.
        for replica, message in reversed(list(zip(self.replicas, packed, strict=True))):
            self._send_packed(replica, message)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Sends every child the same call, packed once."""
        packed = self._pack((function, arguments), self._registry.reference)
        for replica in self.replicas:
            self._send_packed(replica, packed)

    def ask(self, replica: Replica, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in one child and waits for its answer."""
        self._send_packed(replica, self._pack((function, arguments), self._registry.reference))
        answers = self.collect()
        raise_first(None, [] if replica.failure is None else [(replica, replica.failure)])
        return answers[replica.number - 1]

    def collect(self, *, closing: bool = False) -> list[Any]:
        """Waits for all answers, in the order of the replicas.

        Args:
            closing: Whether to give up soon on a child that somebody has stopped.
        Raises:
            ReplicaDiedError: A child has ended.
            ReplicaStalledError: A child did not answer in time.
        """
        last_news = last_look = time.monotonic()
        while busy := [replica for replica in self.replicas if replica.busy]:
            has_news, now = self.attend(timeout_s=_SLICE_S), time.monotonic()
            if has_news:
                last_news = now
            elif now - last_news > self._patience_s(busy, closing=closing):
                self.report_stall(busy)
            if now - last_look > _SLICE_S:
                last_look = now
                self.require_alive()
        answers = [replica.answer for replica in self.replicas]
        for replica in self.replicas:
            replica.answer = None  # it is the caller's now, to keep or to drop
        return answers

    def _patience_s(self, busy: Sequence[Replica], *, closing: bool) -> float:
        is_vain = closing and any(map(_is_stopped, busy))
        return min(_STOP_GRACE_S, self.stall_timeout_s) if is_vain else self.stall_timeout_s

    def failures(self) -> list[tuple[Replica, Failure]]:
        """What went wrong in the last call, by replica."""
        return [(replica, replica.failure) for replica in self.replicas if replica.failure is not None]

    def attend(self, timeout_s: float = 0.0) -> bool:
        """Takes in what children have sent; tells whether anything has come."""
        events = first = self._poll.poll(1000 * timeout_s)
        for _ in range(_MAX_ROUNDS):
            if not events:
                break
            for descriptor, _ in events:
                self._take(self._by_descriptor[descriptor])
            events = self._poll.poll(0)  # a child that prints much must not wait for each line
        return bool(first)

    def require_alive(self) -> None:
        """Finds out who has ended without an answer, also if a process that it forked keeps its pipe open."""
        for replica in self.replicas:
            if replica.busy and _state(replica.pid) in _ENDED:
                self.attend()  # what it sent before
                if replica.busy:
                    self._report_death(replica)

    def report_stall(self, silent: Sequence[Replica]) -> None:
        """Raises the error that says who keeps the others waiting."""
        for replica in self.replicas:
            with contextlib.suppress(ProcessLookupError):
                os.kill(replica.pid, signal.SIGUSR2)  # writes its stacks to the log
        named = "; ".join(f"{replica}, state {_state(replica.pid)}" for replica in silent)
        raise ReplicaStalledError(
            f"{named} has not answered for {self.stall_timeout_s:.1f} s in run {self.run_number} while others wait. "
            f"Its stack is in the log above; raise stall_timeout_s if it only needs more time"
        )

    def stop(self) -> None:
        """Ends all children: politely, then at once."""
        if self._server is None or os.getpid() != self._owner:
            return
        server, self._server = self._server, None
        try:
            for replica in self.replicas:
                replica.wire.shut()
            # Those that wait for a call leave now; the others would not hear of it.
            self._await_end(server, [each for each in self.replicas if not each.busy and not _is_stopped(each)])
        finally:
            left = [replica for replica in self.replicas if server.status_of(replica.pid, 0.0) is None]
            for replica in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(replica.pid, signal.SIGKILL)
            self._await_end(server, left)
            for replica in self.replicas:
                replica.wire.close()
            self.replicas.clear()
            for _, sock in self._orders:
                sock.close()  # whoever comes to be at its other end leaves at once
            self._orders.clear()
            launcher.release()

    def _await_end(self, server: launcher.ForkServer, replicas: Sequence[Replica]) -> None:
        deadline = time.monotonic() + _STOP_GRACE_S
        for replica in replicas:
            server.status_of(replica.pid, deadline - time.monotonic())

    def _pack(self, message: Any, reference: Callable[[Any], Any]) -> Packed:
        try:
            return pack(message, reference)
        except StratagemError:
            raise
        except Exception as error:
            part, where = find_unsendable(message, lambda each: can_be_packed(each, reference))
            raise StrategyError(
                f"a {type(part).__name__} cannot be sent to the replicas{f' ({where})' if where else ''}: {error}. "
                f"Make it inside the function, or leave it out"
            ) from error

    def _send_packed(self, replica: Replica, packed: Packed) -> None:
        # Before the first byte: whatever happens from here on, it is not idle, and older answers are not its answer.
        replica.num_calls += 1
        replica.busy, replica.answer, replica.failure = True, None, None
        try:
            replica.wire.send_packed(packed)
        except (BrokenPipeError, ConnectionResetError):
            self._report_death(replica)
        except TimeoutError:
            self.report_stall([replica])

    def _take(self, replica: Replica) -> None:
        try:
            kind, *content = replica.wire.receive()
        except (EOFError, ConnectionResetError):
            self._report_death(replica)
        except TimeoutError:
            self.report_stall([replica])
        if kind == PRINTED:
            self._show(replica, *content)
            return
        number, outcome = content
        if number != replica.num_calls:
            return  # to a call that was given up
        replica.busy = False
        if kind == DONE:
            replica.answer = outcome
        else:
            replica.failure = outcome
            self.on_failure()

    def _show(self, replica: Replica, stream: str, text: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        for line in text.split("\n"):
            print(f"[replica {replica.number}] {line}", file=target)

    def _report_death(self, replica: Replica) -> None:
        status = self._server.status_of(replica.pid, _STATUS_WAIT_S) if self._server else None
        how = launcher.describe_status(status)
        raise ReplicaDiedError(f"{replica} {how} in run {self.run_number}{self._oom_hint(status)}")

    def _oom_hint(self, status: int | None) -> str:
        if status is None or not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return ""
        before, now = self._num_oom_kills, self._host.num_oom_kills()
        if now > before:
            return (
                f"; probably out of memory: cgroup oom_kill rose from {before} to {now}, "
                f"limit {mib(self._host.total_memory_bytes())}"
            )
        return "; if nobody killed it, it was probably out of memory (`dmesg` tells)"


def raise_first(own: BaseException | None, failures: Sequence[tuple[Replica, Failure]]) -> None:
    """Raises the one error that is the cause, with its own traceback; the rest are consequences."""
    for replica, _ in failures:
        replica.failure = None  # once raised, it leads to all that the program has
    if own is not None:
        raise own
    if not failures:
        return
    _, (error, line, text) = failures[0]
    same = [str(other.number) for other, failure in failures if failure[1] == line]
    where = f"replica{'s' if len(same) > 1 else ''} {', '.join(same)}"
    raised = error if error is not None else ReplicaError(f"{where} raised {line}")
    raised.add_note(f"raised in {where}:\n{text}")
    raise raised


def _is_stopped(replica: Replica) -> bool:
    return _state(replica.pid) in _STOPPED


def _state(pid: int) -> str:
    """The state letter of a process: R runs, S sleeps, T is stopped, Z has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split(maxsplit=1)[0]
    except OSError:
        return "gone"
