"""Launchers of two machines, both on this one: threads where that will do, processes where one dies."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from stratagem.cluster import token
from stratagem.cluster.io_thread import IoThread
from stratagem.cluster.launch.ctrl_c import CtrlC
from stratagem.cluster.launch.environment import Offer
from stratagem.cluster.launch.failures import Failure
from stratagem.cluster.launch.machines_meeting import MachineLink, linked
from stratagem.cluster.launch.plan import Machine, Order
from stratagem.cluster.launch.rendezvous import Rendezvous
from stratagem.cluster.launch.user_program import UserProgram
from stratagem.errors import LaunchError
from tests.cluster import nursery

pytestmark = pytest.mark.slow


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A free address, and a secret that both machines have."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    token.create(tmp_path / "secret")
    monkeypatch.setenv("STRATAGEM_TOKEN_FILE", str(tmp_path / "secret"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def order(endpoint: str, rank: int, *, max_restarts: int = 0, join_timeout_s: float = 20.0, count: int = 2) -> Order:
    machine = Machine(rank, count, endpoint, join_timeout_s=join_timeout_s)
    return Order(UserProgram("train.py"), num_workers=1, max_restarts=max_restarts, machine=machine)


def together(*actions: Callable[[], object]) -> list[BaseException | None]:
    """Runs one action for each machine at once; what each of them raised."""
    raised: list[BaseException | None] = [None] * len(actions)

    def act(number: int) -> None:
        try:
            actions[number]()
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=act, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return raised


def meeting_of(orders: Order, link: MachineLink) -> Rendezvous:
    offer = Offer(f"run {orders.machine.rank}", {"worker": [f"h{orders.machine.rank}:1"]}, "h:9")
    return Rendezvous(
        link.store, machine=orders.machine, offer=offer, interrupts=CtrlC(), raise_if_lost=link.raise_if_lost
    )


def test_machines_tell_each_other_what_they_bring_and_what_has_failed(endpoint: str) -> None:
    seen: dict[int, object] = {}
    barrier = threading.Barrier(2)

    def machine(rank: int) -> None:
        mine = order(endpoint, rank)
        with linked(mine, CtrlC()) as link:
            meeting = meeting_of(mine, link)
            info = meeting.next_rendezvous()
            assert (info.rank, info.world_size) == (rank, 2)
            assert [offer.jobs for offer in meeting.offers] == [{"worker": ["h0:1"]}, {"worker": ["h1:1"]}]
            assert meeting.get_run_id() == "run 0"
            assert meeting.failures_elsewhere() == []
            barrier.wait(20)
            if rank == 1:
                meeting.report(Failure("worker/1", 1, "ValueError: x"))
            while rank == 0 and not meeting.failures_elsewhere():
                time.sleep(0.01)
            seen[rank] = [failure.describe() for failure in meeting.failures_elsewhere()]
            meeting.next_rendezvous()
            assert meeting.failures_elsewhere() == [], "what failed before the restart is over"
            barrier.wait(20)
            if rank == 0:
                assert not meeting.all_trained()
            barrier.wait(20)
            while not meeting.all_trained():
                time.sleep(0.01)
            meeting.part(20)

    assert together(lambda: machine(0), lambda: machine(1)) == [None, None]
    assert seen == {0: ["worker/1 failed: ValueError: x"], 1: []}


def test_machine_that_never_comes_is_named(endpoint: str) -> None:
    with (
        pytest.raises(
            LaunchError, match=r"machine 1 has not come after 0.3 s; machine 0 is here; .*--join-timeout 0.3"
        ),
        linked(order(endpoint, 0, join_timeout_s=0.3), CtrlC()),
    ):
        pass


def test_machines_that_were_started_differently_are_told_so(endpoint: str) -> None:
    def machine(rank: int) -> None:
        with linked(order(endpoint, rank, max_restarts=rank), CtrlC()):
            pass

    for error in together(lambda: machine(0), lambda: machine(1)):
        assert isinstance(error, LaunchError)
        assert "machine 1 and machine 0 disagree on --max-restarts: 1 vs 0" in str(error)


def test_second_machine_with_one_rank_is_refused(endpoint: str) -> None:
    first_has_come = threading.Event()
    refused: list[str] = []

    def host() -> None:
        with linked(order(endpoint, 0, count=3), CtrlC()) as link:
            meeting_of(order(endpoint, 0, count=3), link)

    def guest(rank: int) -> None:
        try:
            with linked(order(endpoint, rank, count=3), CtrlC()):
                pass
        except LaunchError as error:
            refused.append(str(error))
            first_has_come.set()

    def third() -> None:
        assert first_has_come.wait(30)
        guest(2)

    assert together(host, lambda: guest(1), lambda: guest(1), third) == [None] * 4
    assert len(refused) == 1
    assert "machine 1 has come already: pid" in refused[0]


PROGRAM = """
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
launcher = os.getppid()
owned = set()
for fd in os.listdir(f"/proc/{launcher}/fd"):
    try:
        owned.add(os.readlink(f"/proc/{launcher}/fd/{fd}"))
    except OSError:
        pass
listens = [line.split()[1] for file in ("tcp", "tcp6") for line in open(f"/proc/net/{file}")
           if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in owned]
pathlib.Path(f"{name}.{restart}").write_text(json.dumps([os.environ["TF_CONFIG"], listens, os.getpid()]))
if task["type"] == "ps" or "wait" in sys.argv:
    signal.pause()
while not all(pathlib.Path(f"{each}.{restart}").exists() for each in ("worker-0", "worker-1", "ps-0")):
    time.sleep(0.01)
if restart == "0" and name == "worker-1":
    raise ValueError("bad row 812")
if restart == "0":
    signal.pause()
"""


def start(tmp_path: Path, endpoint: str, rank: int, *arguments: str) -> subprocess.Popen[str]:
    options = ["--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", endpoint, "--workers", "1", *arguments]
    return nursery.Program(
        ["-m", "stratagem", "run", *options],
        launches=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def test_program_runs_on_two_machines_and_again_after_a_failure_on_one(
    tmp_path: Path, endpoint: str, forked_tasks: None
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    first = start(tmp_path, endpoint, 0, "--max-restarts", "2", "train.py")
    second = start(tmp_path, endpoint, 1, "--max-restarts", "2", "--ps", "1", "train.py")
    ends = [process.communicate(timeout=50) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], ends
    for _, err in ends:
        assert "ValueError: bad row 812; starting all tasks again (restart 1 of 2)" in err
        assert err.splitlines()[-1] == "stratagem: succeeded after 1 restart(s)"
    told = {name: json.loads((tmp_path / f"{name}.1").read_text()) for name in ("worker-0", "worker-1", "ps-0")}
    clusters = [json.loads(config)["cluster"] for config, _, _ in told.values()]
    assert clusters[0] == clusters[1] == clusters[2]
    assert [len(clusters[0][job]) for job in ("worker", "ps")] == [2, 1]
    host, port = endpoint.split(":")
    assert told["worker-0"][1] == [f"{socket.inet_aton(host)[::-1].hex().upper()}:{int(port):04X}"]
    assert told["worker-1"][1] == [], "only the first machine listens"


def test_machine_that_is_lost_ends_the_others(tmp_path: Path, endpoint: str, forked_tasks: None) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    first = start(tmp_path, endpoint, 0, "train.py", "wait")
    second = start(tmp_path, endpoint, 1, "train.py", "wait")
    deadline = time.monotonic() + 40
    while not all((tmp_path / f"worker-{index}.0").exists() for index in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.kill()
    second.communicate()
    _, err = first.communicate(timeout=40)
    assert first.returncode == 1
    lost, logs = err.splitlines()
    assert lost.startswith("stratagem: machine 1 (127.0.0.1, pid ")
    assert "was lost: " in lost
    assert "the output of all tasks is in " in logs


def test_ctrl_c_while_a_launcher_starts_to_listen_leaves_no_thread_behind(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the thread of the sockets has begun, and nobody but the one who starts it knows of it."""
    start_thread = IoThread.start

    def start_at_a_bad_moment(thread: IoThread) -> None:
        start_thread(thread)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(IoThread, "start", start_at_a_bad_moment)
    with CtrlC() as interrupts, pytest.raises(SignalException), linked(order(endpoint, 0), interrupts):
        pass
    assert interrupts.asked == signal.SIGINT


def test_waiting_for_machines_ends_at_ctrl_c(tmp_path: Path, endpoint: str, forked_tasks: None) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    launcher = start(tmp_path, endpoint, 0, "--join-timeout", "1000", "train.py")  # the test's own limit is below that
    host, port = endpoint.split(":")
    deadline = time.monotonic() + 40
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=40)
    assert launcher.returncode == 128 + signal.SIGINT
    assert err == "stratagem: stopped by SIGINT\n"
