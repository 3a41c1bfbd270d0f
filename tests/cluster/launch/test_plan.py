import json
import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from stratagem.cluster.launch.environment import Offer, tasks_here
from stratagem.cluster.launch.plan import LaunchPlan, Machine, Order, make_plan
from stratagem.cluster.launch.ports import Ports
from stratagem.cluster.launch.user_program import UserProgram
from stratagem.devices.host import Host
from stratagem.devices.inventory import Inventory
from stratagem.errors import LaunchError

ENDPOINT = "10.0.0.1:2222"
SECRET = "/folder/of/token"  # noqa: S105  # a path


class EightCores(Host):
    def cores(self) -> tuple[int, ...]:
        return tuple(range(8))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserProgram:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "train.py").touch()
    return UserProgram(str(tmp_path / "train.py"))


def plan_of(program: UserProgram, **order: object) -> LaunchPlan:
    return make_plan(Order(program, **order), Inventory(host=EightCores()))  # type: ignore[arg-type]


def test_workers_and_chief_have_equal_shares_of_the_cores(program: UserProgram) -> None:
    plan = plan_of(program, num_workers=3, chief=True, num_ps=1, evaluator=True)
    assert plan.names() == ["chief/0", "worker/0", "worker/1", "worker/2", "ps/0", "evaluator/0"]
    assert [seat.cores for seat in plan.seats] == [(0, 1), (2, 3), (4, 5), (6, 7), (), ()]


def test_only_worker_has_all_cores(program: UserProgram) -> None:
    assert [seat.cores for seat in plan_of(program, num_workers=1, num_ps=2).seats] == [(), (), ()]


@pytest.mark.parametrize(
    ("devices", "mask", "expected"),
    [
        (None, None, [("0", "1"), ("2", "3"), ()]),
        ("gpu:all", None, [("0", "1"), ("2", "3"), ()]),
        ("gpu:1", None, [("0",), ("1",), ()]),
        (None, "3,1", [("3",), ("1",), ()]),
        ("cpu:2", None, [None, None, ()]),
    ],
)
def test_workers_have_equal_shares_of_the_gpus(
    program: UserProgram, monkeypatch: pytest.MonkeyPatch, devices: str | None, mask: str | None, expected: list[object]
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:4")
    if mask:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert [seat.gpus for seat in plan_of(program, num_workers=2, num_ps=1, devices=devices).seats] == expected


def test_workers_see_all_gpus_when_there_are_too_few_and_none_were_asked_for(
    program: UserProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SIMULATE", "gpu:1")
    plan = plan_of(program, num_workers=2)
    assert [seat.gpus for seat in plan.seats] == [None, None]
    assert "2 training tasks see all 1 GPU(s): too few for one each" in plan.reasons


def test_machines_together_make_one_cluster(program: UserProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "77")  # of a launcher around this one
    offers = [
        Offer("first", {"chief": ["a:1"], "worker": ["a:2"], "ps": ["a:3"]}, "a:9"),
        Offer("second", {"worker": ["b:1", "b:2"], "ps": ["b:3"], "evaluator": [""]}, "b:9"),
    ]
    machine = Machine(1, 2, ENDPOINT)
    plan = plan_of(
        program, num_workers=2, num_ps=1, evaluator=True, machine=machine, devices="cpu:2", heartbeat_timeout_s=90.0
    )
    tasks = tasks_here(plan, offers, restart=1, token_file=SECRET)
    assert [task.name for task in tasks] == ["worker/1", "worker/2", "ps/1", "evaluator/0"]
    expected = {"chief": ["a:1"], "worker": ["a:2", "b:1", "b:2"], "ps": ["a:3", "b:3"]}
    for task in tasks:
        config = json.loads(task.environment["TF_CONFIG"])
        assert config["cluster"] == expected
        assert f"{config['task']['type']}/{config['task']['index']}" == task.name
        assert task.environment["STRATAGEM_TOKEN_FILE"] == SECRET
        assert task.environment["STRATAGEM_HEARTBEAT_TIMEOUT"] == "90"
        assert task.environment.get("TORCHELASTIC_RUN_ID") == ("first" if task.seat.trains else None)
        assert task.environment["TORCHELASTIC_RESTART_COUNT"] == "1"
    told = [
        [task.environment.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")]
        for task in tasks
    ]
    assert told == [["2", "0", "4", "2", "9"], ["3", "1", "4", "2", "9"], [None] * 5, [None] * 5]
    assert [task.environment.get("STRATAGEM_DEVICES") for task in tasks] == ["cpu:2", "cpu:2", None, None]


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ([{"worker": ["a:1"], "evaluator": [""]}, {"evaluator": [""]}], "one evaluator at most"),
        ([{"ps": ["a:1"]}, {"ps": ["b:1"]}], "no task would train"),
        ([{"worker": ["a:1"]}, {"worker": ["a:1"]}], "address a:1 is given for worker/0 and worker/1"),
    ],
)
def test_machines_that_make_no_cluster_are_refused(
    program: UserProgram, jobs: list[dict[str, list[str]]], words: str
) -> None:
    plan = plan_of(program, num_workers=0, num_ps=1, machine=Machine(0, 2, ENDPOINT))
    offers = [Offer("run", each, "a:9") for each in jobs]
    with pytest.raises(LaunchError, match=words):
        tasks_here(plan, offers, restart=0, token_file=SECRET)


def test_port_is_held_until_a_server_of_torch_takes_it() -> None:
    ports = Ports("127.0.0.1")
    try:
        address, other = ports.pick(), ports.pick()
        assert address != other
        port = int(address.removeprefix("127.0.0.1:"))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", port))
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    finally:
        ports.close()


def test_address_of_another_machine_is_refused() -> None:
    ports = Ports("192.0.2.1")
    with pytest.raises(LaunchError, match=r"tasks cannot listen at '192.0.2.1': .* --local-addr"):
        ports.pick()
    ports.close()
