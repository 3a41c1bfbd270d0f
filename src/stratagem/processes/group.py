"""Drives the child processes of one strategy: starts, calls, watches, replaces and stops them.

Each member has a queue of calls; one place takes in what members send, and one finds those that are
lost. What calls do is unknown here. What a loss means is the policy's (`losses`), and what becomes of
the calls of a lost member is decided by whoever made them.
"""

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from stratagem._clock import Clock
from stratagem.devices.host import Host
from stratagem.errors import ReplicaDiedError, ReplicaStalledError, StrategyError
from stratagem.processes import losses
from stratagem.processes.child import DONE, PRINTED
from stratagem.processes.children import ChildChannel, Children, Process
from stratagem.processes.launcher import ForkedChildren
from stratagem.processes.losses import END, SLICE_S, STATUS_WAIT_S, STOP_GRACE_S, STOPPED_S, End, Failure, Fatal, Losses
from stratagem.processes.numbered import label, plain
from stratagem.processes.packing import Packed, pack_for
from stratagem.processes.registry import Registry

_MAX_ROUNDS = 1000  # of messages that are taken in before anything else is looked at


class PendingCall:
    """A call of a function in a member, and what came of it."""

    def __init__(self) -> None:
        self.number = 0  # which call of its member, as both ends count
        self.done_by = 0  # which member has it
        self.is_done = False
        self.answer: Any = None
        self.failure: Failure | None = None

    def finish(self, answer: Any = None, failure: Failure | None = None) -> None:
        """Takes the answer, or the failure."""
        self.answer, self.failure, self.is_done = answer, failure, True


@final
class GroupMember:
    """A child, as the main program sees it.

    Args:
        noun: What it is, in messages.
        number: Its place: a new process in the place of a lost one has the same.
        process: Its process.
        channel: The way to it.
    """

    def __init__(self, noun: str, number: int, process: Process, channel: ChildChannel) -> None:
        self.number = number
        self.process = process
        self.channel = channel
        self.calls: deque[PendingCall] = deque()  # those that it has been sent and has not answered
        self.last_call = PendingCall()  # of those that go to all members at once
        self.num_calls = 0
        self.last_message_s = 0.0  # or when it got something to do, by the clock of its group
        self.stopped_since_s: float | None = None
        self.killed_because = ""
        self.is_leaving = False  # it is not replaced
        self._noun = noun

    @property
    def pid(self) -> int:
        return self.process.pid

    def __str__(self) -> str:
        return f"{self._noun} {self.number} ({self.process})"


def _nothing(*_: Any) -> None:
    """Nobody is told."""


@final
class ChildGroup:
    """The child processes of one strategy.

    Args:
        registry: The names of the distributed objects that calls may mention.
        noun: What members are, in messages.
        depth: How many calls a member has at a time.
        policy: What the loss of a member means.
        stall_timeout_s: How long a member may keep others waiting before it counts as stalled.
        host: The machine.
        children: Where members come from; by default they are forked on this machine.
        on_start: Gives a new member all that it must know.
        on_loss: Takes the calls of a member that is lost and will be replaced, and why it was lost.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        noun: str = "replica",
        depth: int = 1,
        policy: losses.Policy = END,
        stall_timeout_s: float = 60.0,
        host: Host | None = None,
        children: Children | None = None,
        on_start: Callable[[GroupMember], None] = _nothing,
        on_loss: Callable[[GroupMember, str], None] = _nothing,
    ) -> None:
        self.members: dict[int, GroupMember] = {}  # those whose processes are there, by number
        self.stall_timeout_s = stall_timeout_s
        self.run_number = 0
        self.losses = Losses()
        # Told of each call that failed; where members wait for each other, it ends those waits.
        self.on_failure: Callable[[GroupMember, PendingCall], None] = _nothing
        self._registry = registry
        self._noun, self._depth, self._policy = noun, depth, policy
        self._children = children or ForkedChildren(host)
        self._on_start, self._on_loss = on_start, on_loss
        self._ordered: list[int | None] = []  # members whose processes were not waited for; `None` if taken back
        self._poll = select.poll()
        self._by_descriptor: dict[int, GroupMember] = {}
        self._clock = Clock(SLICE_S)
        self._last_look_s = 0.0
        self._has_begun = False
        self._owner = os.getpid()

    # Members

    def begin(self, numbers: Sequence[int]) -> None:
        """Orders processes, without waiting for them."""
        self._has_begun = True
        self._ordered += numbers
        self._children.begin(len(numbers))

    def start(self) -> None:
        """Waits for the processes that were ordered; they wait for calls."""
        for process, channel in self._children.start(self._registry, self.stall_timeout_s):
            number = self._ordered.pop(0)
            if number is None:
                channel.close()  # it leaves at once
                continue
            member = GroupMember(self._noun, number, process, channel)
            self.members[member.number] = member
            self._by_descriptor[channel.fileno()] = member
            self._poll.register(channel.fileno(), select.POLLIN)
            self._on_start(member)

    def end(self, number: int) -> None:
        """Ends one member, politely if it has nothing to do; one that was only ordered is taken back."""
        if number in self._ordered:
            self._ordered[self._ordered.index(number)] = None
        elif number in self.members:
            member = self.members[number]
            self._forget(member)
            member.channel.shut()
            _end_processes([member])
            member.channel.close()

    def stop(self) -> None:
        """Ends all members: politely, then at once."""
        if not self._has_begun or os.getpid() != self._owner:
            return
        self._has_begun = False
        members = list(self.members.values())
        try:
            for member in members:
                member.channel.shut()
            _end_processes(members)
        finally:
            for member in members:
                self._forget(member)
                member.channel.close()
            self._ordered.clear()
            self._children.release()

    def abort(self) -> None:
        """Ends the waits of all members in this run: another has failed."""
        self._children.abort(self.run_number)

    # Calls

    def has_room(self, member: GroupMember) -> bool:
        """Whether a member may be given another call."""
        return len(member.calls) < self._depth

    def pack(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], reference: Callable[[Any], Any] | None = None
    ) -> Packed:
        """A call as it travels.

        Args:
            function: What is called.
            arguments: Its arguments.
            reference: How objects are named on the way, if not by the registry alone; may refuse some.
        """
        return self._packed((function, *arguments), reference)

    def _packed(self, message: tuple[Any, ...], reference: Callable[[Any], Any] | None) -> Packed:
        return pack_for(f"the {self._noun}s", message, reference or self._registry.reference)

    def submit(self, member: GroupMember, packed: Packed, call: PendingCall) -> bool:
        """Sends a call, without waiting for its answer; whether it was taken.

        If not, the member was lost, and its calls were dealt with.
        """
        if self.members.get(member.number) is not member:
            call.finish()  # it was lost before, and who takes its place is told everything
            return False
        if not member.calls:
            member.last_message_s = self._clock.now_s()  # it was silent because it had nothing to do
        # Before the first byte: whatever happens from here on, it is not idle.
        member.num_calls += 1
        call.number, call.done_by = member.num_calls, member.number
        member.calls.append(call)
        try:
            member.channel.send_packed(packed)
        except (BrokenPipeError, ConnectionResetError):
            self._lose(member)
        except TimeoutError:
            self._lose_stalled(member)
        return self.members.get(member.number) is member

    def poll(self, timeout_s: float = 0.0, after_round: Callable[[], object] = _nothing) -> bool:
        """Takes in what members have sent; tells whether anything has come.

        Args:
            timeout_s: How long to wait for something.
            after_round: Called when something was taken in, before more is.
        """
        events = first = self._poll.poll(1000 * timeout_s) if self._by_descriptor else []
        for _ in range(_MAX_ROUNDS):
            if not events:
                break
            for descriptor, _ in events:
                if (member := self._by_descriptor.get(descriptor)) is not None:  # else it was lost meanwhile
                    self._take(member)
            after_round()
            events = self._poll.poll(0)  # a member that prints much must not wait for each line
        return bool(first)

    def _take(self, member: GroupMember) -> None:
        """Takes in the next message of a member: an answer, or what it printed."""
        member.last_message_s = self._clock.now_s()
        try:
            self._receive(member)
        except (EOFError, ConnectionResetError):
            self._lose(member)
        except TimeoutError:
            self._lose_stalled(member)

    def _receive(self, member: GroupMember) -> None:
        kind, *content = member.channel.receive()
        if kind == PRINTED:
            self._show(member, *content)
            return
        number, outcome = content
        for call in member.calls:
            if call.number == number:
                break
        else:
            return  # it was given up
        member.calls.remove(call)
        if kind == DONE:
            call.finish(outcome)
        else:
            call.finish(failure=outcome)
            self.on_failure(member, call)

    def _show(self, member: GroupMember, stream: str, text: str) -> None:
        target = plain(sys.stderr if stream == "stderr" else sys.stdout)
        for line in text.split("\n"):
            print(f"{label(self._noun, member.number)}{line}", file=target)

    # One call on all members

    def call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        reference: Callable[[Any], Any] | None = None,
        *,
        shared: tuple[Any, ...] = (),
    ) -> None:
        """Sends each member its call; `collect` brings the answers.

        Args:
            function: A function of the library.
            arguments: For each member its own.
            reference: How objects are named on the way, if not by the registry alone; may refuse some.
            shared: Arguments before these that are the same for all, and packed once: what is in them as well as in
                those of one member is there twice.
        """
        # All are packed before any is sent: what cannot be sent is an error before anything runs.
        first = self.pack(function, shared, reference)
        packed = [first.followed_by(self._packed(own, reference)) for own in arguments]
        # The last first: one that shares this process' core comes after those that can begin beside it.
        for member, message in reversed(list(zip(self.members.values(), packed, strict=True))):
            self._submit_alone(member, message)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Sends every member the same call, packed once."""
        packed = self.pack(function, arguments)
        for member in self.members.values():
            self._submit_alone(member, packed)

    def ask(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in one member and waits for its answer."""
        call = self._submit_alone(self.members[number], self.pack(function, arguments))
        answers = dict(zip(self.members, self.collect(), strict=True))
        losses.raise_first(None, [call])
        return answers[number]

    def collect(self, *, closing: bool = False) -> list[Any]:
        """Waits for all answers, in the order of the members.

        Args:
            closing: Whether to give up soon on a member that somebody has stopped.
        Raises:
            ReplicaDiedError: A member has ended.
            ReplicaStalledError: A member did not answer in time.
        """
        last_message_s = self._clock.now_s()
        while busy := [member for member in self.members.values() if member.calls]:
            has_come, now_s = self.poll(SLICE_S), self._clock.now_s()
            if has_come:
                last_message_s = now_s
            elif now_s - last_message_s > self._patience_s(busy, closing=closing):
                self._report_stall(busy)
            self.reap()
        answers = []
        for member in self.members.values():
            answers.append(member.last_call.answer)
            member.last_call.answer = None  # it is the caller's now, to keep or to drop
        return answers

    def failures(self, besides: type[BaseException] | None = None) -> list[PendingCall]:
        """What went wrong in the last calls.

        Args:
            besides: The error of members that only ended because another failed.
        """
        calls = [member.last_call for member in self.members.values()]
        return [
            call
            for call in calls
            if call.failure is not None and (besides is None or not isinstance(call.failure[0], besides))
        ]

    def watch(self, waited_s: float, missing: Sequence[int]) -> None:
        """Takes in messages while this process waits for members, and makes sure that they still live.

        Args:
            waited_s: How long it has waited.
            missing: For whom.
        Raises:
            Fatal: One is dead or stalled.
        """
        try:
            self.poll()
            self.reap()
            if waited_s > self.stall_timeout_s:
                self._report_stall([self.members[number] for number in missing])
        except StrategyError:
            raise
        except Exception as error:
            raise Fatal(error) from error

    def _submit_alone(self, member: GroupMember, packed: Packed) -> PendingCall:
        """Sends a call whose member must have no other: one that it has was given up, its answer is dropped."""
        member.calls.clear()
        call = member.last_call = PendingCall()
        self.submit(member, packed, call)
        return call

    def _patience_s(self, busy: Sequence[GroupMember], *, closing: bool) -> float:
        is_vain = closing and any(member.process.is_stopped for member in busy)
        return min(STOP_GRACE_S, self.stall_timeout_s) if is_vain else self.stall_timeout_s

    # Losses

    def reap(self) -> None:
        """Finds members with calls that will not answer, now and then.

        Those that have ended; where they are replaced, also those that were stopped or are silent for too long.
        Elsewhere members wait for each other, and only who waits knows who is late (`collect`, `watch`).
        """
        now_s = self._clock.now_s()
        if now_s - self._last_look_s <= SLICE_S:
            return
        self._last_look_s = now_s
        for member in [each for each in self.members.values() if each.calls]:
            if member.process.has_ended():
                self._take_rest(member)
                if member.calls:
                    self._lose(member)
            elif not isinstance(self._policy, End):
                self._reap_silent(member, now_s)

    def _reap_silent(self, member: GroupMember, now_s: float) -> None:
        if member.process.is_stopped:
            member.stopped_since_s = member.stopped_since_s or now_s
            if now_s - member.stopped_since_s > STOPPED_S:
                self._lose(member, losses.stopped(STOPPED_S))
            return
        member.stopped_since_s = None
        if now_s - member.last_message_s > self.stall_timeout_s:
            self._lose_stalled(member)

    def kill_holder(self, pid: int, waited_s: float) -> None:
        """Kills a member that keeps a lock for which this process waits, if it is stopped or stalls; `poll` finds it.

        Args:
            pid: Whose lock it is.
            waited_s: For how long it was waited for.
        """
        for member in self.members.values() if waited_s > STOPPED_S else ():
            is_stopped = member.pid == pid and member.process.is_stopped
            if is_stopped or (member.pid == pid and waited_s > self.stall_timeout_s):
                member.killed_because = losses.stopped(waited_s) if is_stopped else losses.kept_a_lock(waited_s)
                member.process.kill()

    def _lose_stalled(self, member: GroupMember) -> None:
        if isinstance(self._policy, End):
            self._report_stall([member])
        member.process.show_stack()
        self._lose(member, losses.stalled(self.stall_timeout_s))

    def _lose(self, member: GroupMember, why: str = "") -> None:
        """Ends the group, or replaces the member."""
        why = why or member.killed_because
        how, more = (why, "") if why else member.process.how_it_ended(STATUS_WAIT_S)
        if isinstance(self._policy, End):
            raise ReplicaDiedError(losses.died(str(member), how, more, self.run_number)) from None
        _kill([member])
        self._take_rest(member)
        self._forget(member)
        member.channel.close()
        cause = losses.died(str(member), how, more)
        self._on_loss(member, cause)
        member.calls.clear()
        if not member.is_leaving:
            self.losses.note(cause, self._policy, time.monotonic())
            self.begin([member.number])
            self.start()

    def _take_rest(self, member: GroupMember) -> None:
        """Takes in what a member sent before its end: what it has answered, nobody does again."""
        only = select.poll()  # a process that it has forked may keep its pipe open
        only.register(member.channel.fileno(), select.POLLIN)
        with contextlib.suppress(EOFError, ConnectionResetError, TimeoutError):
            while only.poll(0):
                self._receive(member)

    def _report_stall(self, silent: Sequence[GroupMember]) -> None:
        """Raises the error that says who keeps the others waiting."""
        for member in self.members.values():
            member.process.show_stack()
        named = [f"{member}, state {member.process.state}" for member in silent]
        raise ReplicaStalledError(losses.stalled_together(named, self.stall_timeout_s, self.run_number))

    def _forget(self, member: GroupMember) -> None:
        descriptor = member.channel.fileno()
        self._poll.unregister(descriptor)
        del self._by_descriptor[descriptor], self.members[member.number]


def _end_processes(members: Sequence[GroupMember]) -> None:
    """Ends the processes of members whose channels are shut."""
    try:
        # Those that wait for a call leave now; the others would not hear of it.
        _await_end([member for member in members if not member.calls and not member.process.is_stopped])
    finally:
        _kill(members)


def _kill(members: Sequence[GroupMember]) -> None:
    left = [member for member in members if not member.process.wait(0.0)]
    for member in left:
        member.process.kill()
    _await_end(left)


def _await_end(members: Sequence[GroupMember]) -> None:
    deadline = time.monotonic() + STOP_GRACE_S
    for member in members:
        member.process.wait(max(0.0, deadline - time.monotonic()))
