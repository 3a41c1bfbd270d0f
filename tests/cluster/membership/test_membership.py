"""Tasks in real processes on one machine: they meet, talk, leave, die, stop, and are told of each other."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.cluster import Membership, channel
from stratagem.cluster import token as tokens
from stratagem.cluster.liveness import Pulse, Rhythm, unconfirmed_by_descriptor_s, unconfirmed_s
from stratagem.cluster.membership.compatibility import Introduction
from stratagem.cluster.membership.keeper import Keeper
from stratagem.cluster.membership.member_messages import MessageKind
from stratagem.cluster.membership.shared_values import ValueRequest
from stratagem.errors import ClusterError, ClusterJoinError, ClusterSpecError, ClusterTimeoutError, HandshakeError
from tests.cluster.tasks import PATIENCE_S, TaskProcess, begin, free_ports, listening_at, send_begin, started, workers
from tests.cluster.test_channel import holder

pytestmark = [pytest.mark.usefixtures("token_file", "forked_tasks"), pytest.mark.slow]

# A third of the usual patience: what is to be noticed is noticed as well.
QUICK = {"heartbeat_s": 0.3, "heartbeat_timeout_s": 1.2, "join_timeout_s": 30.0}


@pytest.fixture
def three() -> Iterator[list[TaskProcess]]:
    with started(3) as tasks:
        yield tasks


# Coming together


def test_tasks_meet_share_values_and_leave(three: list[TaskProcess]) -> None:
    cluster = workers(3)
    begin(three, cluster)
    pids = [task.pid for task in three]
    for index, task in enumerate(three):
        assert task.ask("[m().rank, m().size, m().is_keeper]") == [index, 3, index == 0]
        assert task.ask("[member.task for member in m().members]") == ["worker/0", "worker/1", "worker/2"]
        assert task.ask("[member.pid for member in m().members]") == pids
        assert task.ask("m().own_host") == "127.0.0.1"
        task.send(f"[m().set('from {index}', b'{index}'), m().get('from {(index + 1) % 3}'), m().add('sum', {index})]")
    sums = [task.value() for task in three]
    assert [value for _, value, _ in sums] == ["1", "2", "0"]
    assert max(total for _, _, total in sums) == 3
    assert len({task.ask("m().incarnation") for task in three}) == 3
    # The host lingers until the others have left, and nobody is lost.
    for task in three:
        task.send("m().leave()")
    for task in three:
        assert task.value() is None
        assert task.ask("m().losses") == []
        assert listening_at(task.pid) == set()


def test_only_the_host_listens_and_only_at_its_address(three: list[TaskProcess]) -> None:
    cluster = workers(3)
    begin(three, cluster)
    port = int(cluster["worker"][0].rpartition(":")[2])
    assert [listening_at(task.pid) for task in three] == [{f"0100007f:{port:04x}"}, set(), set()]


def test_host_may_come_last(three: list[TaskProcess]) -> None:
    cluster = workers(3)
    for index in (2, 1):
        send_begin(three[index], cluster, index)
    assert three[0].ask("1") == 1
    send_begin(three[0], cluster, 0)
    assert [task.value() for task in three] == ["joined"] * 3


def test_chief_is_the_host_and_jobs_can_be_left_out(three: list[TaskProcess]) -> None:
    first, second, third = free_ports(3)
    cluster = {
        "worker": [f"127.0.0.1:{first}", None],
        "chief": [f"127.0.0.1:{second}"],
        "evaluator": [f"127.0.0.1:{third}"],
    }
    for task, (job, index) in zip(three, [("worker", 0), ("worker", 1), ("chief", 0)], strict=True):
        task.send(f"begin({cluster!r}, {job!r}, {index}, jobs=['chief', 'worker'])")
    assert [task.value() for task in three] == ["joined"] * 3
    assert [task.ask("m().rank") for task in three] == [1, 2, 0]
    # A task without an address is known by the one that it came from.
    assert three[0].ask("[member.address for member in m().members]")[2] == "127.0.0.1"


def test_worker_that_never_comes_is_named_by_all(three: list[TaskProcess]) -> None:
    cluster = workers(3)
    for index in (0, 1):
        send_begin(three[index], cluster, index, join_timeout_s=1.5)
    for task in three[:2]:
        name, message = task.error()
        assert name == "ClusterJoinError"
        assert message == (
            f"worker/2 ({cluster['worker'][2]}) has not come after 1.5 s; worker/0, worker/1 are here; "
            f"start what is missing, or raise join_timeout_s=1.5"
        )
        assert listening_at(task.pid) == set()


def test_host_that_never_comes_is_named() -> None:
    cluster = workers(2)
    with pytest.raises(ClusterJoinError) as caught:
        Membership(cluster, "worker", 1, join_timeout_s=0.5).join()
    assert str(caught.value) == (
        f"worker/0 ({cluster['worker'][0]}) has not come after 0.5 s (last try: Connection refused); "
        f"worker/1 is here; start what is missing, or raise join_timeout_s=0.5"
    )


def test_host_whose_name_nobody_knows_is_named() -> None:
    with pytest.raises(ClusterJoinError, match=r"worker/0 \(nowhere.invalid:1\) has not come after 0.5 s \(last try: "):
        Membership({"worker": ["nowhere.invalid:1", None]}, "worker", 1, join_timeout_s=0.5).join()


@contextlib.contextmanager
def host_here(cluster: dict[str, list[str]], **options: Any) -> Iterator[tuple[Membership, "Future[Membership]"]]:
    """The first task in this process, while it waits for the others in another thread."""
    membership = Membership(cluster, "worker", 0, join_timeout_s=30, **options)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(membership.join)
        yield membership, joining
        with contextlib.suppress(ClusterJoinError):
            joining.result()
    membership.leave(linger_s=0)


def wait_until_here(host: Membership, *tasks: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if isinstance(host._side, Keeper) and {*tasks} == {member.task for member in host._side.members}:
            return
        time.sleep(0.01)
    raise AssertionError(f"{tasks} have not come")


def test_second_task_with_one_index_is_told_where_the_first_is(three: list[TaskProcess]) -> None:
    cluster = workers(3)
    first, second, third = three
    with host_here(cluster) as (host, joining):
        send_begin(first, cluster, 1)
        wait_until_here(host, "worker/0", "worker/1")
        send_begin(second, cluster, 1)
        name, message = second.error()
        assert name == "ClusterJoinError"
        assert message.startswith(f"worker/1 has come already: pid {first.pid} on {socket.gethostname()} (127.0.0.1:")
        assert f"this one is pid {second.pid} on" in message
        # The others are not disturbed: they go on when the right one comes.
        send_begin(third, cluster, 2)
        joining.result(PATIENCE_S)
        assert [first.value(), third.value()] == ["joined"] * 2
        for index, pid in ((0, os.getpid()), (2, third.pid)):
            send_begin(second, cluster, index)
            taken = "is taken" if index == 0 else f"worker/{index} has come already: pid {pid} on"
            assert taken in second.error()[1]


DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "signature",
        {"signature": {"model": {"fc1.weight": [8, 4]}, "seed": 1}},
        {"signature": {"model": {"fc1.weight": [8, 5]}, "seed": 1}},
        "worker/1 and worker/0 disagree on model.fc1.weight.1: 5 vs 4; run the same program on both",
    ),
    (
        "absent",
        {"signature": {"seed": 1}},
        {},
        "worker/1 and worker/0 disagree on seed: nothing vs 1; run the same program on both",
    ),
    ("jobs", {"jobs": ["worker", "ps"]}, {"jobs": ["worker"]}, "disagree on who takes part: worker vs worker, ps"),
]


@pytest.mark.parametrize(
    ("host", "guest", "message"), [row[1:] for row in DIFFERENT], ids=[row[0] for row in DIFFERENT]
)
def test_tasks_that_disagree_are_told_on_both_sides(
    three: list[TaskProcess], host: dict[str, Any], guest: dict[str, Any], message: str
) -> None:
    ports = free_ports(3)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:2]], "ps": [f"127.0.0.1:{ports[2]}"]}
    for index, options in enumerate((host, guest)):
        send_begin(three[index], cluster, index, **options)
    for task in three[:2]:
        name, said = task.error()
        assert name == "ClusterJoinError"
        assert message in said


def test_different_clusters_are_told_on_all_sides(three: list[TaskProcess]) -> None:
    ports = free_ports(5)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:3]], "ps": [f"127.0.0.1:{ports[3]}"]}
    other = cluster | {"ps": [*cluster["ps"], f"127.0.0.1:{ports[4]}"]}
    with host_here(cluster, jobs=["worker"]) as (host, joining):
        send_begin(three[0], cluster, 2, jobs=["worker"])
        wait_until_here(host, "worker/0", "worker/2")
        send_begin(three[1], other, 1, jobs=["worker"])
        message = (
            "worker/1 and worker/0 disagree on the cluster: ps count 2 vs 1 (first difference: ps/1); "
            "give all tasks the same cluster"
        )
        assert [task.error() for task in three[:2]] == [("ClusterJoinError", message)] * 2
        with pytest.raises(ClusterJoinError) as caught:
            joining.result(PATIENCE_S)
        assert str(caught.value) == message


@pytest.mark.parametrize("name", ["stratagem", "torch", "python"])
def test_different_versions_are_told_on_both_sides(name: str, three: list[TaskProcess]) -> None:
    cluster = workers(2)
    send_begin(three[0], cluster, 0)
    # The other process believes that it runs another version.
    three[1].ask(
        f"__import__('stratagem.cluster.membership.compatibility')"
        f".cluster.membership.compatibility._versions().update({{{name!r}: '0.3.1'}})"
    )
    send_begin(three[1], cluster, 1)
    own = three[0].error()
    assert own == three[1].error()
    assert own[1].startswith(f"worker/1 runs {name} 0.3.1, worker/0 ")
    assert own[1].endswith("; install one version everywhere")


def test_task_with_another_token_is_refused_at_once(three: list[TaskProcess], tmp_path: Path, token_file: Path) -> None:
    cluster = workers(2)
    tokens.create(tmp_path / "other")
    send_begin(three[0], cluster, 0, join_timeout_s=30)
    send_begin(three[1], cluster, 1, join_timeout_s=30, token_file=str(tmp_path / "other"))
    name, message = three[1].error()
    assert name == "HandshakeError"
    assert f"{cluster['worker'][0]} has another token than this task, which took its own from" in message
    for path in (tmp_path / "other", token_file):
        secret = path.read_text().strip()
        assert secret not in message
        for task in three[:2]:
            assert secret.encode() not in Path(f"/proc/{task.pid}/cmdline").read_bytes()
            assert secret.encode() not in Path(f"/proc/{task.pid}/environ").read_bytes()
    # The host has not been disturbed.
    send_begin(three[1], cluster, 1)
    assert [task.value() for task in three[:2]] == ["joined"] * 2


def test_program_that_is_no_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        holder(b"SSH-2.0-OpenSSH_9.2\r\n" * 10) as port,
        pytest.raises(HandshakeError, match="speaks another protocol"),
    ):
        Membership({"worker": [f"127.0.0.1:{port}", None]}, "worker", 1, join_timeout_s=20).join()
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.3)
    with (
        holder(None) as port,
        pytest.raises(HandshakeError, match=f":{port} is not a stratagem task: it did not answer"),
    ):
        Membership({"worker": [f"127.0.0.1:{port}", None]}, "worker", 1, join_timeout_s=20).join()


def test_task_that_dies_before_all_have_come_may_come_again(three: list[TaskProcess]) -> None:
    cluster = workers(3)
    with host_here(cluster) as (host, joining):
        send_begin(three[0], cluster, 1)
        wait_until_here(host, "worker/0", "worker/1")
        three[0].kill()
        wait_until_here(host, "worker/0")
        for index, task in ((1, three[1]), (2, three[2])):
            send_begin(task, cluster, index)
        joining.result(PATIENCE_S)
        assert [task.value() for task in three[1:]] == ["joined"] * 2


def test_processes_of_torchrun_find_each_other(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import os\n"
        "from stratagem.cluster import Membership, found\n"
        "me = found().resolver\n"
        "with Membership(me.cluster_spec(), me.task_type, me.task_id, join_timeout_s=30) as m:\n"
        "    m.wait([m.set(str(m.rank), b'') or str(1 - m.rank)])\n"
        "    os.write(1, f'{m.rank} of {m.size}, {me.local_id} of {me.num_local_tasks} here\\n'.encode())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=True)
    assert sorted(done.stdout.splitlines()) == ["0 of 2, 0 of 2 here", "1 of 2, 1 of 2 here"]


# Losing each other


def lost_by(tasks: list[TaskProcess], count: int = 1) -> list[list[Any]]:
    for task in tasks:
        task.send(f"wait_for_loss({count})")
    return [task.value() for task in tasks]


def test_killed_task_is_named_to_all_others(three: list[TaskProcess]) -> None:
    cluster = workers(3)
    begin(three, cluster, heartbeat_s=60.0)  # too slow to be how it is noticed
    three[1].kill()
    for losses in lost_by([three[0], three[2]]):
        assert losses == [
            [
                "worker/1",
                three[1].pid,
                "it closed the connection without leaving the cluster first; its process has ended",
            ]
        ]
    three[2].send("m().raise_if_lost()")
    name, message = three[2].error()
    assert name == "TaskLostError"
    assert message.startswith(
        f"worker/1 ({cluster['worker'][1]}, pid {three[1].pid} on {socket.gethostname()}) was lost"
    )


def test_killed_host_is_named_by_all_others(three: list[TaskProcess]) -> None:
    begin(three, workers(3), heartbeat_s=60.0)
    three[1].send("m().get('never', timeout_s=60)")
    three[0].kill()
    name, message = three[1].error()
    assert name == "TaskLostError"
    assert "worker/0 (127.0.0.1:" in message
    for losses in lost_by(three[1:]):
        assert [loss[:2] for loss in losses] == [["worker/0", three[0].pid]]
    three[2].send("m().set('a', b'b')")
    assert three[2].error()[0] == "TaskLostError"


def test_stopped_task_is_lost_and_does_not_come_back(three: list[TaskProcess]) -> None:
    begin(three, workers(3), **QUICK)
    three[1].signal(signal.SIGSTOP)
    for losses in lost_by([three[0], three[2]]):
        assert [loss[:2] for loss in losses] == [["worker/1", three[1].pid]]
        said = r"no sign of life for \d\.\d s; its machine answers, so its process is stopped or busy"
        assert re.search(said, losses[0][2])
    three[1].signal(signal.SIGCONT)
    (losses,) = lost_by([three[1]])
    assert losses[0][0] == "worker/1"
    assert losses[0][2].startswith("worker/0 had declared this task lost: no sign of life for")
    three[1].send("m().set('a', b'b')")
    assert three[1].error()[0] == "TaskLostError"
    assert three[0].ask("m().check(['a'])") is False
    assert three[0].ask("[member.task for member in m().members]") == ["worker/0", "worker/2"]


def test_what_a_lost_task_says_is_refused() -> None:
    cluster = workers(2)
    spec = sg.ClusterSpec(cluster)
    who = Introduction.of_this_process(spec.task("worker", 1), spec, ["worker"], None)

    async def until(peer: channel.Channel, wanted: MessageKind) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                kind, body = await peer.receive()
                if kind == wanted:
                    return body

    async def connect() -> channel.Channel:
        port = int(cluster["worker"][0].rpartition(":")[2])
        peer = await channel.connect("127.0.0.1", port, tokens.load())
        peer.send(MessageKind.JOIN, who.to_body())
        return peer

    async def live_on() -> None:
        """Gives no sign of life until it is declared lost, then acts as if nothing had been."""
        peer = await connect()
        await until(peer, MessageKind.READY)
        first = await until(peer, MessageKind.FENCED)
        assert first["why"].startswith("no sign of life for")
        for kind, body in (
            (MessageKind.REQUEST, ValueRequest("set", ("late",), (b"",)).to_body(1)),
            (MessageKind.LEAVE, {}),
        ):
            peer.send(kind, body)
            assert await until(peer, MessageKind.FENCED) == first
        again = await connect()
        refusal = await until(again, MessageKind.REFUSED)
        assert refusal == {"why": f"it was declared lost: {first['why']}", "retry": False}
        for each in (peer, again):
            each.abort()

    with host_here(cluster, heartbeat_timeout_s=0.4) as (host, _):
        wait_until_here(host, "worker/0")
        asyncio.run(live_on())
        assert [lost.member.task for lost in host.losses] == ["worker/1"]
        assert not host.check(["late"])


def test_task_that_stops_for_a_moment_is_not_lost(three: list[TaskProcess]) -> None:
    begin(three, workers(3), heartbeat_s=2.0, join_timeout_s=30.0)
    for task in three[:2]:  # one of them is the host
        task.signal(signal.SIGSTOP)
    three[2].ask("__import__('time').sleep(1)")
    for task in three[:2]:
        task.signal(signal.SIGCONT)
    assert [task.ask("[m().add('n', 1) > 0, m().losses]") for task in three] == [[True, []]] * 3


def test_task_that_holds_the_lock_of_python_is_not_lost(three: list[TaskProcess]) -> None:
    """As a large `json.load` does: no thread of it runs, and its machine answers for it."""
    begin(three, workers(3), heartbeat_s=0.1)
    for task in three[:2]:  # one of them is the host
        task.send("__import__('ctypes').PyDLL(None).usleep(1_000_000)")
    assert [task.value() for task in three[:2]] == [0, 0]
    assert [task.ask("[m().add('n', 1) > 0, m().losses]") for task in three] == [[True, []]] * 3


def test_host_that_was_stopped_finds_itself_alone(three: list[TaskProcess]) -> None:
    begin(three[:2], workers(2), **QUICK)
    three[0].signal(signal.SIGSTOP)
    (losses,) = lost_by([three[1]])
    assert losses[0][:2] == ["worker/0", three[0].pid]
    three[0].signal(signal.SIGCONT)
    (losses,) = lost_by([three[0]])
    assert losses[0][0] == "worker/1"
    assert losses[0][2].startswith("it lost contact with worker/0: no sign of life for")


def test_task_that_leaves_is_not_lost(three: list[TaskProcess]) -> None:
    begin(three, workers(3), **QUICK)
    three[1].ask("m().leave()")
    three[1].kill()
    # Had it been lost, the host would have said so before it answers this.
    for task in (three[0], three[2]):
        assert task.ask("[m().add('n', 1) > 0, m().losses]") == [True, []]
    assert three[0].ask("[member.task for member in m().members]") == ["worker/0", "worker/2"]
    three[0].ask("m().leave(linger_s=0)")
    assert three[2].ask("[member.task for member in m().members]") == ["worker/2"]
    three[2].send("m().add('n', 1)")
    name, message = three[2].error()
    assert name == "TaskLostError"
    assert "which keeps the store, has left the cluster" in message
    assert three[2].ask("m().losses") == []
    three[2].ask("m().leave()")


def test_task_that_fails_says_why_to_all(three: list[TaskProcess]) -> None:
    begin(three, workers(3))
    three[2].ask("m().fail('ValueError: bad row 812')")
    for losses in lost_by(three[:2]):
        assert losses == [["worker/2", three[2].pid, "ValueError: bad row 812"]]
    assert three[2].ask("m().losses") == []  # it knows itself
    three[0].ask("m().fail('the host too')")
    (losses,) = lost_by([three[1]], count=2)
    assert losses[1] == ["worker/0", three[0].pid, "the host too"]


def test_wait_for_a_value_ends_when_somebody_is_lost(three: list[TaskProcess]) -> None:
    begin(three, workers(3))
    for task in three[:2]:
        task.send("m().get('never', timeout_s=60)")
    three[2].kill()
    for task in three[:2]:
        name, message = task.error()
        assert name == "TaskLostError"
        assert message.startswith("worker/2 (127.0.0.1:")


def test_child_that_was_forked_does_not_keep_a_dead_task_alive(three: list[TaskProcess]) -> None:
    begin(three[:2], workers(2), heartbeat_s=60.0)
    child = three[1].ask("fork_and_sleep(60)")
    try:
        three[1].kill()
        (losses,) = lost_by([three[0]])
        assert losses[0][:2] == ["worker/1", three[1].pid]
    finally:
        os.kill(child, signal.SIGKILL)


def test_child_that_was_forked_is_no_task(three: list[TaskProcess]) -> None:
    begin(three[:2], workers(2))
    for task in three[:2]:
        said = task.ask('in_forked_child(\'m().set("a", b"")\')')
        assert said.startswith("ClusterError: this process was forked from worker/")
        assert task.ask("in_forked_child('m().leave()')") == "None"
        assert task.ask("[m().check(['a']), m().losses]") == [False, []]


def test_task_that_starts_anew_waits_for_a_host_that_does_too(three: list[TaskProcess]) -> None:
    cluster = workers(2)
    begin(three[:2], cluster)
    three[1].kill()
    lost_by([three[0]])
    send_begin(three[2], cluster, 1)  # meets the old host first, which is about to end
    three[0].ask("m().leave(linger_s=0)")
    send_begin(three[0], cluster, 0)
    assert [three[0].value(), three[2].value()] == ["joined"] * 2


def test_silence_counts_only_while_the_one_who_listens_runs() -> None:
    now = [0.0]
    pulse = Pulse(Rhythm(1.0, 3, 30.0), monotonic=lambda: now[0])

    def is_lost_after(elapsed_s: float) -> bool:
        now[0] += elapsed_s
        return bool(pulse.why_lost(unconfirmed_s=1000.0))

    # As after a long stop of this very process: what came meanwhile is still to be read.
    assert not is_lost_after(1000.0)
    pulse.heard()
    looks = [is_lost_after(0.25) for _ in range(15)]
    assert looks == [False] * 14 + [True]
    pulse.heard()
    assert not is_lost_after(0.25)


@pytest.mark.parametrize(
    ("unconfirmed", "lost_s", "why"),
    [
        (0.0, 30.0, "its machine answers, so its process is stopped or busy; .* raise heartbeat_timeout_s=30"),
        (3.0, 30.0, "its machine answers"),
        (3.75, 3.75, "its machine does not answer either"),
    ],
)
def test_task_has_as_long_as_its_machine_answers_for_it(unconfirmed: float, lost_s: float, why: str) -> None:
    now = [0.0]
    pulse = Pulse(Rhythm(1.0, 3, 30.0), monotonic=lambda: now[0])
    while not (said := pulse.why_lost(unconfirmed)):
        now[0] += 0.25
    assert now[0] == lost_s
    assert re.match(f"no sign of life for {lost_s:.1f} s; {why}", said)


def test_short_timeout_makes_signs_of_life_come_more_often() -> None:
    assert Rhythm(1.0, 3, 30.0).beat_s == 1.0
    assert Rhythm(1.0, 3, 2.0).beat_s == 0.5


def test_system_tells_of_a_machine_that_does_not_read_that_it_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(2**20))
        assert unconfirmed_s(sender) == unconfirmed_by_descriptor_s(sender.fileno()) == 0.0
    assert unconfirmed_s(sender) == unconfirmed_by_descriptor_s(-1) == 0.0


# The store, in one process


@pytest.fixture
def alone() -> Iterator[Membership]:
    with Membership(workers(1), "worker", 0, join_timeout_s=20) as made:
        yield made


def test_store_does_what_it_says(alone: Membership) -> None:
    alone.set("a", b"\x00\xff")
    assert alone.get("a", wait=False) == b"\x00\xff"
    assert (alone.add("n", 5), alone.add("n", -7)) == (5, -2)
    assert alone.get("n") == b"-2"
    alone.append("b", b"po")
    alone.append("b", b"tato")
    assert alone.get_many(["b", "a"]) == (b"potato", b"\x00\xff")
    assert alone.compare_set("c", b"expected", b"new") == b"expected"
    assert not alone.check(["c"])
    assert alone.compare_set("c", b"", b"new") == b"new"
    assert alone.compare_set("c", b"other", b"newer") == b"new"
    assert alone.compare_set("c", b"new", b"newer") == b"newer"
    assert alone.num_keys() == 4
    assert (alone.delete("a"), alone.delete("a")) == (True, False)
    assert alone.check(["b", "c"])
    assert not alone.check(["a", "b"])
    alone.wait(["b", "c"], timeout_s=1)
    alone.set("full", b"x" * 65536)
    assert len(alone.get("full")) == 65536


def test_store_refuses_what_it_cannot_keep(alone: Membership) -> None:
    with pytest.raises(ClusterError, match="a value has at most 65536 bytes, got 65537 for 'a'"):
        alone.set("a", b"x" * 65537)
    with pytest.raises(ClusterError, match="a key has at most 1024 characters, got 1025"):
        alone.set("k" * 1025, b"")
    alone.set("a", b"text")
    with pytest.raises(ClusterError, match="the value of 'a' is not a number"):
        alone.add("a", 1)
    alone.set("a", b"x" * 65536)
    with pytest.raises(ClusterError, match="would grow beyond 65536 bytes"):
        alone.append("a", b"x")
    with pytest.raises(ClusterError, match="too large for one message"):
        alone.get_many(["a"] * 9)
    with pytest.raises(ClusterTimeoutError, match=r"no task has set 'b' within 0.2 s; worker/0 asked for it"):
        alone.get("b", timeout_s=0.2)
    with pytest.raises(ClusterTimeoutError, match="no task has set 'b'; "):
        alone.get("b", wait=False)


def test_membership_ends_where_it_was_left() -> None:
    membership = Membership(workers(1), "worker", 0, join_timeout_s=20)
    with pytest.raises(ClusterError, match="does not take part in its cluster now; call join"):
        membership.set("a", b"")
    with membership, pytest.raises(ClusterError, match="has joined already"):
        membership.join()
    membership.leave()
    with pytest.raises(ClusterError, match="does not take part"):
        membership.set("a", b"")


def test_membership_can_use_a_server_that_is_there() -> None:
    cluster = workers(1)
    with sg.Server(cluster) as server:
        for _ in range(2):
            with Membership(cluster, "worker", 0, server=server, join_timeout_s=20) as membership:
                assert membership.add("n", 1) == 1
        assert not server._told.is_set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"join_timeout_s": 0}, "join_timeout_s is a number of seconds above 0, got 0"),
        ({"heartbeat_s": 0}, "heartbeat_s is a number of seconds from 0.01 to 3600, got 0"),
        ({"heartbeat_timeout_s": float("inf")}, "heartbeat_timeout_s is a number of seconds above 0, got inf"),
        ({"num_missed": 0}, "num_missed is a whole number from 1 to 1000, got 0"),
        ({"signature": {"a": object()}}, "a signature is made of texts, numbers, lists"),
        ({"signature": {"a": "x" * 2**20}}, "at most 524288 are sent; compare a hash of it"),
        ({"jobs": ["ps"]}, "worker/0 is not of the jobs that take part: none"),
    ],
)
def test_bad_arguments_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterSpecError) as caught:
        Membership({"worker": ["a:1"]}, "worker", 0, **options)
    assert message in str(caught.value)
