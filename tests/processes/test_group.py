"""A group of real child processes: queues of calls, and what the loss of a member means."""

import contextlib
import gc
import os
import select
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.errors import ReplicaDiedError
from stratagem.processes.group import ChildGroup, GroupMember, PendingCall
from stratagem.processes.losses import SLICE_S, Losses, Replace
from stratagem.processes.registry import Registry

PATIENCE_S = 20.0


@contextlib.contextmanager
def group_of(numbers: list[int], **options: Any) -> Iterator[ChildGroup]:
    group = ChildGroup(Registry(), **options)
    try:
        group.begin(numbers)
        group.start()
        yield group
    finally:
        group.stop()


def submit(group: ChildGroup, number: int, function: Callable[..., Any], *arguments: Any) -> PendingCall:
    call = PendingCall()
    group.submit(group.members[number], group.pack(function, arguments), call)
    return call


def wait_until(group: ChildGroup, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        group.poll(SLICE_S)
        group.reap()


def wait_for_file(path: str) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getpid()


def test_members_have_queues_of_calls_that_are_answered_in_order(fork_server: None, tmp_path: Path) -> None:
    with group_of([4, 7], depth=2) as group:
        assert list(group.members) == [4, 7]
        waiting = submit(group, 4, wait_for_file, str(tmp_path / "go"))
        assert group.has_room(group.members[4])
        second, other = submit(group, 4, divmod, 7, 2), submit(group, 7, divmod, 7, 0)
        assert not group.has_room(group.members[4])
        failed: list[tuple[int, PendingCall]] = []
        group.on_failure = lambda member, call: failed.append((member.number, call))
        wait_until(group, lambda: other.is_done)
        assert [(number, call) for number, call in failed] == [(7, other)]
        assert other.failure is not None
        assert other.failure[1].startswith("ZeroDivisionError")
        assert not waiting.is_done
        assert not second.is_done
        (tmp_path / "go").touch()
        wait_until(group, lambda: second.is_done)
        assert waiting.answer == group.members[4].pid
        assert (second.answer, second.done_by) == ((3, 1), 4)


def test_group_does_not_keep_calls_that_are_answered(fork_server: None) -> None:
    with group_of([0], depth=2) as group:
        calls = [submit(group, 0, os.getpid)]
        wait_until(group, lambda: calls[0].is_done)
        kept = weakref.ref(calls.pop())
        gc.collect()
        assert kept() is None


def test_lost_member_is_replaced_and_its_calls_are_handed_back(fork_server: None, tmp_path: Path) -> None:
    started: list[GroupMember] = []
    lost: list[tuple[GroupMember, list[PendingCall], str]] = []
    with group_of(
        [0, 1],
        noun="worker",
        depth=2,
        policy=Replace(max_restarts=1, window_s=600.0),
        on_start=started.append,
        on_loss=lambda member, cause: lost.append((member, list(member.calls), cause)),
    ) as group:
        killed = group.members[1]
        calls = [submit(group, 1, wait_for_file, str(tmp_path / "never")), submit(group, 1, os.getpid)]
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(group, lambda: len(started) == 3)
        assert [(member, given_back) for member, given_back, _ in lost] == [(killed, calls)]
        assert lost[0][2].startswith(f"worker 1 (pid {killed.pid}) was killed by SIGKILL")
        assert [member.number for member in started] == [0, 1, 1]
        again = submit(group, 1, os.getpid)
        wait_until(group, lambda: again.is_done)
        assert again.answer == group.members[1].pid != killed.pid
        assert not submit_to(group, killed)
        os.kill(group.members[0].pid, signal.SIGKILL)
        with pytest.raises(
            ReplicaDiedError, match=r"gave up after 1 restarts in 600 s: worker 1 .*; worker 0 .*SIGKILL"
        ):
            wait_until(group, lambda: len(started) == 4)


@pytest.mark.parametrize("noticed_by", ["submit", "silence"])
def test_answer_that_a_lost_member_has_sent_counts(fork_server: None, noticed_by: str) -> None:
    """Else another would do the same again: a worker of a parameter server pushes its gradients in a call."""
    lost: list[list[PendingCall]] = []
    with group_of(
        [0],
        depth=3,
        policy=Replace(max_restarts=1, window_s=600.0),
        stall_timeout_s=0.2,
        on_loss=lambda member, _: lost.append(list(member.calls)),
    ) as group:
        member = group.members[0]
        answered = submit(group, 0, os.getpid)
        sent = select.poll()
        sent.register(member.channel.fileno(), select.POLLIN)
        assert sent.poll(1000 * PATIENCE_S)
        if noticed_by == "submit":
            os.kill(member.pid, signal.SIGKILL)
            assert member.process.wait(PATIENCE_S)
            other = submit(group, 0, divmod, 7, 2)
        else:
            other = submit(group, 0, time.sleep, PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while not lost and time.monotonic() < deadline:
                group.reap()
                time.sleep(0.01)
        assert lost == [[other]]
        assert answered.answer == member.pid


def submit_to(group: ChildGroup, member: GroupMember) -> bool:
    """Whether a member takes a call; one that was lost does not, and nobody waits for it."""
    call = PendingCall()
    is_taken = group.submit(member, group.pack(os.getpid, ()), call)
    assert is_taken or call.is_done
    return is_taken


def test_member_that_leaves_is_not_replaced(fork_server: None) -> None:
    with group_of([0, 1], policy=Replace(max_restarts=0, window_s=600.0)) as group:
        leaving = group.members[0]
        leaving.is_leaving = True
        os.kill(leaving.pid, signal.SIGKILL)
        wait_until(group, lambda: 0 not in group.members)
        assert not group.losses.causes
        group.end(1)
        assert not group.members


def test_order_can_be_taken_back(fork_server: None) -> None:
    group = ChildGroup(Registry())
    try:
        group.begin([0, 1, 2])
        group.end(1)
        group.begin([1])
        group.start()
        assert list(group.members) == [0, 2, 1]
        group.call_all(os.getpid)
        assert group.collect() == [member.pid for member in group.members.values()]
    finally:
        group.stop()


def test_losses_count_within_their_window_only() -> None:
    losses, policy = Losses(), Replace(max_restarts=2, window_s=10.0)
    for now in (0.0, 5.0, 11.0, 20.0):
        losses.note(f"lost at {now}", policy, now)
    assert losses.causes == ["lost at 11.0", "lost at 20.0"]
    with pytest.raises(
        ReplicaDiedError, match=r"gave up after 2 restarts in 10 s: lost at 11\.0; lost at 20\.0; lost at 21\.0"
    ):
        losses.note("lost at 21.0", policy, 21.0)
