"""Drives the children of one strategy from the controller: starts, calls, watches, stops them.

Owns the judgement of who has died or stalled, and the choice of the one error that is shown.
Knows nothing of what the calls do.
"""

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from stratagem._clock import Clock
from stratagem.devices.host import Host
from stratagem.errors import ReplicaDiedError, ReplicaError, ReplicaStalledError
from stratagem.processes.child import DONE, PRINTED
from stratagem.processes.children import Channel, Children, Process
from stratagem.processes.launcher import ForkedChildren
from stratagem.processes.packing import Packed, pack_for
from stratagem.processes.registry import Registry

_STATUS_WAIT_S = 2.0
_STOP_GRACE_S = 2.0
_SLICE_S = 0.1
_MAX_ROUNDS = 1000

Failure = tuple[BaseException | None, str, str]


@final
class Replica:
    """A child, as the controller sees it."""

    def __init__(self, number: int, process: Process, wire: Channel) -> None:
        self.number = number
        self.process = process
        self.wire = wire
        self.num_calls = 0
        self.busy = False
        self.answer: Any = None
        self.failure: Failure | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def __str__(self) -> str:
        return f"replica {self.number} ({self.process})"


@final
class ReplicaGroup:
    """The children of one strategy: replicas 1 and up.

    Args:
        num_children: How many.
        registry: The names of the distributed objects that calls may mention.
        stall_timeout_s: How long others may wait for a replica before it counts as stalled.
        host: The machine.
        children: Where they come from; by default they are forked on this machine.
    """

    def __init__(
        self,
        num_children: int,
        *,
        registry: Registry,
        stall_timeout_s: float = 60.0,
        host: Host | None = None,
        children: Children | None = None,
    ) -> None:
        self._num_children = num_children
        self._registry = registry
        self.stall_timeout_s = stall_timeout_s
        self._poll = select.poll()
        self._by_descriptor: dict[int, Replica] = {}
        self._children = children or ForkedChildren(host)
        self.replicas: list[Replica] = []
        self.run_number = 0
        self.on_failure: Callable[[], None] = lambda: None  # ends the waits of others for the one that failed
        self._has_begun = False
        self._owner = os.getpid()

    def begin(self) -> None:
        """Asks for the children, without waiting for them."""
        self._has_begun = True
        try:
            self._children.begin(self._num_children)
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Waits for the children to be there; they wait for calls."""
        if not self._has_begun:
            self.begin()
        try:
            started = self._children.start(self._registry, self.stall_timeout_s)
            for number, (process, wire) in enumerate(started, start=1):
                replica = Replica(number, process, wire)
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
        clock = Clock(_SLICE_S)
        last_news = last_look = clock.now_s()
        while busy := [replica for replica in self.replicas if replica.busy]:
            has_news, now = self.attend(timeout_s=_SLICE_S), clock.now_s()
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
        is_vain = closing and any(replica.process.is_stopped for replica in busy)
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
            if replica.busy and replica.process.has_ended():
                self.attend()  # what it sent before
                if replica.busy:
                    self._report_death(replica)

    def report_stall(self, silent: Sequence[Replica]) -> None:
        """Raises the error that says who keeps the others waiting."""
        for replica in self.replicas:
            replica.process.show_stack()
        named = "; ".join(f"{replica}, state {replica.process.state}" for replica in silent)
        raise ReplicaStalledError(
            f"{named} has not answered for {self.stall_timeout_s:.1f} s in run {self.run_number} while others wait. "
            f"Its stack is in the log above; raise stall_timeout_s if it only needs more time"
        )

    def abort(self) -> None:
        """Ends the waits of all children in this run: another has failed."""
        self._children.abort(self.run_number)

    def stop(self) -> None:
        """Ends all children: politely, then at once."""
        if not self._has_begun or os.getpid() != self._owner:
            return
        self._has_begun = False
        try:
            for replica in self.replicas:
                replica.wire.shut()
            # Those that wait for a call leave now; the others would not hear of it.
            _await_end([each for each in self.replicas if not each.busy and not each.process.is_stopped])
        finally:
            left = [replica for replica in self.replicas if not replica.process.wait(0.0)]
            for replica in left:
                replica.process.kill()
            _await_end(left)
            for replica in self.replicas:
                replica.wire.close()
            self.replicas.clear()
            self._children.release()

    def _pack(self, message: Any, reference: Callable[[Any], Any]) -> Packed:
        return pack_for("the replicas", message, reference)

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
        how, more = replica.process.how_it_ended(_STATUS_WAIT_S)
        raise ReplicaDiedError(f"{replica} {how} in run {self.run_number}{more}")


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


def _await_end(replicas: Sequence[Replica]) -> None:
    deadline = time.monotonic() + _STOP_GRACE_S
    for replica in replicas:
        replica.process.wait(max(0.0, deadline - time.monotonic()))
