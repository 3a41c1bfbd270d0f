"""A task that answers at its address: there only, until it is told to stop."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.errors import (
    AddressError,
    AddressInUseError,
    ClusterError,
    ClusterSpecError,
    ClusterWarning,
    TokenError,
)
from tests.cluster.tasks import PATIENCE_S, TaskProcess, free_ports, listening_at, started, workers

pytestmark = pytest.mark.usefixtures("token_file")


def hexadecimal(address: str, port: int) -> str:
    """An IPv4 address as `/proc/net/tcp` writes it."""
    return f"{int.from_bytes(socket.inet_aton(address), 'little'):08x}:{port:04x}"


def test_local_server_has_a_target_and_a_free_port() -> None:
    with sg.Server.create_local_server() as one, sg.Server.create_local_server() as two:
        assert one.target.startswith("stratagem://127.0.0.1:")
        assert one.target != two.target
        assert one.spec.jobs == ["local"]


def test_server_listens_at_its_own_address_only() -> None:
    before = listening_at(os.getpid())
    port = free_ports(1)[0]
    with sg.Server({"worker": [f"127.0.0.2:{port}", "10.1.2.3:1"]}, job_name="worker", task_index=0):
        assert listening_at(os.getpid()) - before == {hexadecimal("127.0.0.2", port)}
    assert listening_at(os.getpid()) == before


def test_server_listens_everywhere_only_if_told_to_and_warns() -> None:
    (port,) = free_ports(1)
    before = listening_at(os.getpid())
    with pytest.warns(ClusterWarning, match=r"worker/0 listens on all addresses of this machine at port \d+, not only"):
        server = sg.Server({"worker": [f"203.0.113.7:{port}"]}, allow_all_interfaces=True)
    with server:
        (found,) = listening_at(os.getpid()) - before
        assert set(found.partition(":")[0]) == {"0"}


def test_taken_port_names_who_has_it() -> None:
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        name = Path(f"/proc/{other.pid}/comm").read_text().strip()
        with pytest.raises(AddressInUseError) as caught:
            sg.Server({"worker": [f"127.0.0.1:{port}"]})
        other.communicate("\n", timeout=PATIENCE_S)
    assert str(caught.value) == (
        f"127.0.0.1:{port} is taken (pid {other.pid} {name}); end that program, or give worker/0 another port; "
        f"if it is a worker/0 itself, give this task another index"
    )


def test_port_can_be_used_again_at_once() -> None:
    cluster = workers(1)
    for _ in range(3):
        with sg.Server(cluster):
            pass


def test_address_of_another_machine_is_explained() -> None:
    with pytest.raises(
        AddressError, match=r"worker/0 cannot listen at 192.0.2.1:2222: that is not an address of this mach"
    ):
        sg.Server({"worker": ["192.0.2.1:2222"]})
    with pytest.raises(AddressError, match=r"the name 'nowhere.invalid' is not known here"):
        sg.Server({"worker": ["nowhere.invalid:2222"]})


def test_name_that_others_cannot_reach_is_warned_of() -> None:
    (port,) = free_ports(1)
    with pytest.warns(
        ClusterWarning, match=r"the name 'localhost' of worker/0 resolves to .*127.0.0.1.* on this machine"
    ):
        sg.Server({"worker": [f"localhost:{port}", "10.1.2.3:1"]}, "worker", 0).stop()


def test_task_must_be_named_where_there_are_several() -> None:
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    with pytest.raises(ClusterSpecError, match="job_name must say which task this is; cluster has worker/0, worker/1"):
        sg.Server(cluster)
    with pytest.raises(ClusterSpecError, match="task_index must say which task of 'worker' this is"):
        sg.Server(cluster, "worker")
    with pytest.raises(ClusterSpecError, match="task worker/2 does not exist; cluster has worker/0, worker/1, ps/0"):
        sg.Server(cluster, "worker", 2)
    with pytest.raises(ClusterSpecError, match="worker/1 has no address, so it cannot listen"):
        sg.Server({"worker": ["127.0.0.1:1", None]}, "worker", 1)


def test_server_does_not_start_without_a_token_that_can_be_trusted(token_file: Path) -> None:
    token_file.chmod(0o644)
    before = listening_at(os.getpid())
    with pytest.raises(TokenError, match="run chmod 600"):
        sg.Server(workers(1))
    assert listening_at(os.getpid()) == before


def test_server_that_was_stopped_stays_so() -> None:
    server = sg.Server(workers(1), start=False)
    server.start()
    server.start()
    server.stop()
    server.stop()
    server.join(timeout_s=PATIENCE_S)
    with pytest.raises(ClusterError, match="was stopped; make a new one"):
        server.start()


@pytest.fixture
def task(forked_tasks: None) -> Iterator[TaskProcess]:
    with started(1) as (made,):
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_join_ends_with_a_signal(task: TaskProcess, number: signal.Signals) -> None:
    task.ask(f"listen({workers(1)!r}, 'worker', 0)")
    before = task.ask("str(__import__('signal').getsignal(15))")
    task.send("server.join()")
    task.send("'after'")  # is read once it no longer waits
    wait_until_it_waits(task)
    task.signal(number)
    assert task.value() is None
    assert task.value() == "after"
    assert task.ask("str(__import__('signal').getsignal(15))") == before
    assert listening_at(task.pid) == set()


def wait_until_it_waits(task: TaskProcess) -> None:
    """Until the process handles SIGTERM itself: it has come to `join` then."""
    for _ in range(int(PATIENCE_S * 100)):
        status = Path(f"/proc/{task.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if caught & 1 << (signal.SIGTERM - 1):
            return
        time.sleep(0.01)
    raise AssertionError("it never waited in join")


def test_cluster_can_be_told_to_stop(task: TaskProcess) -> None:
    cluster = workers(3)
    task.ask(f"listen({cluster!r}, 'worker', 1)")
    task.send("server.join()")
    # The third task never came; the others are told all the same.
    assert sg.Server(cluster, "worker", 0).stop_cluster() == ["worker/1", "worker/0"]
    assert task.value() is None
