"""Processes that are killed, stopped or interrupted at an awkward moment, and what they leave to the next call.

Signals are sent at fixed points: in the function that runs, or around one call inside the library.
"""

import contextlib
import copy
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.engine import child_calls
from stratagem.errors import ReplicaDiedError, ReplicaStalledError, StrategyError
from stratagem.processes.group import ChildGroup
from stratagem.processes.launcher import ForkServer
from stratagem.processes.registry import Registry
from tests.cluster import nursery
from tests.faults.watching import is_gone, pids

pytestmark = pytest.mark.usefixtures("four_cpus")


@pytest.fixture(scope="module")
def strategy(four_cpus: None) -> Iterator[sg.MirroredStrategy]:
    """For tests after which it goes on."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        made.run(os.getpid)
        yield made


@pytest.fixture
def own() -> Iterator[sg.MirroredStrategy]:
    """For tests that end it."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=20.0) as made:
        yield made


def group_of(strategy: sg.MirroredStrategy) -> ChildGroup:
    return strategy._replicas._group


def replica() -> int:
    context = sg.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def build(strategy: sg.MirroredStrategy) -> Callable[[], int]:
    """A step whose optimizer has a part of its state in each replica, so that closing asks them for it."""
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> int:
        optimizer.param_groups[0]["momentum"] = 0.9  # unforeseen: there is no shared memory for its state yet
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return os.getpid()

    return step


def same(value: Any) -> Any:
    return value


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python calls handlers between two instructions


@contextlib.contextmanager
def interrupted_at(owner: Any, name: str) -> Iterator[None]:
    """Sends Ctrl-C when a method has been called, once."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        result = original(*args, **kwargs)
        interrupt()
        return result

    setattr(owner, name, call)
    try:
        yield
        assert getattr(owner, name) == original, "the fault did not happen"
    finally:
        owner.__dict__.pop(name, None)


# Killed


def meet(value: int) -> int:
    sg.get_replica_context().all_reduce("sum", torch.ones(1))  # type: ignore[union-attr]
    return value


@pytest.mark.parametrize("function", [same, meet], ids=["while collecting", "while meeting"])
def test_killed_replica_whose_own_child_holds_its_pipe_is_told_as_killed(
    own: sg.MirroredStrategy, function: Callable[[int], int]
) -> None:
    def fork() -> int:
        pid = os.fork() if replica() else 0
        if replica() and pid == 0:
            time.sleep(60)
            os._exit(0)
        return pid

    holder = own.run(fork)[1]
    try:
        killed = pids(own)[1]
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(ReplicaDiedError, match=rf"replica 1 \(pid {killed}\) was killed by SIGKILL in run 3"):
            own.run(function, args=(1,))
    finally:
        os.kill(holder, signal.SIGKILL)
    assert is_gone(holder)


def test_killed_replica_takes_no_state_of_the_optimizer_with_it(own: sg.MirroredStrategy) -> None:
    with own.scope():
        model = nn.Linear(64, 64)  # large enough to be cut
        optimizer = torch.optim.Adam(model.parameters())
    plain = copy.deepcopy(model)
    theirs = torch.optim.Adam(plain.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).pow(2).sum().backward()
        optimizer.step()

    for _ in range(2):
        own.run(step)
        theirs.zero_grad()
        plain(torch.ones(2, 64)).pow(2).sum().backward()
        theirs.step()
    os.kill(pids(own)[1], signal.SIGKILL)
    with pytest.raises(ReplicaDiedError):
        own.run(same, args=(1,))
    torch.testing.assert_close(optimizer.state_dict(), theirs.state_dict())


def test_run_is_named_by_the_number_that_the_program_counts(own: sg.MirroredStrategy) -> None:
    def step(rows: torch.Tensor, number: int) -> None:
        if number == 3 and replica() == 1:
            os._exit(3)

    with pytest.raises(ReplicaDiedError, match=r"replica 1 .* ended with code 3 in run 3$"):  # noqa: PT012
        for number in (1, 2, 3):
            for batch in own.distribute((torch.ones(2),), global_batch_size=2):
                own.run(step, args=(*batch, number))


@pytest.mark.timeout(30)  # it must not wait for what will never come
def test_how_a_child_ended_is_not_asked_of_a_server_that_is_gone() -> None:
    server = ForkServer()
    server._process.kill()
    server._process.wait()
    assert server.status_of(os.getpid(), 3600.0) is None
    server.stop()


# Stopped


@pytest.mark.timeout(40)  # far below the deadline for a replica that stalls
def test_stopped_idle_replica_does_not_delay_the_close() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], stall_timeout_s=600.0)
    step = build(strategy)
    stopped = strategy.run(step)[1]
    os.kill(stopped, signal.SIGSTOP)
    strategy.close()
    assert is_gone(stopped)
    step()


def test_replica_that_does_not_read_what_it_is_sent_is_told_as_stalled() -> None:
    group = ChildGroup(Registry(), stall_timeout_s=1.0)
    group.begin([1])
    group.start()
    try:
        os.kill(group.members[1].pid, signal.SIGSTOP)
        with pytest.raises(ReplicaStalledError, match=r"replica 1 \(pid \d+\), state T has not answered for 1.0 s"):
            group.call_all(len, [torch.ones(8000) for _ in range(100)])  # more than fits into the pipe
    finally:
        group.stop()


def test_ctrl_c_is_not_lost_when_another_error_comes_first(own: sg.MirroredStrategy) -> None:
    stopped = pids(own)[1]
    group_of(own).stall_timeout_s = 1.0
    group_of(own).members[1].channel._socket.settimeout(1.0)
    os.kill(stopped, signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # while it sends
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            own.run(len, args=([torch.ones(8000) for _ in range(100)],))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert isinstance(caught.value.__context__, ReplicaStalledError)
    assert is_gone(stopped)
    with pytest.raises(StrategyError, match="was closed at"):
        own.run(same, args=(1,))


# Interrupted


def test_ctrl_c_in_the_function_spoils_no_later_run(strategy: sg.MirroredStrategy) -> None:
    def step(value: int) -> int:
        if value == 1 and replica() == 0:
            interrupt()
        return meet(value)

    with pytest.raises(KeyboardInterrupt):
        strategy.run(step, args=(1,))
    assert [strategy.run(step, args=(value,)).values for value in (2, 3)] == [(2, 2), (3, 3)]


@pytest.mark.parametrize("name", ["call", "call_all"])
def test_ctrl_c_when_replicas_have_been_called_spoils_no_later_run(strategy: sg.MirroredStrategy, name: str) -> None:
    def slow(value: int) -> int:
        time.sleep(0.2 * replica())  # so that an answer to an earlier call comes first
        return value

    calls = {"call": lambda: strategy.run(slow, args=(1,)), "call_all": lambda: strategy.call_in_children(os.getpid)}
    strategy.run(slow, args=(0,))
    with interrupted_at(group_of(strategy), name), pytest.raises(KeyboardInterrupt):
        calls[name]()
    assert [strategy.run(slow, args=(value,)).values for value in (2, 3)] == [(2, 2), (3, 3)]


def test_ctrl_c_while_answers_are_awaited_ends_the_children(own: sg.MirroredStrategy) -> None:
    children = pids(own)[1:]

    def step(controller: int) -> None:
        if replica() == 1:
            os.kill(controller, signal.SIGINT)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        own.run(step, args=(os.getpid(),))
    assert all(map(is_gone, children))
    with pytest.raises(StrategyError, match=r"was closed at .* by Ctrl-C; make a new one"):
        own.run(same, args=(1,))


def test_ctrl_c_while_a_result_is_fetched_gives_nobody_a_wrong_one(own: sg.MirroredStrategy) -> None:
    first, second = (own.run(torch.full, args=((2**18,), value)) for value in (1.0, 2.0))
    with interrupted_at(group_of(own), "submit"), pytest.raises(KeyboardInterrupt):
        first[1]
    with pytest.raises(StrategyError, match="was closed at"):
        second[1]


def test_ctrl_c_while_closing_still_ends_the_children(own: sg.MirroredStrategy) -> None:
    step = build(own)
    child = own.run(step)[1]
    with interrupted_at(group_of(own), "call_all"), pytest.raises(KeyboardInterrupt):
        own.close()
    assert is_gone(child)


# Failed


def test_results_of_one_replica_can_be_fetched_after_another_has_failed() -> None:
    def fail() -> None:
        if replica() == 2:
            raise ValueError("a mistake")

    with sg.MirroredStrategy(["cpu:1", "cpu:2", "cpu:3"]) as strategy:
        result = strategy.run(lambda: torch.full((2**18,), float(replica())))
        with pytest.raises(ValueError, match="a mistake"):
            strategy.run(fail)
        assert result[1].mean() == 1


def test_replicas_keep_no_results_of_runs_that_failed(strategy: sg.MirroredStrategy) -> None:
    def held() -> int:
        return len(child_calls._results.values)

    def fail() -> torch.Tensor:
        if replica() == 0:
            raise ValueError("a mistake")
        return torch.ones(2**18)

    before = strategy.run(held)[1]
    for _ in range(3):
        with pytest.raises(ValueError, match="a mistake"):
            strategy.run(fail)
    assert strategy.run(held)[1] == before


# A program of its own

_PROGRAM = """
import os, time
import torch, stratagem as sg

sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
strategy = sg.MirroredStrategy()
try:
    with strategy.scope():
        print("building", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
(_, replica) = strategy.run(os.getpid).values
forked = os.fork()
if forked == 0:
    time.sleep(60)
    os._exit(0)
print(replica, forked, flush=True)
time.sleep(60)
"""


def test_ctrl_c_at_the_start_harms_nothing_and_a_forked_process_keeps_no_children(forked_tasks: None) -> None:
    program = nursery.Program(["-c", _PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with program, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(program.kill)
        assert program.stdout is not None
        assert program.stdout.readline() == "building\n"
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to all processes of the program
        assert program.stdout.readline() == "interrupted\n"
        child, forked = (int(each) for each in program.stdout.readline().split())
        at_the_end.callback(os.kill, forked, signal.SIGKILL)
        program.kill()
        assert is_gone(child)
        assert not is_gone(forked, timeout_s=0.1)
